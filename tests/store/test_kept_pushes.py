"""Owners are killed that ranks reach over gRPC: what such a rank has pushed is with its owners only, so it sends it
again."""

from __future__ import annotations

import random
import tempfile
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest
import torch

from rayzero.config.zero import HostPush
from rayzero.errors import StateLostError
from rayzero.protocol.messages import ModelSpec
from rayzero.slabs.sweep import SHARED_MEMORY, sweep
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.remote.remote_connection import RankTerms, RemoteConnection
from tests.support import needs

from .deaths import Owners, Run, differing, disturbed, random_kills, train, undisturbed
from .stores import TOKEN
from .test_succession import spec_of
from .toy import WAIT, flatten, initial_values

STEPS, KILLS = 16, 2
SHARES = {"grpc": (False, False), "mixed": (True, False)}
pytestmark = needs.signals_between_processes


@cache
def expected(accumulation_steps: int) -> Run:
    return undisturbed(spec(accumulation_steps, "undisturbed"), STEPS, train)


def spec(accumulation_steps: int, run: str) -> ModelSpec:
    return spec_of(run, accumulation_steps=accumulation_steps)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("seed", "ranks", "num_owners", "accumulation_steps"),
    [(0, "grpc", 1, 1), (1, "grpc", 2, 3), (2, "mixed", 2, 1), (3, "mixed", 1, 3)],
)
def test_ranks_send_again_what_a_dead_owner_had(
    seed: int, ranks: str, num_owners: int, accumulation_steps: int, slab_dir: Path
) -> None:
    ours = spec(accumulation_steps, f"kept{seed}")
    kills = random_kills(seed, num_owners, STEPS, KILLS)
    found = disturbed(slab_dir, ours, STEPS, train, kills, num_owners=num_owners, shares=SHARES[ranks])
    assert differing(ours, found, expected(accumulation_steps)) == []
    assert len(found.pauses) == KILLS


@pytest.mark.promise("recoverable", "accumulation")
@pytest.mark.parametrize(("accumulation_steps", "seed"), [(1, 0), (3, 0), (3, 1)])
def test_a_rank_that_shares_memory_with_every_owner_keeps_nothing_apart(
    accumulation_steps: int, seed: int, slab_dir: Path
) -> None:
    """What is in totals, and was given back by the ranks, outlives the owner."""
    ours = spec(accumulation_steps, f"beside{seed}")
    kills = random_kills(seed, 2, STEPS, KILLS)
    found = disturbed(slab_dir, ours, STEPS, train, kills, shares=(True, True))
    assert differing(ours, found, expected(accumulation_steps)) == []


@pytest.mark.promise("recoverable", "accumulation", "hosts")
@pytest.mark.spread(1)
@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize(("host_push", "seed"), [("always", 0), ("always", 1), ("never", 0)])
def test_rounds_go_on_with_the_successors_of_owners_on_two_hosts(
    owner: int, host_push: HostPush, seed: int, slab_dir: Path
) -> None:
    """Owner 0 is on the ranks' host, and sends their sums to owner 1 unless each rank sends its own."""
    ours, draws = spec(4, f"{host_push}{seed}{owner}"), random.Random(seed)
    kills = [(step, draws.random() * 0.03, owner) for step in (2, 6)]
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-other-") as other:
        found = disturbed(
            slab_dir,
            ours,
            STEPS,
            train,
            kills,
            shares=(True, True),
            other_host=Path(other),
            host_push=host_push,
            ranks_here=(0, 1),
        )
        assert differing(ours, found, expected(4)) == []
        assert len(found.pauses) == 2


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("loaded", [0, 2])
def test_an_owner_that_dies_before_all_values_are_loaded_is_refused_by_name(
    loaded: int, shared: bool, slab_dir: Path
) -> None:
    """Rank 0 no longer has the values of the units that it has loaded."""
    ours, owners = spec(1, "loading"), Owners(slab_dir, 1)
    share = slab_dir if shared else None
    connection = RemoteConnection(0, owners.addresses, RankTerms(token=TOKEN, share=share, outlives_owners=True))
    with closing(RankStore(connection)) as store:
        owners.stores = [store]
        store.attach(ours)
        values = initial_values(ours)
        for unit in ours.layout.units[:loaded]:
            store.load(unit.index, flatten(unit, values, torch.float32)).result(WAIT)
        waiting = store.published(2, 0)
        owners.kill(0)
        with pytest.raises(StateLostError, match=r"optimizer 0 .* has died before .* its successor lacks some: start"):
            waiting.result(WAIT)
    owners.close()
    sweep(slab_dir)
