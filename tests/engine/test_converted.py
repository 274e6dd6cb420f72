"""A run goes on from what another system has saved, and the other way round, with the same bits."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import rayzero
from rayzero import ZeroConfig
from rayzero.convert.conversion import convert, export_full
from rayzero.engine.context import RankContext
from rayzero.errors import CheckpointError
from rayzero.testing import run_ranks

from .models import Net, fit, prepared_copy, same_bits, seeded

STEPS = 3
CONFIG = ZeroConfig(shard_bytes=16 << 10, min_unit_bytes=1 << 12)
adamw = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, fused=True)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*_get_pg_default_device")


def run(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    fit(model, optimizer, range(first, first + STEPS), 0)


def resume(base: nn.Module, checkpoint: Path) -> dict[str, Tensor]:
    """STEPS more on one rank and three owners; the complete state."""

    def loop(context: RankContext) -> dict[str, Tensor]:
        model, optimizer = prepared_copy(base, adamw, CONFIG, resume=checkpoint, lr=0.5)
        assert context.step == STEPS
        run(model, optimizer, STEPS)
        return rayzero.full_state_dict(model)

    (state,) = run_ranks(loop, 1, 3)
    return state


@pytest.fixture
def plain() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """A model before training, and the model and its optimizer after STEPS of plain PyTorch."""
    base = seeded(Net)
    model = copy.deepcopy(base)
    optimizer = adamw(model.parameters())
    run(model, optimizer, 0)
    return base, model, optimizer


def test_a_run_goes_on_from_torchs_dcp(tmp_path: Path, plain: Any) -> None:
    base, model, optimizer = plain
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"app": {"model": weights, "optim": states}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "start", to="rayzero", max_bytes=50_000)
    resumed = resume(base, tmp_path / "start")  # its optimizer's lr comes from the checkpoint
    run(model, optimizer, STEPS)
    assert same_bits(resumed, model.state_dict())


def test_plain_pytorch_goes_on_from_a_run(tmp_path: Path, plain: Any) -> None:
    base, _, _ = plain

    def loop(context: RankContext) -> dict[str, Tensor]:
        model, optimizer = prepared_copy(base, adamw, CONFIG)
        run(model, optimizer, 0)
        rayzero.save_checkpoint(optimizer, tmp_path / "step-3")
        run(model, optimizer, STEPS)
        return rayzero.full_state_dict(model)

    (ours,) = run_ranks(loop, 1, 2)
    convert(tmp_path / "step-3", tmp_path / "dcp", to="dcp", max_bytes=50_000)
    model = copy.deepcopy(base)
    optimizer = adamw(model.parameters(), lr=0.5)
    weights, states = get_state_dict(model, optimizer)
    target = {"model": weights, "optim": states}
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optim"])
    run(model, optimizer, STEPS)
    assert same_bits(model.state_dict(), ours)


@pytest.mark.parametrize("to", ["rayzero", "hf", "dcp"])
def test_a_new_run_starts_from_the_weights_of_any_format(tmp_path: Path, plain: Any, to: str) -> None:
    base, _, _ = plain
    with torch.no_grad():
        base.norm.bias.fill_(0.25)
    run_ranks(partial(_save, base=base, directory=tmp_path / "saved"), 1, 2)
    source = convert(tmp_path / "saved", tmp_path / "other", to=to, max_bytes=20_000).path
    model, _ = prepared_copy(seeded(Net, seed=7), adamw, weights=source)
    assert same_bits(rayzero.full_state_dict(model), base.state_dict())


def _save(context: RankContext, base: nn.Module, directory: Path) -> None:
    _, optimizer = prepared_copy(base, adamw, CONFIG)
    rayzero.save_checkpoint(optimizer, directory)


def test_weights_without_moments_start_a_run_as_fresh(tmp_path: Path, plain: Any) -> None:
    base, _, _ = plain
    run_ranks(partial(_save, base=base, directory=tmp_path / "saved"), 1, 2)
    export_full(tmp_path / "saved", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "start", to="rayzero")
    results: list[dict[str, Tensor]] = []
    for options in ({"resume": tmp_path / "start"}, {"weights": tmp_path / "hf"}):
        model, optimizer = prepared_copy(seeded(Net, seed=7), adamw, **options)
        run(model, optimizer, 0)
        results.append(rayzero.full_state_dict(model))
    assert same_bits(*results)


def test_names_that_the_model_ties_must_have_one_value(tmp_path: Path, plain: Any) -> None:
    base, model, optimizer = plain
    weights, states = get_state_dict(model, optimizer)
    weights["head.weight"] = weights["head.weight"].clone().mul_(2)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "start", to="rayzero")
    with pytest.raises(CheckpointError, match=r"different values for 'head.weight' and 'embed.weight'"):
        rayzero.prepare(base, adamw(base.parameters()), resume=tmp_path / "start")
