"""Deaths while a checkpoint is written beside the training: the training's bits stay, and the checkpoint is complete or
not there at all."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import Batches, seeded
from engine.test_comeback import Seen, Small
from torch import nn
from torch.nn import functional as F

import rayzero
from rayzero import ZeroConfig
from rayzero.checkpoint import CheckpointReader
from rayzero.engine.context import RankContext
from rayzero.testing import run_ranks
from tests.support import needs
from tests.support.faults import Fault, Faults

from .disturbed import another_host, missed

pytestmark = needs.shared_memory

STEPS, SAVES = 6, (2, 5)


def train(context: RankContext, base: nn.Module, folder: Path) -> Any:
    """Two checkpoints beside the training, and the weights at its end."""
    torch.set_num_threads(1)  # the bits of a matrix product depend on it
    model, loader, seen = copy.deepcopy(base), Batches(context.rank), Seen()
    model, optimizer = rayzero.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), ZeroConfig(units=["Block", "Embedding"])
    )
    rayzero.track(loader=loader, seen=seen)
    batches = iter(loader)
    for step in range(context.step, STEPS):
        x, y = next(batches)
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in SAVES:
            rayzero.begin_checkpoint(optimizer, folder / "checkpoints" / f"step-{step + 1}")
    if context.saving is not None:
        context.saving.result()
    return rayzero.full_state_dict(model)


BASE = seeded(Small, 3)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights at the end, and the digest of each checkpoint."""
    folder = tmp_path_factory.mktemp("undisturbed")
    weights = run_ranks(functools.partial(train, base=BASE, folder=folder), 2, 2)
    return weights, {f"step-{step}": digest(folder / "checkpoints" / f"step-{step}") for step in SAVES}


def digest(checkpoint: Path) -> str:
    with CheckpointReader(checkpoint) as reader:
        reader.verify()
        return reader.manifest.digest


SLOW = Fault("optimizer 1", "owner.save", "delay", seconds=1.5)  # the first checkpoint is open for many steps

# name -> faults, the checkpoints that must be there, those that may be
CASES = {
    "owner": ([SLOW, Fault("optimizer 1", "owner.idle", nth=4)], {"step-5"}, set()),
    "lead": ([SLOW, Fault("optimizer 0", "owner.idle", nth=4)], {"step-5"}, set()),
    "rank": ([SLOW, Fault("rank 1", "rank.backward", nth=12)], {"step-2", "step-5"}, set()),
    "rank-as-it-goes-on": ([SLOW, Fault("rank 1", "rank.began-save")], {"step-2", "step-5"}, set()),
    "owner-as-it-is-asked": ([Fault("optimizer 1", "owner.begin-save")], {"step-5"}, {"step-2"}),
    "lead-as-ranks-ask": ([Fault("optimizer 0", "lead.begin-save", nth=2)], {"step-5"}, {"step-2"}),
    "lead-before-the-manifest": ([Fault("optimizer 0", "lead.before-manifest")], {"step-5"}, {"step-2"}),
    "lead-after-the-manifest": ([Fault("optimizer 0", "lead.after-manifest")], {"step-2", "step-5"}, set()),
}


ELSEWHERE = [f"{case}, over gRPC" for case in ("owner", "lead")]


@pytest.mark.promise("recoverable", "checkpoints")
@pytest.mark.spread(1)
@pytest.mark.parametrize("case", [*CASES, *ELSEWHERE])
def test_a_checkpoint_is_complete_or_not_there_and_training_keeps_its_bits(
    case: str, expected: Any, tmp_path: Path
) -> None:
    faults, there, perhaps = CASES[case.partition(",")[0]]
    (tmp_path / "faults").mkdir()
    asked = Faults(tmp_path / "faults", tuple(faults))
    one = functools.partial(train, base=BASE, folder=tmp_path)
    with another_host(*(("rank 0", "rank 1") if case in ELSEWHERE else ())) as hosts:
        found = run_ranks(one, 2, 2, "shm", True, stall_timeout=60.0, max_failures=2, faults=asked, hosts=hosts)
    weights, digests = expected
    assert missed(asked) == []
    for ours, theirs in zip(found, weights, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    complete = {path.name for path in (tmp_path / "checkpoints").iterdir() if not path.name.startswith(".")}
    assert there <= complete <= there | perhaps
    for name in complete:
        assert digest(tmp_path / "checkpoints" / name) == digests[name]
