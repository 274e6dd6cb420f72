"""What a new group of ranks may continue; that one does: tests/integrations/test_ray_train_deaths.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rayzero.cluster.continuation import Lost
from rayzero.cluster.group_owners import GroupOwners
from rayzero.cluster.processes.worker_groups import WorkerGroup
from rayzero.config import ZeroConfig
from rayzero.slabs.hold import held_in
from rayzero.store.shm.same_host import why_no_sharing


def group(name: str, run: str) -> WorkerGroup:
    return WorkerGroup(name=name, run=run, world_size=2, resume=None)


def owners(config: ZeroConfig, before: WorkerGroup | None) -> GroupOwners:
    placement = SimpleNamespace(plan=SimpleNamespace(num_optimizers=2))
    made = GroupOwners("r", config, placement, max_failures=3)  # type: ignore[arg-type]
    made._group, made._hold = before, made._new_hold()
    return made


@pytest.mark.parametrize(
    ("settings", "before", "why"),
    [
        ({}, None, "no group has begun before"),
        ({}, group("a", "first"), "it is of another run, second; the one before was of first"),
        ({"transport": "grpc"}, group("a", "second"), "share no memory"),
        pytest.param(
            {},
            group("a", "second"),
            "nothing of it is left in this host's shared memory",
            marks=pytest.mark.skipif(why_no_sharing() is not None, reason="no shared memory here"),
        ),
    ],
)
def test_a_group_that_can_continue_nothing_hears_why(
    settings: dict[str, str], before: WorkerGroup | None, why: str
) -> None:
    made = owners(ZeroConfig(**settings), before)  # type: ignore[arg-type]
    found = made._what_is_left(group("b", "second"))
    assert isinstance(found, Lost)
    assert why in found.why
    if made._hold is not None:
        made._hold.close()


@pytest.mark.skipif(why_no_sharing() is not None, reason="no shared memory here")
def test_what_is_left_is_held_until_the_owners_end() -> None:
    made = owners(ZeroConfig(), None)
    assert made._share is not None
    assert made._lineage in {held.lineage for held in held_in(made._share)}
    made._end(politely=True)
    assert made._lineage not in {held.lineage for held in held_in(made._share)}
