"""Where each process's exporter listens, what it asks, and where it is found when processes come and go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rayzero.cluster.actors.certificates import Certificates
from rayzero.cluster.actors.roster import Exporters, plan_exporters
from rayzero.cluster.run import Member
from rayzero.config import SecurityConfig, TelemetryConfig
from rayzero.security.metrics_access import MetricsAccess
from rayzero.telemetry.metric import Role
from rayzero.telemetry.scrape import Target

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


def test_every_process_is_named_by_role_and_index() -> None:
    targets = [s.target("x:1") for s in plan_exporters("demo", members(["h"] * 4), TelemetryConfig(), SHM).values()]
    assert targets == [
        Target(address="x:1", run="demo", role=Role.COORDINATOR, node="h"),
        Target(address="x:1", run="demo", role=Role.OPTIMIZER, node="h", index=0),
        Target(address="x:1", run="demo", role=Role.RANK, node="h", index=0),
        Target(address="x:1", run="demo", role=Role.RANK, node="h", index=1),
    ]


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


def test_without_telemetry_there_are_none() -> None:
    run = Exporters({}, "auto", OPEN)
    assert (run.of("rank 0"), run.again("coordinator"), run.targets) == (None, None, ())


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
