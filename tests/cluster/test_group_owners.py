"""What a new group of ranks may continue; that one does: tests/integrations/test_ray_train_deaths.py."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rayzero.cluster.actors.run_actors import RunActors
from rayzero.cluster.continuation import Lost
from rayzero.cluster.group_owners import GroupOwners
from rayzero.cluster.processes.worker_groups import WorkerGroup
from rayzero.cluster.run import Member
from rayzero.config import ZeroConfig
from rayzero.slabs.hold import held_in
from rayzero.store.file_counts import files_of_owner
from tests.support import needs


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
            marks=needs.shared_memory,
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


def test_a_group_whose_ranks_need_more_files_than_an_optimizer_may_open_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The optimizers were there before anybody knew how many ranks there are."""
    told: list[tuple[str, str]] = []
    made = owners(ZeroConfig(transport="grpc"), None)
    limit = files_of_owner(100, 2, 0)
    actors = RunActors("r", made._placement, None)  # type: ignore[arg-type]
    actors.members = {
        f"optimizer {i}": Member(who=f"optimizer {i}", pid=1, node=f"{i}", host="h", open_files=limit) for i in range(2)
    }
    made._actors, made._controller = actors, SimpleNamespace(addresses=())  # type: ignore[assignment]
    actors.certificates = SimpleNamespace(token="t", of_rank=lambda _: None)  # type: ignore[assignment]
    monkeypatch.setattr(made, "_tell", lambda call: None)
    made.groups = SimpleNamespace(
        fail=SimpleNamespace(remote=lambda name, why: told.append((name, why))),
        open=SimpleNamespace(remote=lambda name, _: told.append((name, "open"))),
    )
    made._open(replace(group("a", "first"), world_size=101))
    ((name, why),) = told
    assert name == "a"
    assert "optimizer 0 on node h may have" in why
    assert "with 101 ranks and 2 optimizers it may need" in why
    made._open(replace(group("b", "first"), world_size=100))
    assert told[1:] == [("b", "open")]


@needs.shared_memory
def test_what_is_left_is_held_until_the_owners_end() -> None:
    made = owners(ZeroConfig(), None)
    assert made._share is not None
    assert made._lineage in {held.lineage for held in held_in(made._share)}
    made._end(politely=True)
    assert made._lineage not in {held.lineage for held in held_in(made._share)}
