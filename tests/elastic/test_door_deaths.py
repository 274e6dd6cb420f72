"""Optimizer actors that copy, add and ask for hosts die, stop and come back, owners come and go, and no bit changes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import seeded
from torch import nn

from rayzero import ZeroConfig
from rayzero.testing import run_ranks
from tests.support import needs
from tests.support.faults import Fault

from .disturbed import OWNERS_ELSEWHERE, Disturbed, another_host
from .test_scaling_cases import UNITS, UP_AND_DOWN, Small, Training, assert_same

pytestmark = needs.shared_memory

_DOOR, _OWNER = "optimizer 2", "optimizer 1"  # on the ranks' host, without shards; on another host
COPIES = {
    "the door as it makes its memory": (Fault(_DOOR, "owner.mirror"),),
    "the door with nothing asked for": (Fault(_DOOR, "owner.copies", nth=2),),
    "the door in the middle of a unit": (Fault(_DOOR, "owner.copying", nth=5),),
    "the door with all bytes and nothing shown": (Fault(_DOOR, "owner.copied", nth=3),),
    "the door as it shows a shard": (Fault(_DOOR, "owner.shows", nth=4),),
    "the door and its successor": (
        Fault(_DOOR, "owner.copying", nth=3, life=0),
        Fault(_DOOR, "owner.copied", life=1),
    ),
    "the door as it is asked for what was written": (Fault(_DOOR, "owner.brings"),),
    "the door with half of what was written": (Fault(_DOOR, "owner.forgets"),),
    "the door stopped": (Fault(_DOOR, "owner.copied", "stop", nth=2),),
    "the door with a question": (Fault(_DOOR, "owner.takes-question", nth=3),),
    "the door with answers that no rank has": (Fault(_DOOR, "owner.answers", nth=2),),
    "the door stopped before it asks": (Fault(_DOOR, "owner.asks", "stop", nth=3),),
    "the lead with an answer, and a rank": (
        Fault("optimizer 0", "lead.norm", nth=2),
        Fault("rank 1", "rank.finished", nth=3),
    ),
    "a rank around a write": (Fault("rank 0", "rank.write"), Fault("rank 1", "rank.write-asked")),
    "an owner that is copied": (Fault(_OWNER, "owner.between-shards", nth=3),),
    "the lead and the door": (Fault("optimizer 0", "lead.after-record", nth=2), Fault(_DOOR, "owner.copies", nth=4)),
}
"""Around parameters that the host has copies of, and questions that the door asks for it."""

SUMS = {
    "the door with nothing added": (Fault(_DOOR, "owner.sums-up", nth=3),),
    "the door with a sum and nothing sent": (Fault(_DOOR, "owner.summed-up", nth=4),),
    "the door with a sum that was sent": (Fault(_DOOR, "owner.sent-sum", nth=5),),
    "the door that finds a rank that comes back": (
        Fault("rank 0", "rank.finished", nth=2),
        Fault(_DOOR, "owner.finds-ranks", nth=3),
    ),
    "a rank before it announces": (Fault("rank 1", "rank.announce", nth=6),),
    "a rank before it says how often it has pushed": (Fault("rank 1", "rank.tells-door", nth=2),),
    "a rank that has finished": (Fault("rank 1", "rank.finished", nth=3),),
    "an owner that reads a sum": (Fault(_OWNER, "owner.landing", nth=6),),
    "an owner with a decision, and a rank": (
        Fault(_OWNER, "owner.apply", nth=2),
        Fault("rank 0", "rank.finished", nth=2),
    ),
    "an owner, and the door as it sends again": (
        Fault(_OWNER, "owner.collect", nth=2),
        Fault(_DOOR, "owner.sends-again"),
    ),
    "all of them": (
        *(Fault(f"optimizer {owner}", "owner.collect", nth=2) for owner in range(2)),
        Fault(_DOOR, "owner.sent-sum", nth=4),
        *(Fault(f"rank {rank}", "rank.finished", nth=2) for rank in range(2)),
    ),
}
"""Around gradients that leave the host as one sum."""


@pytest.mark.spread(2, second=12)
@pytest.mark.parametrize("faults", [*COPIES.values(), *SUMS.values()], ids=[*COPIES, *SUMS])
def test_a_death_around_what_a_door_does_for_its_host_changes_no_bit(
    faults: tuple[Fault, ...], expected: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with another_host(*OWNERS_ELSEWHERE) as hosts:
        Disturbed(tmp_path, *faults, hosts=hosts, stall_timeout=20.0).changes_no_bit(expected, caplog)


def slowly(params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Steps that change few bits of bf16."""
    return torch.optim.AdamW(params, lr=1e-4 * lr)


CASES: dict[str, dict[str, Any]] = {
    "fp32": {"config": ZeroConfig(units=UNITS)},
    "bf16, units fetched for every use": {
        "config": ZeroConfig(units=UNITS, precision="bf16", gpu_param_memory_budget="96KiB")
    },
    "bf16, changes": {"config": ZeroConfig(units=UNITS, precision="bf16"), "make": slowly},
    "a frozen base, lossless": {
        "config": ZeroConfig(units=UNITS, precision="bf16", cpu_compression="lossless"),
        "frozen": ("embed", "layers.0"),
    },
    "two models": {"config": ZeroConfig(units=UNITS), "models": 2},
}


@pytest.mark.spread(1, second=6)
@pytest.mark.parametrize(
    "there",
    [
        ("optimizer 0", "optimizer 1", "optimizer 2"),
        ("optimizer 1", "optimizer 2", "optimizer 3"),
        ("optimizer 0 in life 1", "optimizer 1"),
    ],
    ids=["all elsewhere", "some elsewhere", "and one that moves there"],
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_owners_of_other_hosts_come_and_go_while_they_are_copied(
    case: dict[str, Any], there: tuple[str, ...], tmp_path: Path
) -> None:
    loop = Training(base=seeded(Small, 3), folder=tmp_path, wanted=UP_AND_DOWN, **case)
    plain = partial(Training, base=seeded(Small, 3), folder=tmp_path, wanted={}, **case)
    with another_host(*there) as hosts:
        found = run_ranks(loop, 2, 2, "shm", True, max_failures=1, run_dir=tmp_path, stall_timeout=60.0, hosts=hosts)
    assert_same(found, run_ranks(plain(), 2, 2))
