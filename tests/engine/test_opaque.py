"""Frozen Parameters whose bytes are not their values: codes of a quantized base, tables of integers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import rayzero
from rayzero import ZeroConfig
from rayzero.checkpoint import CheckpointReader
from rayzero.convert.conversion import convert, export_full
from rayzero.engine.context import RankContext, running_in
from rayzero.engine.full_values import load_checkpoint
from rayzero.engine.prepare import COMPUTE_DTYPES, plan_units
from rayzero.engine.start.initial_values import refuse_apart
from rayzero.errors import CheckpointError, UnsupportedError
from rayzero.layout.model_layout import ModelLayout
from rayzero.records import check_record
from rayzero.testing import Transport, run_ranks

from .models import same_bits, tight

WIDTH, DEPTH = 64, 4
STORAGES = [torch.uint8, torch.bfloat16, torch.float16, torch.float32]
SHARD = 1024  # bytes of master: several shards a unit


class Codes(nn.Parameter):
    """Two 4-bit codes a byte, in a storage of any dtype; the scale of each row lies on the object, as bitsandbytes'
    ``quant_state`` does."""

    scale: Tensor

    @property
    def rows(self) -> int:
        return len(self.scale)

    def __deepcopy__(self, memo: dict[int, Any]) -> Codes:
        copied = type(self)(self.detach().clone(), requires_grad=False)
        copied.scale = self.scale.clone()
        return copied


def encoded(weight: Tensor, storage: torch.dtype = torch.uint8, kind: type[nn.Parameter] = Codes) -> Any:
    scale = weight.abs().amax(dim=1) / 7
    codes = (weight / scale[:, None]).round().to(torch.int8).add(8).to(torch.uint8)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(-1, 1)
    param: Any = kind(packed.view(-1).view(storage).reshape(-1, 1), requires_grad=False)
    param.scale = scale
    return param


class Adapted(nn.Module):
    """A linear layer of codes, with a bias and a trained adapter of rank 4."""

    def __init__(self, storage: torch.dtype = torch.uint8) -> None:
        super().__init__()
        self.weight = encoded(torch.randn(WIDTH, WIDTH) / WIDTH**0.5, storage)
        self.bias = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.down = nn.Parameter(torch.randn(4, WIDTH) / 8)
        self.up = nn.Parameter(torch.zeros(WIDTH, 4))
        self.seen: list[type] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [type(self.weight)]
        packed = self.weight.view(-1).view(torch.uint8).view(self.weight.rows, -1)
        codes = torch.stack([packed & 15, packed >> 4], dim=2).view(self.weight.rows, -1)
        weight = ((codes.to(torch.int8) - 8) * self.weight.scale[:, None]).to(x.dtype)
        return x + torch.tanh(F.linear(x, weight, self.bias) + F.linear(F.linear(x, self.down), self.up))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.scale"] = self.weight.scale


def quantized(storage: torch.dtype = torch.uint8, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(Adapted(storage) for _ in range(DEPTH)))


def adapters(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def prepared(model: nn.Module, config: ZeroConfig | None = None, **given: Any) -> tuple[nn.Module, Any]:
    return rayzero.prepare(model, torch.optim.AdamW(adapters(model), lr=1e-2), config, **given)


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, optimizer: Any, steps: range = range(3), rank: int = 0) -> list[float]:
    losses = []
    for step in steps:
        loss = model(batch(step, rank)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain(model: nn.Module, precision: str = "fp32", ranks: int = 1) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses by rank and fp32 adapters of three steps of plain PyTorch, with fp32 masters of what computes in fewer
    bits. What is frozen and no ``Codes`` computes in the dtype of ``precision``, too."""
    model, dtype = copy.deepcopy(model), COMPUTE_DTYPES[precision]
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    masters = {name: nn.Parameter(param.detach().clone()) for name, param in trained.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2, fused=True)
    for param in model.parameters():
        if type(param) is nn.Parameter and param.dtype is torch.float32:
            param.data = param.data.to(dtype)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(3):
        sums: dict[str, Tensor] = {}
        for rank in range(ranks):
            loss = model(batch(step, rank).to(dtype)).float().square().mean()
            loss.backward()
            losses[rank].append(loss.item())
            for name, param in trained.items():
                grad, param.grad = param.grad.float(), None
                sums[name] = sums[name] + grad if name in sums else grad
        for name, master in masters.items():
            master.grad = sums[name] * (1 / ranks)
        optimizer.step()
        for name, param in trained.items():
            param.data.copy_(masters[name].data)
    return losses, {name: master.detach() for name, master in masters.items()}


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).clone()


def same_bytes(state: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """``same_bits`` for codes that are NaN as numbers."""
    return same_bits({n: bytes_of(value) for n, value in state.items()}, {n: bytes_of(v) for n, v in expected.items()})


def codes_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: bytes_of(param) for name, param in model.named_parameters() if isinstance(param, Codes)}


def has_codes(state: dict[str, Tensor], codes: dict[str, Tensor], dtype: torch.dtype) -> bool:
    return all(state[n].dtype is dtype and torch.equal(bytes_of(state[n]), value) for n, value in codes.items())


@pytest.fixture
def base() -> nn.Module:
    return quantized()


# ---- layout


def test_they_are_units_of_their_own_in_their_own_dtype(base: nn.Module) -> None:
    base[0].weight = encoded(torch.randn(WIDTH, WIDTH), torch.bfloat16)
    base[0].table = nn.Parameter(torch.arange(3), requires_grad=False)
    config = ZeroConfig(precision="bf16", cpu_compression="int8", keep_fp32=("1",))
    layout = plan_units(base, config).layout
    found = {unit.name: (unit.dtype, unit.codec, unit.opaque) for unit in layout.units}
    expected = {
        "0": (torch.bfloat16, "none", False),
        "0:frozen": (torch.bfloat16, "int8", False),
        "0:opaque:bfloat16": (torch.bfloat16, "none", True),
        "0:opaque:int64": (torch.int64, "none", True),
        "1:float32": (torch.float32, "none", False),
        "1:frozen:float32": (torch.float32, "int8", False),
        "1:opaque:uint8": (torch.uint8, "none", True),
    }
    assert {name: found[name] for name in expected} == expected
    assert check_record(layout.to_json(), ModelLayout) == layout
    assert plan_units(quantized(torch.bfloat16), config).layout.digest != layout.digest


def test_a_trained_layout_has_no_integers(base: nn.Module) -> None:
    described = plan_units(base, ZeroConfig()).layout.to_json()
    for unit in described["units"]:
        unit.pop("opaque", None)
    with pytest.raises(ValueError, match="uint8"):
        check_record(described, ModelLayout)


# ---- what is computed


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_trains_as_plain_pytorch(precision: str, storage: torch.dtype, alone: RankContext) -> None:
    model = quantized(storage)
    losses, expected = plain(model, precision)
    codes = codes_of(model)
    model, optimizer = prepared(model, tight(model, precision=precision, shard_bytes=SHARD))
    assert train(model, optimizer) == losses[0]
    state = rayzero.full_state_dict(model)
    assert same_bits({name: state[name] for name in expected}, expected)
    assert has_codes(state, codes, storage)


@pytest.mark.parametrize("method", ["fp16", "bf16", "int8", "quantization", "lossless"])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_no_codec_changes_codes(storage: torch.dtype, method: str, alone: RankContext) -> None:
    model = quantized(storage)
    codes = codes_of(model)
    model, optimizer = prepared(model, ZeroConfig(precision="bf16", cpu_compression=method))
    train(model, optimizer, range(1))
    assert has_codes(rayzero.full_state_dict(model), codes, storage)


def of_rank(context: RankContext, base: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = prepared(copy.deepcopy(base))
    return train(model, optimizer, rank=context.rank), rayzero.full_state_dict(model)


@pytest.mark.parametrize(
    ("transport", "owners", "settings"),
    [
        ("inproc", 3, {}),
        ("shm", 2, {}),
        ("grpc", 2, {}),
        ("inproc", 2, {"offload_fraction": 0.5}),
    ],
)
def test_every_store_has_them(transport: Transport, owners: int, settings: dict[str, Any]) -> None:
    model = quantized(torch.bfloat16)
    model[1].weight = quantized(torch.uint8)[1].weight
    losses, expected = plain(model, "bf16", ranks=2)
    config = ZeroConfig(precision="bf16", shard_bytes=SHARD, **settings)
    found = run_ranks(lambda context: of_rank(context, model), 2, owners, transport, config=config)
    assert [ours for ours, _ in found] == losses
    codes = codes_of(model)
    for _, state in found:
        assert same_bits({name: state[name] for name in expected}, expected)
        assert all(torch.equal(bytes_of(state[name]), value) for name, value in codes.items())


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint16, torch.bool, torch.float8_e5m2])
def test_frozen_integers_and_small_floats_travel_as_bytes(
    dtype: torch.dtype, alone: RankContext, tmp_path: Path
) -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = torch.arange(WIDTH * 8, dtype=torch.uint8).remainder(2).view(-1, dtype.itemsize)
            self.table = nn.Parameter(table.view(dtype).view(-1), requires_grad=False)
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.table.view(torch.uint8)[:WIDTH]) * self.scale

    model = nn.Sequential(Picks(), Picks(), Picks())
    table = bytes_of(model[0].table)
    losses, expected = plain(model, "bf16")
    config = tight(model, precision="bf16", cpu_compression="int8")
    model, optimizer = prepared(model, config)
    assert train(model, optimizer) == losses[0]
    state = rayzero.full_state_dict(model)
    assert same_bits({name: state[name] for name in expected}, expected)
    assert state["0.table"].dtype is dtype
    assert torch.equal(bytes_of(state["0.table"]), table)
    rayzero.save_checkpoint(optimizer, tmp_path / "saved")
    with running_in(RankContext()):
        again, _ = prepared(nn.Sequential(Picks(), Picks(), Picks()), config, resume=tmp_path / "saved")
        assert same_bytes(rayzero.full_state_dict(again), state)


# ---- the objects


def test_a_parameter_keeps_its_class_and_attributes(base: nn.Module, alone: RankContext) -> None:
    """So does a copy, and a state dict has what the class adds."""
    weights, scales, codes = [layer.weight for layer in base], [layer.weight.scale for layer in base], codes_of(base)
    expected = {name: value.clone() for name, value in base.state_dict().items()}
    model, optimizer = prepared(base, tight(base))
    assert same_bits(dict(model.state_dict()), expected)
    train(model, optimizer, range(1))
    assert all(
        {kind.__name__ for kind in layer.seen} == {"Codes"} and issubclass(layer.seen[0], Codes) for layer in model
    )
    assert all(layer.weight is weight for layer, weight in zip(model, weights, strict=True))
    assert all(layer.weight.scale is scale for layer, scale in zip(model, scales, strict=True))
    assert all(isinstance(weight, Codes) and weight.rows == WIDTH for weight in weights)
    assert {type(weight).__name__ for weight in weights} == {"Codes"}
    copied = copy.deepcopy(model[0].weight)
    assert type(copied) is Codes
    assert copied.rows == WIDTH
    assert torch.equal(bytes_of(copied), codes["0.weight"])


def test_codes_written_by_hand_are_kept(base: nn.Module, alone: RankContext) -> None:
    other = quantized(seed=1)
    model, optimizer = prepared(base, tight(base))
    with torch.no_grad():
        model[2].weight.copy_(other[2].weight)
    train(model, optimizer, range(1))
    assert torch.equal(rayzero.full_state_dict(model)["2.weight"], other[2].weight)


def test_modules_of_codes_alone_get_their_inputs_as_they_are(alone: RankContext) -> None:
    """``keep_fp32`` casts the inputs of modules to the dtype of their parameters; codes say nothing of inputs."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = encoded(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight.scale

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Table(), nn.Linear(WIDTH, WIDTH))
    seen: list[torch.dtype] = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(args[0].dtype))
    model, _ = prepared(model, ZeroConfig(precision="bf16", keep_fp32=("0",)))
    model(batch(0))
    assert seen == [torch.float32]


# ---- where they come from


def saved(tmp_path: Path, model: nn.Module, config: ZeroConfig | None = None) -> Path:
    with running_in(RankContext()):
        _, optimizer = prepared(model, config)
        rayzero.save_checkpoint(optimizer, tmp_path / "saved")
    return tmp_path / "saved"


def named(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def as_file(model: nn.Module, folder: Path) -> Path:
    save_file(named(model), folder / "model.safetensors")
    return folder / "model.safetensors"


def widened(model: nn.Module) -> dict[str, Tensor]:
    return named(model) | {"3.weight": model[3].weight.detach().float()}


OTHER_BYTES = r"'0\.weight'.*Codes.*other bytes"
BF16, FP16 = partial(quantized, torch.bfloat16), partial(quantized, torch.float16)
SOURCES: dict[str, tuple[Callable[[], nn.Module], Callable[[Path], dict[str, Any]], str]] = {
    "a checkpoint over another base": (
        partial(quantized, seed=1),
        lambda d: {"resume": saved(d, quantized())},
        OTHER_BYTES,
    ),
    "a checkpoint of another storage": (
        FP16,
        lambda d: {"resume": saved(d, BF16())},
        r"'0\.weight'.*bfloat16.*float16",
    ),
    "weights of another dtype": (
        BF16,
        lambda d: {"weights": widened(BF16())},
        r"'3\.weight' is float32 there, and bfloat16 in the model",
    ),
    "weights over another base": (quantized, lambda d: {"weights": named(quantized(seed=1))}, OTHER_BYTES),
    "a file over another base": (quantized, lambda d: {"weights": as_file(quantized(seed=1), d)}, OTHER_BYTES),
    "a stream over another base": (
        quantized,
        lambda d: {"weights": iter(named(quantized(seed=1)).items())},
        OTHER_BYTES,
    ),
}


@pytest.mark.parametrize("what", SOURCES)
def test_codes_of_another_base_or_storage_are_refused(what: str, tmp_path: Path, alone: RankContext) -> None:
    """Scales are on the Parameter, not in what is read: codes would be read with those of another base."""
    make, given, says = SOURCES[what]
    with pytest.raises(CheckpointError, match=says):
        prepared(make(), **given(tmp_path))


@pytest.mark.parametrize("storage", [torch.uint8, torch.float16])
def test_a_checkpoint_loads_into_a_prepared_model(storage: torch.dtype, tmp_path: Path) -> None:
    path = saved(tmp_path, quantized(storage), ZeroConfig(precision="bf16"))
    with running_in(RankContext()):
        expected = rayzero.full_state_dict(prepared(quantized(storage), ZeroConfig(precision="bf16"))[0])
        model, optimizer = prepared(quantized(storage), ZeroConfig(precision="bf16"))
        train(model, optimizer)
        load_checkpoint(optimizer, path)
        assert same_bytes(rayzero.full_state_dict(model), expected)
    with running_in(RankContext()):
        model, optimizer = prepared(quantized(storage, seed=1), ZeroConfig(precision="bf16"))
        with pytest.raises(CheckpointError, match=r"'0\.weight'.*Codes.*other bytes"):
            load_checkpoint(optimizer, path)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("form", ["hf", "dcp", "rayzero"])
def test_conversions_and_exports_keep_codes(form: str, storage: torch.dtype, tmp_path: Path) -> None:
    model = quantized(storage)
    codes = codes_of(model)
    path = saved(tmp_path, model, ZeroConfig(precision="bf16"))
    exported = load_file(export_full(path, tmp_path / "out", dtype=torch.bfloat16))
    assert has_codes(exported, codes, storage)
    dtype = None if form == "rayzero" else torch.bfloat16
    convert(path, tmp_path / "converted", to=form, dtype=dtype)
    if form == "hf":
        assert has_codes(load_file(tmp_path / "converted" / "model.safetensors"), codes, storage)
        return
    if form == "dcp":
        convert(tmp_path / "converted", tmp_path / "back", to="hf")
        assert has_codes(load_file(tmp_path / "back" / "model.safetensors"), codes, storage)
        return
    with CheckpointReader(tmp_path / "converted") as reader:
        assert {unit.opaque for unit in reader.layout.units} == {False, True}
    convert(tmp_path / "converted", tmp_path / "back", to="hf", dtype=torch.float32)
    assert has_codes(load_file(tmp_path / "back" / "model.safetensors"), codes, storage)


@pytest.mark.parametrize("streamed", [False, True])
def test_weights_fill_them_and_meta_parameters_too(streamed: bool, alone: RankContext) -> None:
    model = quantized()
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    scales = [layer.weight.scale for layer in model]
    losses, _ = plain(model)
    with rayzero.empty_parameters():
        empty = quantized()
    for layer, scale in zip(empty, scales, strict=True):
        layer.weight.scale = scale
        layer.weight.__class__ = Codes
    ours, optimizer = prepared(empty, weights=iter(values.items()) if streamed else values)
    assert train(ours, optimizer) == losses[0]


def test_init_may_write_codes_that_are_no_numbers(alone: RankContext) -> None:
    """A value that is still NaN counts as not written, but for codes."""

    def init(module: nn.Module) -> None:
        if isinstance(module, Adapted):
            with torch.no_grad():
                for param in module.parameters():
                    param.zero_() if isinstance(param, Codes) else param.fill_(1.0)
                module.weight[0] = torch.nan

    with rayzero.empty_parameters():
        empty = quantized(torch.bfloat16)
    model, _ = prepared(empty, ZeroConfig(precision="bf16"), init=init)
    codes = rayzero.full_state_dict(model)["0.weight"].view(-1)
    assert codes[0].isnan()
    assert not codes[1:].any()


# ---- refusals


class Wrapped(torch.Tensor):
    """A tensor around another one, as torchao's are: it has no memory of its own."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        return NotImplemented


@pytest.mark.parametrize("trained", [False, True])
def test_a_wrapper_is_refused_by_name_and_class(trained: bool, alone: RankContext) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(Wrapped(torch.ones(4, 4, dtype=torch.int8)), requires_grad=trained)
    with pytest.raises(UnsupportedError, match=r"'1\.weight' is a .*test_opaque\.Wrapped.*cpu_compression"):
        rayzero.prepare(model, torch.optim.AdamW(model[0].parameters()))


def test_codes_on_another_device_than_the_rank_are_refused(base: nn.Module) -> None:
    plan = plan_units(base, ZeroConfig())
    refuse_apart(plan, dict(base.named_parameters()), torch.device("cpu"))
    with pytest.raises(UnsupportedError, match=r"'0\.weight' is a .*Codes on cpu.*cuda:1.*to\("):
        refuse_apart(plan, dict(base.named_parameters()), torch.device("cuda:1"))


def test_a_dtype_that_no_file_holds_is_refused(alone: RankContext) -> None:
    model = nn.Linear(4, 4)
    model.table = Codes(torch.zeros(4, dtype=torch.complex128), requires_grad=False)
    with pytest.raises(UnsupportedError, match="'table' is complex128"):
        prepared(model)


@pytest.mark.parametrize("config", [ZeroConfig(precision="fp16"), ZeroConfig(precision="bf16", cpu_compression="int8")])
def test_codes_in_a_plain_parameter_are_refused_where_they_would_be_converted(
    config: ZeroConfig, alone: RankContext
) -> None:
    """Nothing tells them from floats, but that weights are no NaN, as some codes are (hqq's ``view_as_float``)."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    codes = torch.randint(0, 256, (WIDTH, WIDTH), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    model[0].codes = nn.Parameter(codes.view(torch.bfloat16), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"'0\.codes'.*NaN.*bfloat16.*class"):
        prepared(model, config)
    model, _ = prepared(model, ZeroConfig(precision="bf16"))
    assert torch.equal(bytes_of(rayzero.full_state_dict(model)["0.codes"]), codes.view(-1))
