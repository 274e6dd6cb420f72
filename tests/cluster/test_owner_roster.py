"""Each owner gets its settings: at the start, as the successor of a dead one, and in the next epoch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import ray

from rayzero.cluster.actors import roster as spares_module
from rayzero.cluster.actors.certificates import Certificates
from rayzero.cluster.actors.roster import OwnerRoster, Spares
from rayzero.cluster.nodes.resources import ResourcePlan, Share
from rayzero.cluster.processes.owner_process import OwnerSettings
from rayzero.cluster.processes.process_exporter import LOOPBACK
from rayzero.cluster.run import Member
from rayzero.config import SecurityConfig
from rayzero.layout.rescale import Rescale
from rayzero.protocol.ownership import Ownership

PLAN = ResourcePlan(
    worker=Share(cpus=2, gpus=0, threads=2),
    optimizer=Share(cpus=3, gpus=0, threads=3),
    num_workers=2,
    num_optimizers=3,
    groups=(),
    bind_numa=False,
)


def roster_of(certificates: Certificates, beside: str | None = None, **others: Any) -> OwnerRoster:
    given = {"ownership": Ownership(3), "token": certificates.token} | others
    first = OwnerSettings(owner=0, num_owners=3, threads=3, memory_budget=None, share=None, norms_every=5, **given)
    return OwnerRoster(first, PLAN, certificates, beside)


def settings(roster: OwnerRoster, who: str) -> OwnerSettings:
    found = roster.of(who)
    assert found is not None
    return found


@pytest.fixture
def certificates() -> Certificates:
    return Certificates("demo", SecurityConfig())


def test_optimizers_come_first_and_owners_beside_ranks_have_the_ranks_device_and_threads(
    certificates: Certificates,
) -> None:
    roster = roster_of(certificates, "cuda:0", network="10.0.0.0/8")
    found = [settings(roster, who) for who in roster.names]
    assert [(own.owner, own.num_owners, own.threads, own.device) for own in found] == [
        (0, 5, 3, "cpu"),
        (1, 5, 3, "cpu"),
        (2, 5, 3, "cpu"),
        (3, 5, 2, "cuda:0"),
        (4, 5, 2, "cuda:0"),
    ]
    assert roster.names == ["optimizer 0", "optimizer 1", "optimizer 2", "rank 0", "rank 1"]
    assert all((own.norms_every, own.network, own.succeeds) == (5, "10.0.0.0/8", False) for own in found)
    assert None not in [own.tls for own in found]
    assert (roster.of("optimizer 3"), roster_of(certificates).of("rank 0")) == (None, None)


def test_a_successor_is_told_so_and_gets_its_own_certificate(certificates: Certificates) -> None:
    roster = roster_of(certificates)
    before, successor = settings(roster, "optimizer 1"), roster.of_successor(1)
    assert replace(successor, succeeds=False, tls=None) == replace(before, tls=None)
    assert successor.succeeds
    assert successor.tls not in (None, before.tls)


def test_the_next_epoch_is_that_of_all_who_take_a_place_later(certificates: Certificates) -> None:
    roster = roster_of(certificates, "cpu")
    roster.listen(dict.fromkeys(roster.names, LOOPBACK))
    next_one = Ownership(3).then(Rescale.to(4, 3))
    joins = roster.of_joining(3, next_one)
    assert (joins.owner, joins.num_owners, joins.ownership, joins.succeeds) == (3, 6, next_one, True)
    roster.listen({"optimizer 3": "10.0.0.7"})
    roster.begin_epoch(next_one)
    assert roster.names == ["optimizer 0", "optimizer 1", "optimizer 2", "optimizer 3", "rank 0", "rank 1"]
    assert (roster.host("optimizer 3"), "optimizer 3" in roster.on_loopback) == ("10.0.0.7", False)
    for owner in range(4):
        assert (roster.of_successor(owner).num_owners, roster.of_successor(owner).ownership) == (6, next_one)
    roster.begin_epoch(next_one.then(Rescale.to(3, 4)))
    assert (len(roster.names), roster.of("optimizer 3")) == (5, None)


def test_an_optimizer_without_shards_has_one_thread_and_the_number_behind_those_with_shards(
    certificates: Certificates,
) -> None:
    roster = roster_of(certificates, ownership=Ownership(4, doors=1))
    found = [settings(roster, who) for who in roster.names]
    assert [(own.owner, own.num_owners, own.threads) for own in found][2:] == [(2, 4, 3), (3, 4, 1)]
    assert roster.with_shards == ["optimizer 0", "optimizer 1", "optimizer 2"]
    fewer = Ownership(4, doors=1).then(Rescale((0, None), 1))
    assert [roster.of_joining(owner, fewer).threads for owner in (0, 1)] == [3, 1]


def test_who_listens_at_its_node_is_not_on_loopback_any_more(certificates: Certificates) -> None:
    roster = roster_of(certificates)
    roster.listen(dict.fromkeys(roster.names, LOOPBACK))
    roster.listen({"optimizer 0": "10.0.0.7", "optimizer 2": "10.0.0.8"})
    assert roster.on_loopback == ["optimizer 1"]
    roster.leave("optimizer 1")
    assert roster.on_loopback == []


# ---- Spares: processes that wait to become successors, and die without a word before that.


@pytest.fixture
def spares(monkeypatch: pytest.MonkeyPatch) -> Spares:
    """One spare, whose calls are "up" and "dead"; the second fails."""

    def get(call: str) -> Member:
        if call == "dead":
            raise ray.exceptions.ActorDiedError
        return Member(who="spare", pid=7, node="n", host="h")

    monkeypatch.setattr(spares_module.ray, "get", get)
    made = Spares(1, ["n"], lambda owner: ("actor", ["up", "dead"]))
    made.fill()
    return made


def test_a_spare_that_is_up_is_given_once(spares: Spares) -> None:
    assert spares.give("n") is None, "it has not answered yet"
    assert spares.take("up") == Member(who="spare 0", pid=7, node="n", host="h")
    given: Any = spares.give("n")
    assert (given, spares.give("n"), spares.calls) == ("actor", None, {})


@pytest.mark.parametrize("calls", [("up", "dead"), ("dead", "up")])
def test_a_spare_that_has_died_is_none_in_whatever_order_its_calls_end(spares: Spares, calls: tuple[str, ...]) -> None:
    for call in calls:
        spares.take(call)
    assert (spares.members, spares.give("n"), spares.calls) == ([], None, {})
