"""Owners are killed that ranks reach over gRPC: what such a rank has pushed is with its owners only, so it sends it
again."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from rayzero.errors import StoreError
from rayzero.protocol.messages import ModelSpec
from rayzero.slabs.slab import sweep
from rayzero.store.shm.signals import available

from .deaths import Run, differing, disturbed, random_kills, train, undisturbed
from .test_succession import spec_of

STEPS, KILLS = 30, 2
SHARES = {"grpc": (False, False), "mixed": (True, False)}
pytestmark = pytest.mark.skipif(available() is not None, reason="no signals between processes here")


@cache
def expected(accumulation_steps: int) -> Run:
    return undisturbed(spec(accumulation_steps, "undisturbed"), STEPS, train)


def spec(accumulation_steps: int, run: str) -> ModelSpec:
    return spec_of(run, accumulation_steps=accumulation_steps)


@pytest.mark.parametrize(
    ("seed", "ranks", "num_owners", "accumulation_steps"),
    [(0, "grpc", 1, 1), (1, "grpc", 2, 2), (2, "mixed", 2, 1), (3, "mixed", 1, 2)],
)
def test_ranks_send_again_what_a_dead_owner_had(
    seed: int, ranks: str, num_owners: int, accumulation_steps: int, slab_dir: Path
) -> None:
    ours = spec(accumulation_steps, f"kept{seed}")
    kills = random_kills(seed, num_owners, STEPS, KILLS)
    found = disturbed(slab_dir, ours, STEPS, train, kills, num_owners=num_owners, shares=SHARES[ranks])
    assert differing(ours, found, expected(accumulation_steps)) == []
    assert len(found.pauses) == KILLS


def test_a_rank_that_keeps_nothing_ends_with_the_owner(slab_dir: Path) -> None:
    ours = spec(1, "forgotten")
    with pytest.raises(StoreError, match=r"optimizer 0 has died, and rank \d, .* keep_pushed=True lets a run go on"):
        disturbed(slab_dir, ours, STEPS, train, [(2, 0.0, 0)], num_owners=1, keep_pushed=False)
    sweep(slab_dir)


def test_a_rank_that_shares_memory_with_every_owner_keeps_nothing_apart(slab_dir: Path) -> None:
    ours = spec(1, "beside")
    found = disturbed(slab_dir, ours, STEPS, train, [(2, 0.0, 0)], shares=(True, True), keep_pushed=False)
    assert differing(ours, found, expected(1)) == []
