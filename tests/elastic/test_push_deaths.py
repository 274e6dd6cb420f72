"""Ranks whose gradients leave their host as one sum die, stop and come back, their owners too, and no bit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import needs
from tests.support.faults import Fault

from .disturbed import OWNERS_ELSEWHERE, Disturbed, another_host

pytestmark = needs.shared_memory

_DOOR = "optimizer 2"  # on the ranks' host, without shards
DEATHS = {
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
    "an owner that reads a sum": (Fault("optimizer 1", "owner.landing", nth=6),),
    "an owner with a decision, and a rank": (
        Fault("optimizer 1", "owner.apply", nth=2),
        Fault("rank 0", "rank.finished", nth=2),
    ),
    "an owner, and the door as it sends again": (
        Fault("optimizer 1", "owner.collect", nth=2),
        Fault(_DOOR, "owner.sends-again"),
    ),
    "all of them": (
        *(Fault(f"optimizer {owner}", "owner.collect", nth=2) for owner in range(2)),
        Fault(_DOOR, "owner.sent-sum", nth=4),
        *(Fault(f"rank {rank}", "rank.finished", nth=2) for rank in range(2)),
    ),
}


@pytest.mark.spread(1, second=6)
@pytest.mark.parametrize("faults", DEATHS.values(), ids=DEATHS)
def test_a_death_around_the_sums_of_a_host_changes_no_bit(
    faults: tuple[Fault, ...], expected: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with another_host(*OWNERS_ELSEWHERE) as hosts:
        Disturbed(tmp_path, *faults, hosts=hosts, stall_timeout=20.0).changes_no_bit(expected, caplog)
