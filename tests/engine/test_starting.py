"""A model that fits nowhere whole starts: from files, from tensors as they come, from init, from rank 0."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.errors import CheckpointError, ConfigError, RayZeroError, UnsupportedError
from rayzero.testing import run_ranks

from .models import Block, Net, fit, same_bits, seeded, token_loss, tokens


class Normed(Net):
    """Net with persistent buffers (batch statistics) and a table that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(8)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 64), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.table.mean() + self.batch_norm(self.embed(tokens)).mean()


def empty(build: Callable[[], nn.Module] = Net) -> nn.Module:
    with rayzero.empty_parameters():
        return build()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def start(model: nn.Module, **given: Any) -> dict[str, Tensor]:
    """Prepare, and read what the owners got."""
    model, _ = rayzero.prepare(model, sgd(model), **given)
    return rayzero.full_state_dict(model)


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """A state without tied duplicates: what safetensors files hold."""
    return {name: t for name, t in model.state_dict().items() if name != "head.weight"}


def saved(model: nn.Module, path: Path) -> Path:
    save_file(plain_state(model), path)
    return path


def sharded_directory(model: nn.Module, directory: Path) -> Path:
    """A Hugging Face directory of two files and an index."""
    state = plain_state(model)
    halves = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for i, name in enumerate(state):
        halves[sorted(halves)[i % 2]][name] = state[name]
    for file, tensors in halves.items():
        save_file(tensors, directory / file)
    placed = {name: file for file, tensors in halves.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return directory


# ---- an empty model ---------------------------------------------------------------------------------------------


def test_a_model_built_empty_has_shapes_ties_and_real_buffers_but_no_memory_and_draws_no_numbers() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model = empty(Normed)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(param.is_meta and type(param) is nn.Parameter for param in model.parameters())
    assert model.head.weight is model.embed.weight
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in Normed().parameters())
    assert torch.equal(model.table, torch.linspace(0.5, 1.5, 64))
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_parameter_registered_twice_stays_one_and_keeps_what_was_set_on_it() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = nn.Parameter(torch.ones(3), requires_grad=False)
            both.tag = "mine"
            self.a, self.b = nn.ParameterList([both]), nn.ParameterList([both])

    model = empty(Twice)
    assert model.a[0] is model.b[0]
    assert (model.a[0].is_meta, model.a[0].requires_grad, model.a[0].tag) == (True, False, "mine")


def test_other_threads_build_whole_models_meanwhile() -> None:
    built: list[nn.Module] = []
    with rayzero.empty_parameters():
        thread = threading.Thread(target=lambda: built.append(Net()))
        thread.start()
        thread.join()
        with rayzero.empty_parameters():
            built.append(Net())
        built.append(Net())
    assert [model.head.weight.is_meta for model in built] == [False, True, True]


# ---- weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["file", "directory", "index", "mapping", "stream", "real model"])
def test_weights_reach_the_owners_from_every_kind_of_source(form: str, alone: RankContext, tmp_path: Path) -> None:
    base = seeded(Normed, 1)
    base.batch_norm.running_mean.fill_(3.0)
    base.batch_norm.num_batches_tracked.fill_(7)
    sharded_directory(base, tmp_path)
    sources = {
        "directory": tmp_path,
        "index": str(tmp_path / "model.safetensors.index.json"),
        "mapping": base.state_dict(),
        "stream": reversed(base.state_dict().items()),
    }
    source = sources.get(form) or saved(base, tmp_path / "w.safetensors")
    model = seeded(Normed, 2) if form == "real model" else empty(Normed)
    assert same_bits(start(model, weights=source), base.state_dict())
    assert torch.equal(model.table, base.table)


def test_16_bit_files_become_fp32_masters_and_frozen_units_keep_the_dtype_they_have_at_prepare(
    alone: RankContext, tmp_path: Path
) -> None:
    base = seeded(Net).bfloat16()
    model = empty()
    model.layers[1].requires_grad_(False).to(torch.bfloat16)
    path = saved(base, tmp_path / "w.safetensors")
    state = start(model, config=ZeroConfig(precision="bf16"), weights=path)
    assert state["layers.0.up.weight"].dtype == torch.float32
    assert state["layers.1.up.weight"].dtype == torch.bfloat16
    assert all(torch.equal(state[name].bfloat16(), value) for name, value in base.state_dict().items())


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tied_weight_is_found_under_either_name(name: str, stream: bool, alone: RankContext) -> None:
    base = seeded(Net, 1)
    state = plain_state(base)
    state = {name if key == "embed.weight" else key: value for key, value in state.items()}
    assert same_bits(start(empty(), weights=iter(state.items()) if stream else state), base.state_dict())


def test_names_can_be_changed_and_left_out_on_the_way(alone: RankContext) -> None:
    base = seeded(Net, 1)
    given = {f"model.{name}": value for name, value in base.state_dict().items()} | {"rotary": torch.ones(3)}
    for source in (given, given.items()):
        weights = rayzero.Weights(source, rename=lambda n: n.removeprefix("model.") if "." in n else None)
        assert same_bits(start(empty(), weights=weights), base.state_dict())


def test_without_strict_the_model_keeps_what_the_weights_lack(alone: RankContext) -> None:
    base = seeded(Net, 1)
    model = empty()
    model.layers[1] = copy.deepcopy(base.layers[1])  # an adapter, say: real
    given = {name: value for name, value in base.state_dict().items() if not name.startswith("layers.1.")}
    twin = copy.deepcopy(model)
    assert same_bits(
        start(model, weights=rayzero.Weights(given | {"x": torch.ones(1)}, strict=False)), base.state_dict()
    )
    assert same_bits(start(twin, weights=rayzero.Weights(given.items(), strict=False)), base.state_dict())


def changed(**changes: Tensor | None) -> dict[str, Tensor]:
    state = plain_state(seeded(Net))
    for name, value in changes.items():
        name = name.replace("__", ".")
        state.pop(name, None)
        if value is not None:
            state[name] = value
    return state


WRONG = [
    (changed(norm__bias=None), r"it lacks 'norm.bias'$"),
    (
        changed(layers__0__up__weight=None, layers__0__upp__weight=torch.ones(128, 64)),
        r"it lacks 'layers.0.up.weight' \(its nearest name is 'layers.0.upp.weight'\); the model lacks "
        r"'layers.0.upp.weight' \(the nearest is 'layers.0.up.weight'\)",
    ),
    (changed(norm__bias=torch.ones(3)), r"'norm.bias' has the shape \(3,\) there and \(64,\) in the model"),
    (
        changed(norm__bias=torch.ones(64, dtype=torch.int8)),
        "'norm.bias' is int8 there, and float32 in the model, which takes float32 or bfloat16 or float16",
    ),
    (changed(norm__bias=torch.ones(64, dtype=torch.float64)), "'norm.bias' is float64 there"),
    (changed(norm__bias=torch.ones(3), norm__weight=None), r"'norm.bias' has the shape .*; it lacks 'norm.weight'"),
    ({f"model.{name}": t for name, t in changed().items()}, r"name.removeprefix\('model.'\)\) every name fits"),
    (changed(head__weight=torch.ones(32, 64)), "'embed.weight' and 'head.weight' differ there, but are one tensor"),
]


@pytest.mark.parametrize(("state", "says"), WRONG, ids=range(len(WRONG)))
def test_weights_that_do_not_fit_are_refused_by_name_before_anything_changes(
    state: dict[str, Tensor], says: str, tmp_path: Path
) -> None:
    save_file(state, tmp_path / "w.safetensors")
    for source in (tmp_path / "w.safetensors", state):
        model = empty()
        with running_in(RankContext()) as context, pytest.raises(CheckpointError, match=says):
            rayzero.prepare(model, sgd(model), weights=source)
        assert not context._on_close  # no store was made
        assert all(param.is_meta and type(param) is nn.Parameter for param in model.parameters())


@pytest.mark.parametrize(("state", "says"), [WRONG[i] for i in (0, 2, 3, 5)], ids=(0, 2, 3, 5))
def test_a_stream_that_does_not_fit_is_refused_when_that_is_known_and_the_model_is_as_it_was(
    state: dict[str, Tensor], says: str, alone: RankContext
) -> None:
    model = empty()
    says = "'norm.bias' has the shape" if "norm.weight" in says else says
    with pytest.raises(CheckpointError, match=says):
        rayzero.prepare(model, sgd(model), weights=iter(state.items()))
    assert all(param.is_meta and type(param) is nn.Parameter for param in model.parameters())


def test_a_models_prefix_can_be_missing_in_the_file_too(alone: RankContext) -> None:
    model = nn.ModuleDict({"body": empty()})
    with pytest.raises(CheckpointError, match=r"rename=lambda name: 'body.' \+ name\) every name fits"):
        rayzero.prepare(model, sgd(model), weights=plain_state(seeded(Net)))


def _damaged(directory: Path) -> object:
    (directory / "w.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    return directory / "w.safetensors"


def _pickled(directory: Path) -> object:
    torch.save({}, directory / "pytorch_model.bin")
    return directory


def _incomplete(directory: Path) -> object:
    sharded_directory(seeded(Net), directory)
    (directory / "model-00002-of-00002.safetensors").unlink()
    return directory


def _no_index(directory: Path) -> object:
    (directory / "model.safetensors.index.json").write_text("{}")
    return directory


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda d: d / "nothing", r"no weights at .*nothing: give a safetensors file"),
        (_damaged, "cannot be read as safetensors"),
        (_pickled, "neither model.safetensors nor model.safetensors.index.json; it has pytorch_model.bin"),
        (_incomplete, "names 'model-00002-of-00002.safetensors', which does not exist"),
        (_no_index, "needs a weight_map"),
        (lambda d: 7, "weights must be a path, a mapping of named tensors"),
        (lambda d: {"a": 7}, "'a' is a int; pass a tensor"),
        (lambda d: {"a": torch.ones(2, device="meta")}, "'a' is a meta tensor, without values"),
        (lambda d: rayzero.Weights({"a": torch.ones(2), "b": torch.ones(2)}, rename=lambda n: "c"), "both 'a' and 'b'"),
        (lambda d: [("embed.weight", torch.ones(32, 64))] * 2, "'embed.weight' comes twice"),
        (
            lambda d: [("embed.weight", torch.ones(32, 64)), ("head.weight", torch.zeros(32, 64))],
            "names of 'embed.weight', which is tied in the model, have different values",
        ),
    ],
)
def test_sources_that_are_none_are_refused_by_name(
    make: Callable[[Path], Any], says: str, alone: RankContext, tmp_path: Path
) -> None:
    model = empty()
    with pytest.raises(RayZeroError, match=says):
        rayzero.prepare(model, sgd(model), weights=make(tmp_path))


# ---- init -------------------------------------------------------------------------------------------------------


def reset(module: nn.Module) -> None:
    """torch's own initialisation of each module."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def residual_init(module: nn.Module) -> None:
    """As GPT-2's: every Linear by itself, and a block's own visit writes to parameters further in; through .data."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            module.bias.data.zero_()
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_()
    elif isinstance(module, nn.LayerNorm):
        torch._foreach_zero_([p.detach() for p in module.parameters()])
    elif isinstance(module, Block):
        module.down.weight.data.normal_(std=0.01)


@pytest.mark.parametrize("init", [reset, residual_init])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_init_by_unit_draws_the_numbers_of_apply_on_a_whole_model(
    init: Callable[[nn.Module], None], dtype: torch.dtype, alone: RankContext
) -> None:
    expected = seeded(Net, 7).to(dtype)
    torch.manual_seed(5)
    expected.apply(init)
    after = torch.rand(4)
    model = empty(lambda: Net().to(dtype))
    torch.manual_seed(5)
    state = start(model, init=init)
    assert torch.equal(torch.rand(4), after)
    assert all(torch.equal(state[name], value.float()) for name, value in expected.state_dict().items())


def test_only_the_unit_that_is_visited_and_the_root_have_memory_during_init(alone: RankContext) -> None:
    model = empty(lambda: nn.Sequential(*[Block(64) for _ in range(6)]))
    real: list[int] = []

    def init(module: nn.Module) -> None:
        reset(module)
        with torch._C.DisableTorchFunctionSubclass():
            real.append(sum(not param.is_meta for param in model.parameters()))

    start(model, init=init)
    assert max(real) == len(list(model[0].parameters()))


def test_init_also_fills_buffers_on_meta(alone: RankContext) -> None:
    def init(module: nn.Module) -> None:
        reset(module)
        if isinstance(module, Normed):
            module.table.copy_(torch.linspace(0.5, 1.5, 64))

    with torch.device("meta"):
        model = Normed()
    torch.manual_seed(5)
    state = start(model, init=init)
    torch.manual_seed(5)
    expected = seeded(Normed, 7)
    torch.manual_seed(5)
    assert same_bits(state, expected.apply(init).state_dict())
    assert torch.equal(model.table, torch.linspace(0.5, 1.5, 64))
    model(tokens(0)[0])


def _forgets(module: nn.Module) -> None:
    if not isinstance(module, nn.LayerNorm):
        reset(module)


def _reaches_back(module: nn.Module) -> None:
    reset(module)
    if isinstance(module, Net):
        module.layers[2].up.weight.data.zero_()


def _exchanges(module: nn.Module) -> None:
    reset(module)
    if isinstance(module, nn.Embedding):
        module.weight = nn.Parameter(torch.ones(32, 64))


def _fails(module: nn.Module) -> None:
    reset(module)
    if isinstance(module, Net):
        raise ValueError("no more")


@pytest.mark.parametrize(
    ("init", "error", "says"),
    [
        (_forgets, UnsupportedError, "init left parameter 'layers.0.norm.weight' unwritten"),
        (_reaches_back, UnsupportedError, "visiting the model itself, used 'layers.2.up.weight' of unit 'layers.2'"),
        (_exchanges, UnsupportedError, "replaced the Parameter 'weight' of module 'embed'"),
        (_fails, ValueError, "no more"),
    ],
)
def test_an_init_that_cannot_be_right_is_refused_by_name_and_the_model_is_as_it_was(
    init: Callable[[nn.Module], None], error: type[Exception], says: str, alone: RankContext
) -> None:
    model = empty()
    params = dict(model.named_parameters())
    with pytest.raises(error, match=says):
        rayzero.prepare(model, sgd(model), init=init)
    assert all(param.is_meta and type(param) is nn.Parameter for param in params.values())


def test_init_that_forgets_a_buffer_is_refused(alone: RankContext) -> None:
    with torch.device("meta"):
        model = Normed()
    with pytest.raises(UnsupportedError, match=r"init left buffer 'table' unwritten.*empty_parameters"):
        rayzero.prepare(model, sgd(model), init=reset)
    assert model.table.is_meta


def test_weights_that_give_all_and_init_are_refused_together(alone: RankContext) -> None:
    model = empty()
    with pytest.raises(ConfigError, match="given weights= and init="):
        rayzero.prepare(model, sgd(model), weights=seeded(Net).state_dict(), init=reset)


def test_init_of_a_real_model_is_apply(alone: RankContext) -> None:
    expected = seeded(Net, 7)
    torch.manual_seed(5)
    expected.apply(_reaches_back)
    model = seeded(Net, 3)
    torch.manual_seed(5)
    assert same_bits(start(model, init=_reaches_back), expected.state_dict())


# ---- meta -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"weights": seeded(Normed).state_dict()}])
def test_meta_buffers_without_values_are_refused_by_name(given: dict[str, Any], alone: RankContext) -> None:
    model = seeded(Normed)
    model.table = model.table.to("meta")
    with pytest.raises(UnsupportedError, match=r"buffer 'table' is on the meta device.*empty_parameters"):
        rayzero.prepare(model, sgd(model), **given)


def test_rank_0_reads_the_file_and_every_rank_its_buffers(tmp_path: Path) -> None:
    base = seeded(Normed)
    base.batch_norm.running_mean.fill_(3.0)
    path = saved(base, tmp_path / "w.safetensors")

    def loop(ctx: RankContext) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = Normed()
        model.table = base.table.clone()
        return start(model, weights=path)

    assert all(same_bits(state, base.state_dict()) for state in run_ranks(loop, world_size=2))


def test_user_hooks_on_meta_parameters_fire_once_they_have_values(alone: RankContext) -> None:
    model = empty()
    seen: list[str] = []
    model.norm.weight.register_hook(lambda grad: seen.append("grad"))
    model.norm.bias.register_post_accumulate_grad_hook(lambda param: seen.append("accumulated"))
    model, _ = rayzero.prepare(model, sgd(model), weights=seeded(Net).state_dict())
    token_loss(model, tokens(0)).backward()
    assert sorted(seen) == ["accumulated", "grad"]


def test_a_run_that_resumes_needs_no_weights_and_reads_none(tmp_path: Path) -> None:
    base = seeded(Normed)

    def train(ctx: RankContext, model: nn.Module, steps: range, **given: Any) -> Any:
        model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters()), **given)
        fit(model, optimizer, steps, ctx.rank)
        return model, optimizer

    def whole(ctx: RankContext) -> dict[str, Tensor]:
        model, _ = train(ctx, copy.deepcopy(base), range(4))
        return rayzero.full_state_dict(model)

    def first(ctx: RankContext) -> None:
        _, optimizer = train(ctx, empty(Normed), range(2), weights=base.state_dict())
        rayzero.save_checkpoint(optimizer, tmp_path / "step-000002", {})

    def second(ctx: RankContext) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = Normed()
        model.table = base.table.clone()
        model, _ = train(ctx, model, range(2, 4), weights="there/is/none")
        return rayzero.full_state_dict(model)

    run_ranks(first, world_size=2)
    resumed = run_ranks(second, world_size=2, num_optimizers=1, resume=tmp_path / "step-000002")
    assert all(same_bits(a, b) for a, b in zip(resumed, run_ranks(whole, world_size=2), strict=True))


def test_a_meta_buffer_that_the_checkpoint_does_not_hold_is_filled_by_init_at_resume(
    alone: RankContext, tmp_path: Path
) -> None:
    base = seeded(Normed)
    _, optimizer = rayzero.prepare(base, sgd(base))
    rayzero.save_checkpoint(optimizer, tmp_path / "step-000000", {})

    def init(module: nn.Module) -> None:
        if isinstance(module, Normed):
            module.table.copy_(torch.linspace(0.5, 1.5, 64))

    with running_in(RankContext(resume=tmp_path / "step-000000")), torch.device("cpu"):
        model = empty(Normed)
        model.table = model.table.to("meta")
        model.batch_norm.running_mean = model.batch_norm.running_mean.to("meta")  # the checkpoint has it
        with pytest.raises(UnsupportedError, match="buffer 'table'"):
            rayzero.prepare(model, sgd(model))
        assert same_bits(start(model, init=init), rayzero.full_state_dict(base))
        assert torch.equal(model.table, base.table)
