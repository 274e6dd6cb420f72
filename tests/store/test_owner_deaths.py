"""Owners are killed while ranks of their host train on; their successors take over, and the ranks notice nothing but
time."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from rayzero.slabs.sweep import list_slabs
from tests.support import needs

from .deaths import Run, differing, disturbed, random_kills, train, undisturbed
from .test_succession import RANKS, spec_of

SEEDS, STEPS, KILLS = 3, 40, 2
pytestmark = needs.signals_between_processes


@cache
def expected() -> Run:
    return undisturbed(spec_of("undisturbed"), STEPS, train)


@pytest.mark.spread(1)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("num_owners", [1, 2])
def test_ranks_outlive_their_owners(num_owners: int, seed: int, slab_dir: Path) -> None:
    spec = spec_of(f"deaths{seed}")
    kills = random_kills(seed, num_owners, STEPS, KILLS)
    found = disturbed(slab_dir, spec, STEPS, train, kills, num_owners=num_owners, shares=(True,) * RANKS)
    assert differing(spec, found, expected()) == []
    assert len(found.pauses) == KILLS
    assert list_slabs(slab_dir) == []
