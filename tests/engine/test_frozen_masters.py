"""What is frozen comes back as it was given, whatever dtype the model computes in."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.checkpoint import CheckpointReader
from rayzero.convert.conversion import export_full
from rayzero.engine.context import RankContext, running_in
from rayzero.engine.prepare import plan_units
from rayzero.protocol.messages import COMPUTE, MASTER
from rayzero.testing import Transport, run_ranks

from .models import Net, fit, frozen_base, prepared_frozen, same_bits, seeded

BF16 = ZeroConfig(precision="bf16")


def frozen_of(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: param.detach().clone() for name, param in named if not param.requires_grad}


def part(state: dict[str, Tensor], names: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: state[name] for name in names}


# ---- exact, in every store, for every number of owners


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_frozen_values_come_back_as_they_were(precision: str, dtype: torch.dtype, alone: RankContext) -> None:
    model = frozen_base(dtype)
    given = frozen_of(model)
    model, optimizer = prepared_frozen(model, ZeroConfig(precision=precision))
    state = part(rayzero.full_state_dict(model), given)
    assert all(torch.equal(state[name].double(), value.double()) for name, value in given.items())
    fit(model, optimizer, range(2))
    after = rayzero.full_state_dict(model)
    assert same_bits(part(after, given), state)
    assert all(after[name].dtype is torch.float32 for name in after if name.endswith("bias"))


# ---- checkpoints, exports, resuming


@pytest.mark.promise("recoverable", "precisions")
@pytest.mark.parametrize(("first", "then"), list(product((torch.float32, torch.bfloat16), repeat=2)))
def test_checkpoints_hold_them_and_runs_resume_with_them(tmp_path: Path, first: torch.dtype, then: torch.dtype) -> None:
    """``first``, ``then``: of the base that is prepared."""
    given = frozen_of(frozen_base(first))
    rounded = {name: value.to(torch.bfloat16) for name, value in given.items()}
    kept = first is torch.float32
    with running_in(RankContext()):
        model, optimizer = prepared_frozen(frozen_base(first), BF16)
        fit(model, optimizer, range(2))
        rayzero.save_checkpoint(optimizer, tmp_path / "ck", {})
        fit(model, optimizer, range(2, 4))
        expected = rayzero.full_state_dict(model)
    with CheckpointReader(tmp_path / "ck") as reader:
        reader.verify()
        assert {kind for name in given for kind in reader.kinds(name)} == {MASTER if kept else COMPUTE}
    exported = load_file(export_full(tmp_path / "ck", tmp_path / "out"))
    assert same_bits(part(exported, given), given)
    cast = load_file(export_full(tmp_path / "ck", tmp_path / "cast", dtype=torch.bfloat16))
    assert same_bits(part(cast, given), rounded)

    with running_in(RankContext(resume=tmp_path / "ck")):
        model, optimizer = prepared_frozen(frozen_base(then), BF16)
        state = part(rayzero.full_state_dict(model), given)
        assert same_bits(state, {name: value.to(then) for name, value in given.items()})
        fit(model, optimizer, range(2, 4))
        after = rayzero.full_state_dict(model)
    trained = {name: value for name, value in expected.items() if name not in given}
    assert same_bits(part(after, trained), trained)


# ---- weights, writes and loads


@pytest.mark.parametrize("form", ["file", "mapping", "stream"])
def test_weights_to_start_from_are_kept_exactly(form: str, alone: RankContext, tmp_path: Path) -> None:
    base = seeded(Net)
    state = {name: value.detach().clone() for name, value in base.state_dict().items()}
    save_file({name: value.contiguous().clone() for name, value in state.items()}, tmp_path / "w.safetensors")
    source = {"file": tmp_path / "w.safetensors", "mapping": state, "stream": iter(state.items())}[form]
    with rayzero.empty_parameters():
        model = Net()
    model.layers.requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    model, _ = rayzero.prepare(model, torch.optim.AdamW(trained), BF16, weights=source)
    assert same_bits(rayzero.full_state_dict(model), state)


def write_one(model: nn.Module, given: dict[str, Tensor]) -> None:
    with torch.no_grad():
        model.layers[1].up.weight[0, :3] = 0.3
    given["layers.1.up.weight"][0, :3] = torch.tensor(0.3).to(torch.bfloat16).float()


def write_under_full_parameters(model: nn.Module, given: dict[str, Tensor]) -> None:
    with rayzero.full_parameters(model, modify=True):
        model.layers[1].up.weight.data[0, :3] = 0.3
    given["layers.1.up.weight"][0, :3] = torch.tensor(0.3).to(torch.bfloat16).float()


def load_others(model: nn.Module, given: dict[str, Tensor]) -> None:
    """Values that the compute dtype rounds."""
    other = {name: value * 1.1 for name, value in given.items()}
    model.load_state_dict(other, strict=False)
    given.update(other)


@pytest.mark.parametrize("write", [write_one, write_under_full_parameters, load_others])
@pytest.mark.parametrize(
    ("transport", "num_optimizers", "on_host"),
    [("inproc", 1, 1.0), ("inproc", 2, 0.5), ("shm", 2, 1.0), ("grpc", 2, 1.0)],
)
def test_a_write_changes_what_was_written_and_rounds_nothing_else(
    write: Callable[..., None], transport: Transport, num_optimizers: int, on_host: float
) -> None:
    base = frozen_base()

    def loop(context: RankContext) -> None:
        model = copy.deepcopy(base)
        given = frozen_of(model)
        model, optimizer = prepared_frozen(model, None)
        write(model, given)
        assert same_bits(part(rayzero.full_state_dict(model), given), given)  # before the owners have it
        fit(model, optimizer, range(2), context.rank)
        assert same_bits(part(rayzero.full_state_dict(model), given), given)

    config = BF16.replace(shard_bytes=4096, offload_fraction=on_host)
    run_ranks(loop, 2, num_optimizers, transport, config=config)


# ---- without masters


@pytest.mark.parametrize("config", [BF16, ZeroConfig()])
def test_what_loses_nothing_is_said_nothing_of_and_has_no_master(
    config: ZeroConfig, alone: RankContext, caplog: pytest.LogCaptureFixture
) -> None:
    model = frozen_base(torch.bfloat16)
    assert not any(unit.frozen_master for unit in plan_units(model, config).layout.units)
    with caplog.at_level(logging.WARNING, "rayzero.engine.prepare"):
        prepared_frozen(model, config)
    assert not caplog.records


def test_masters_are_planned_for_and_kept_by_owners_alone(alone: RankContext) -> None:
    sizes = []
    for dtype in (torch.float32, torch.bfloat16):
        _, optimizer = prepared_frozen(frozen_base(dtype), BF16)
        sizes.append(optimizer.engine.store.connection.owners.services[0].planned_bytes)
    units = plan_units(frozen_base(), BF16).layout.units
    assert sizes[0] - sizes[1] == 4 * sum(unit.numel for unit in units if unit.frozen_master)


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_a_model_of_16_bits_that_computes_in_fp32_is_told(
    dtype: torch.dtype, name: str, alone: RankContext, caplog: pytest.LogCaptureFixture
) -> None:
    for precision in ("fp32", name):
        caplog.clear()
        model = seeded(Net).to(dtype)
        rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), ZeroConfig(precision=precision))
        told = f"with ZeroConfig(precision={name!r}) they compute in 16 bits" in caplog.text
        assert told is (precision == "fp32")
