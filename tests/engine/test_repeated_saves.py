"""Several checkpoints between a step and the next forward, which a rank that has come back makes again or not."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

import rayzero
from rayzero.engine.context import RankContext
from rayzero.testing import Killed, run_ranks

from .models import Net, seeded, token_loss, tokens

STEPS, DIES_IN = 4, 2


def loop(context: RankContext, folder: Path, early: str, late: str, dies: str, beside: bool) -> None:
    """``early`` and ``late``: names of the checkpoints that begin and end an iteration; rank 1 dies after the one that
    ``dies`` names, or at a place of that name."""
    torch.set_num_threads(1)
    model = seeded(Net)
    model, optimizer = rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    rayzero.track()

    def reach(place: str, step: int) -> None:
        if (context.rank, context.life, step, place) == (1, 0, DIES_IN, dies):
            raise Killed

    def save(name: str, step: int) -> None:
        if beside:
            rayzero.begin_checkpoint(optimizer, folder / f"{name}-{step}").result()
        else:
            rayzero.save_checkpoint(optimizer, folder / f"{name}-{step}")
        reach(name, step)

    for step in range(context.step, STEPS):
        for name in early:
            save(name, step)
        loss = token_loss(model, tokens(step))
        reach("forward", step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for name in late:
            save(name, step)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    ("early", "late", "dies"),
    [
        ("a", "z", "a"),
        ("a", "z", "z"),
        ("ab", "yz", "forward"),
        ("ab", "yz", "a"),
        ("", "yz", "y"),
        ("", "yz", "z"),
    ],
)
def test_all_are_made_wherever_a_rank_dies(tmp_path: Path, early: str, late: str, dies: str, beside: bool) -> None:
    """Only the last one was known to be made: a rank that asked for an earlier one again ended the run."""
    run = functools.partial(loop, folder=tmp_path, early=early, late=late, dies=dies, beside=beside)
    run_ranks(run, 2, 2, stall_timeout=20.0, max_failures=1)
    found = {path.name: json.loads((path / "manifest.json").read_text())["step"] for path in tmp_path.iterdir()}
    assert found == {f"{name}-{step}": step + (name in late) for name in early + late for step in range(STEPS)}
