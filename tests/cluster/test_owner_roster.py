"""Each owner gets its settings: at the start, as the successor of a dead one, and in the next epoch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from rayzero.cluster import roster as spares_module
from rayzero.cluster.nodes.resources import ResourcePlan, Share
from rayzero.cluster.processes.owner_process import OwnerSettings
from rayzero.cluster.roster import Certificates, Exporters, OwnerRoster, Spares, plan_exporters
from rayzero.cluster.run import Member, actor_name, optimizer_name, rank_name
from rayzero.config import SecurityConfig, TelemetryConfig
from rayzero.elastic.members import MemberId, MemberKind
from rayzero.layout.shard_map import Rescale
from rayzero.protocol.ownership import Ownership
from rayzero.security.metrics_access import MetricsAccess
from rayzero.telemetry.metric import Role
from rayzero.telemetry.scrape import Target

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
    before, successor = settings(roster, "optimizer 1"), roster.of_joining(1, roster.ownership)
    assert replace(successor, succeeds=False, tls=None) == replace(before, tls=None)
    assert successor.succeeds
    assert successor.tls not in (None, before.tls)


def test_the_next_epoch_is_that_of_all_who_take_a_place_later(certificates: Certificates) -> None:
    roster = roster_of(certificates, "cpu")
    next_one = Ownership(3).then(Rescale.to(4, 3))
    joins = roster.of_joining(3, next_one)
    assert (joins.owner, joins.num_owners, joins.ownership, joins.succeeds) == (3, 6, next_one, True)
    roster.begin_epoch(next_one)
    assert roster.names == ["optimizer 0", "optimizer 1", "optimizer 2", "optimizer 3", "rank 0", "rank 1"]
    for owner in range(4):
        assert (
            roster.of_joining(owner, roster.ownership).num_owners,
            roster.of_joining(owner, roster.ownership).ownership,
        ) == (6, next_one)
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


# ---- Spares: processes that wait to become successors, and die without a word before that.


@pytest.fixture
def spares(monkeypatch: pytest.MonkeyPatch) -> Spares:
    """One spare, whose calls are "up" and "dead"; the second fails."""

    def get(call: str) -> Member:
        if call == "dead":
            raise ray.exceptions.ActorDiedError
        return Member(who="spare", pid=7, node="n", host="h")

    monkeypatch.setattr(spares_module.ray, "get", get)
    made = Spares(1, ["n"])
    made.add(0, "actor", ["up", "dead"])
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


# ---- exporters: where each listens, what it asks, where it is found when processes come and go


SHM = Path("/dev/shm")
OPEN = Certificates("demo", SecurityConfig(tls="never"))  # whose exporters ask nothing


def members(hosts: list[str]) -> dict[str, Member]:
    names = ["coordinator", "optimizer 0", "rank 0", "rank 1"]
    return {who: Member(who=who, pid=1, node=host, host=host) for who, host in zip(names, hosts, strict=True)}


def listeners(config: TelemetryConfig, hosts: list[str]) -> list[str]:
    return [f"{own.host}:{own.port}" for own in plan_exporters("demo", members(hosts), config, SHM).values()]


def test_a_run_on_one_node_listens_on_loopback_and_one_on_several_on_their_addresses() -> None:
    assert listeners(TelemetryConfig(), ["10.0.0.1"] * 4) == ["127.0.0.1:0"] * 4
    assert listeners(TelemetryConfig(bind="node"), ["10.0.0.1"] * 4) == ["10.0.0.1:0"] * 4
    two = ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.1"]
    assert listeners(TelemetryConfig(), two) == [f"{host}:0" for host in two]
    assert listeners(TelemetryConfig(bind="loopback"), two) == ["127.0.0.1:0"] * 4


def test_ports_follow_each_other_from_the_first_on() -> None:
    config = TelemetryConfig(port=9400, exporter_ports=9500)
    assert [port.rpartition(":")[2] for port in listeners(config, ["a"] * 4)] == ["9400", "9500", "9501", "9502"]


def made(config: TelemetryConfig, hosts: list[str], certificates: Certificates = OPEN) -> Exporters:
    """The exporters of a run, all of them open: each at the port that it asks for, or else at 40000 + its number."""
    planned = plan_exporters("demo", members(hosts), config, SHM)
    found = Exporters(planned, config.bind, certificates)
    for number, own in enumerate(planned.values()):
        found.opened([own.target(f"{own.host}:{own.port or 40000 + number}")])
    return found


def test_exporters_on_several_nodes_are_for_the_runs_own_tools_and_say_https() -> None:
    access = MetricsAccess("demo", None)
    run = Certificates("demo", SecurityConfig(), access)
    for hosts, protection, scheme in ((["a", "a", "b", "a"], access.own, "https"), (["a"] * 4, None, "http")):
        rank = made(TelemetryConfig(), hosts, run).of("rank 0")
        assert rank is not None
        assert rank.protection == protection
        assert rank.target("b:1").url("/metrics") == f"{scheme}://b:1/metrics"
        assert rank.target("b:1").discovered.get("__scheme__", "http") == scheme


def test_a_process_that_takes_a_place_later_asks_what_is_newest() -> None:
    access = MetricsAccess("demo", None)
    run = made(TelemetryConfig(), ["a", "a", "b", "a"], Certificates("demo", SecurityConfig(), access))
    access.own = replace(access.own, token="newer")
    rank, joins = run.of("rank 0"), run.for_owner(1, "c", beside_first=False, coming=[])
    assert rank is not None
    assert rank.protection == joins.protection == access.own


def test_an_owner_that_joins_has_the_first_port_behind_all_others() -> None:
    run = made(TelemetryConfig(port=9400, exporter_ports=9500), ["a"] * 4)
    first = run.for_owner(1, "a", beside_first=True, coming=[])
    second = run.for_owner(2, "b", beside_first=False, coming=[first])
    assert [(own.who, own.index, own.host, own.port) for own in (first, second)] == [
        ("optimizer 1", 1, "127.0.0.1", 9503),
        ("optimizer 2", 2, "b", 9504),
    ]
    free = made(TelemetryConfig(), ["a"] * 4).for_owner(1, "a", beside_first=True, coming=[])
    assert free.port == 0, "any free one, as the others have"


def test_an_owner_that_joins_elsewhere_listens_there_unless_all_listen_on_loopback() -> None:
    apart = ["a", "b", "a", "a"]
    for bind, beside_first, host in (("auto", True, "c"), ("auto", False, "c"), ("loopback", False, "127.0.0.1")):
        joins = made(TelemetryConfig(bind=bind), apart).for_owner(1, "c", beside_first=beside_first, coming=[])
        assert (joins.host, joins.node) == (host, "c")


def test_prometheus_finds_whoever_is_there_the_coordinator_first() -> None:
    run = made(TelemetryConfig(), ["a"] * 4)
    names = ["coordinator", "optimizer 0", "rank 0", "rank 1"]
    assert [target.who for target in run.targets] == names
    again = Target(address="127.0.0.1:7", run="demo", role=Role.RANK, node="a", index=0)
    run.opened([again])
    assert ([target.who for target in run.targets], run.targets[2]) == (names, again)
    joins = run.for_owner(1, "a", beside_first=True, coming=[])
    run.enter(joins, joins.target("127.0.0.1:8"))
    run.leave("optimizer 0")
    assert [target.who for target in run.targets] == ["coordinator", "rank 0", "rank 1", "optimizer 1"]
    assert (run.of("optimizer 0"), run.of("optimizer 1")) == (None, joins)


def test_another_coordinator_is_where_the_last_one_was() -> None:
    again = made(TelemetryConfig(), ["a"] * 4).again("coordinator")
    assert again is not None
    assert (again.host, again.port) == ("127.0.0.1", 40000)


def test_an_owner_beside_a_rank_is_in_the_ranks_actor() -> None:
    assert actor_name(MemberId(MemberKind.BESIDE, 3)) == rank_name(3) == actor_name(MemberId(MemberKind.RANK, 3))
    assert actor_name(MemberId(MemberKind.OWNER, 3)) == optimizer_name(3)
