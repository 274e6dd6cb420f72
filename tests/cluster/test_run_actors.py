"""What one process of each host is asked for all of it, without a Ray: of the run's folder, and of owners that join."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rayzero.cluster import run_actors as module
from rayzero.cluster.actor_calls import Tries
from rayzero.cluster.driver import _see_storage
from rayzero.cluster.run import Member, optimizer_name, rank_name
from rayzero.cluster.run_actors import RunActors
from rayzero.errors import ConfigError

FOLDER = Path("/shared/run")


@dataclass(eq=False)
class Call:
    answer: Any


@dataclass
class Actor:
    """A process on a host that sees the run's folder, or not, and reaches others, or not."""

    seeing: bool = True
    reaching: bool = True

    @property
    def sees(self) -> Any:
        return _method(lambda path: self.seeing and Path(path).parent == FOLDER)

    @property
    def listen(self) -> Any:
        return _method(lambda host: f"{host}:7")

    @property
    def tensor_address(self) -> Any:
        return _method(lambda address: f"{address} for tensors")

    @property
    def unreachable(self) -> Any:
        return _method(lambda addresses: {} if self.reaching else dict.fromkeys(addresses, "Connection refused"))


def _method(answer: Callable[[Any], Any]) -> Any:
    method = SimpleNamespace(remote=lambda argument: Call(answer(argument)))
    return SimpleNamespace(options=lambda **_: method)


def run_on(ranks: Sequence[str], owners: Sequence[str], *, without: Sequence[str] = ()) -> RunActors:
    """A run whose driver is on the node "head". Nodes by rank and by owner; ``without``: those that do not see the
    folder. A node "b/2" is another one at the address of "b"."""
    actors = RunActors("demo", places=None, certificates=None)  # type: ignore[arg-type]
    actors.driver_node = "head"
    nodes = {rank_name(i): node for i, node in enumerate(ranks)} | {optimizer_name(i): n for i, n in enumerate(owners)}
    actors.members = {
        who: Member(who=who, pid=7, node=node, host=f"address of {node[0]}") for who, node in nodes.items()
    }
    handles = {who: Actor(node not in without) for who, node in nodes.items()}
    actors.ranks = {who: actor for who, actor in handles.items() if who.startswith("rank")}
    actors.owners = {who: actor for who, actor in handles.items() if who.startswith("optimizer")}
    actors.ask = lambda calls, timeout_s: {who: call.answer for who, call in calls.items()}  # type: ignore[method-assign]
    actors._roster = SimpleNamespace(names=list(actors.owners))  # type: ignore[assignment]
    return actors


@pytest.mark.parametrize(
    ("ranks", "owners", "without", "hosts"),
    [
        (["head"], ["head"], [], []),
        (["head"], ["b"], [], []),
        (["head"], ["b"], ["b"], ["address of b"]),
        (["b"], ["head"], ["b"], ["address of b"]),
        (["c", "head"], ["b", "head"], ["b", "c"], ["address of b", "address of c"]),
        (["b", "b"], ["b"], ["b"], ["address of b"]),  # the driver is alone on its host, which has no CPUs
        (["b", "b"], ["b"], [], []),
        (["b/1"], ["b/2"], ["b/1", "b/2"], ["address of b"]),
        ([], ["b"], ["b"], ["address of b"]),  # the ranks are another library's
    ],
)
def test_hosts_that_do_not_see_the_runs_folder_are_found_wherever_the_driver_is(
    ranks: list[str], owners: list[str], without: list[str], hosts: list[str]
) -> None:
    assert run_on(ranks, owners, without=without).hosts_without(FOLDER / "run.json") == hosts


def test_a_run_that_saves_checkpoints_is_refused_where_its_driver_would_not_find_them() -> None:
    actors, said = run_on(["b", "b"], ["b"], without=["b"]), list[str]()
    stopped: list[float] = []
    actors.stop_owners = stopped.append  # type: ignore[assignment,method-assign]
    request: Any = SimpleNamespace(directory=SimpleNamespace(path=FOLDER), on_phase=said.append, saves_checkpoints=True)
    with pytest.raises(ConfigError) as refused:
        _see_storage(request, actors)
    assert len(stopped) == 1, "so that no owner leaves its lobby on another host"
    assert str(refused.value) == (
        "address of b cannot see /shared/run, so no checkpoint can be completed in it; set run.storage_path to a "
        "folder that all hosts share, the driver's too"
    )
    request.saves_checkpoints = False
    _see_storage(request, actors)
    assert said == [str(refused.value)], "a loop that may save none"


def test_a_run_whose_hosts_do_not_reach_its_owners_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda call: call.answer)
    actors = run_on(["a", "b"], ["b", "b"])
    actors._require_reached(["b:0", "b:1"])
    actors.ranks["rank 0"].reaching = False
    with pytest.raises(ConfigError) as refused:
        actors._require_reached(["b:0", "b:1"])
    assert str(refused.value).startswith(
        "the host address of a cannot connect to optimizer 0 at b:0: Connection refused (and 3 more such pairs); "
    )


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Who was to try what: host and addresses by process."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}

    def note(tries: Sequence[Tries]) -> None:
        for each in tries:
            found[each.who] = each.host, tuple(to.address for to in each.listeners)

    monkeypatch.setattr(module, "ReachTrial", note)
    return found


def joining(node: str) -> Any:
    member = Member(who="optimizer 2", pid=8, node=node, host=f"address of {node}")
    process = "optimizer 2 (joins)"
    return SimpleNamespace(who="optimizer 2", process=process, actor=Actor(), node=node, member=member)


def test_every_other_host_tries_an_owner_that_joins_and_that_one_all_others(tried: dict[str, Any]) -> None:
    """A rank tries only where no owner is: its loop may be busy."""
    run_on(["a", "b", "c"], ["b", "c"]).try_to_reach(joining("c"), "c:2", ["b:0", "c:1"])
    assert tried == {
        "rank 0": ("address of a", ("c:2",)),
        "optimizer 0": ("address of b", ("c:2",)),
        "optimizer 2 (joins)": ("address of c", ("b:0", "c:1")),
    }


def test_nobody_tries_where_all_are_on_one_host(tried: dict[str, Any]) -> None:
    actors = run_on(["a"], ["a"])
    actors._on_loopback = True
    actors.try_to_reach(joining("a"), "127.0.0.1:2", ["127.0.0.1:0"])
    assert tried == {}


def test_owners_listen_at_their_nodes_too_once_there_are_to_be_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda calls, timeout: [call.answer for call in calls])
    actors = run_on(["a"], ["a", "a"])
    actors._on_loopback = True
    assert actors.listen_at_nodes(["127.0.0.1:0", "127.0.0.1:1"]) == ("address of a:7", "address of a:7")
    assert actors.listen_at_nodes(["address of a:7", "address of a:8"]) == ("address of a:7", "address of a:8")
