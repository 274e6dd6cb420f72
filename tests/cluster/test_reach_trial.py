"""What comes of the calls in which processes try to reach owners. But for the last test, calls are texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray

from rayzero.cluster.actor_calls import ReachTarget, ReachTrial, Tries, actor_class, control
from rayzero.errors import ConfigError

REFUSED = "Connection refused"


def raised(error: BaseException) -> BaseException:
    """What ``ray.get`` raises of a call that has raised."""
    made: BaseException = ray.exceptions.RayTaskError("unreachable", "Traceback\n...", error).as_instanceof_cause()
    return made


@dataclass(frozen=True)
class Method:
    """An actor's method. ``given``: what it was called with."""

    call: str
    given: list[Any] = field(default_factory=list)

    def options(self, **_: Any) -> Method:
        return self

    def remote(self, argument: Any) -> str:
        self.given.append(argument)
        return self.call


class Actor:
    """In place of a rank worker or an optimizer actor."""

    def __init__(self, who: str) -> None:
        self.unreachable, self.tensor_address = Method(f"{who} tries"), Method(f"{who} says")


def listens(owner: int) -> ReachTarget:
    return ReachTarget(f"optimizer {owner}", f"10.0.0.{owner}:50", Actor(f"optimizer {owner}"))


def tries(who: str, host: str, *owners: int) -> Tries:
    return Tries(who, host, Actor(who), tuple(map(listens, owners)))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What calls answer, by call: owners their ports for tensors, and whoever tries nothing that it does not reach."""
    found: dict[str, Any] = {f"optimizer {owner} says": f"10.0.0.{owner}:60" for owner in range(3)}
    found |= {f"rank {rank} tries": {} for rank in range(2)}

    def get(call: str) -> Any:
        if isinstance(found[call], BaseException):
            raise found[call]
        return found[call]

    monkeypatch.setattr(ray, "get", get)
    return found


def taken(*all_of: Tries) -> ReachTrial:
    """A trial whose calls have all ended."""
    trial = ReachTrial(all_of)
    while trial.calls:
        for call in trial.calls:
            trial.take(call)
    return trial


def refusal(*all_of: Tries) -> str:
    with pytest.raises(ConfigError) as refused:
        taken(*all_of).require()
    return str(refused.value)


def test_who_is_to_answer_is_named_and_nobody_tries_before_all_owners_have_said_their_ports(
    answers: dict[str, Any],
) -> None:
    first, second = tries("rank 0", "a", 0, 1), tries("rank 1", "b", 2)
    trial = ReachTrial([first, second])
    for owner in (0, 1, 2):
        assert list(trial.calls.values()) == [f"optimizer {other}" for other in range(owner, 3)]
        trial.take(f"optimizer {owner} says")
    assert trial.calls == {"rank 0 tries": "rank 0", "rank 1 tries": "rank 1"}
    assert first.actor.unreachable.given == [["10.0.0.0:50", "10.0.0.1:50", "10.0.0.0:60", "10.0.0.1:60"]]
    assert second.actor.unreachable.given == [["10.0.0.2:50", "10.0.0.2:60"]]
    for call in trial.calls:
        trial.take(call)
    assert trial.calls == {}
    trial.require()


def test_an_owner_and_who_is_to_take_its_place_are_two_of_one_name(answers: dict[str, Any]) -> None:
    """An owner moves to another host."""
    answers["rank 1 tries"] = {"10.0.0.1:60": REFUSED}
    moved = ReachTarget("optimizer 0", "10.0.0.1:50", Actor("optimizer 1"))
    moves, back = Tries("rank 0", "a", Actor("rank 0"), (moved,)), tries("rank 1", "b", 0)
    assert "reaches optimizer 0, but not its port for tensors, 10.0.0.1:60" in refusal(moves, back)
    assert moves.actor.unreachable.given == [["10.0.0.1:50", "10.0.0.1:60"]]
    assert back.actor.unreachable.given == [["10.0.0.0:50", "10.0.0.0:60"]]


@pytest.mark.parametrize("death", [ray.exceptions.ActorDiedError(), ray.exceptions.NodeDiedError("it is gone")])
def test_a_death_is_no_reason_for_another_call_reports_it(answers: dict[str, Any], death: BaseException) -> None:
    """And nobody tries an owner that is dead: the run may outlive it, and the change is then tried again."""
    answers |= {"optimizer 0 says": death, "rank 1 tries": death}
    alive = tries("rank 0", "a", 0, 2)
    taken(alive, tries("rank 1", "b", 1)).require()
    assert alive.actor.unreachable.given == [["10.0.0.2:50", "10.0.0.2:60"]]


def test_a_death_hides_no_reason(answers: dict[str, Any]) -> None:
    answers |= {"optimizer 0 says": ray.exceptions.ActorDiedError(), "rank 1 tries": {"10.0.0.1:60": REFUSED}}
    assert "reaches optimizer 1, but not its port" in refusal(tries("rank 0", "a", 0, 2), tries("rank 1", "b", 0, 1))


@pytest.mark.parametrize(("call", "who"), [("rank 1 tries", "rank 1"), ("optimizer 0 says", "optimizer 0")])
def test_what_a_process_raises_is_a_reason(answers: dict[str, Any], call: str, who: str) -> None:
    answers[call] = raised(ValueError("boom\nand more"))
    assert refusal(tries("rank 0", "a", 0), tries("rank 1", "b", 0)) == (
        f"it is not known whether all hosts reach all optimizers: {who} raised ValueError: boom; ask again"
    )


def test_what_ray_says_that_is_no_death_is_a_reason(answers: dict[str, Any]) -> None:
    answers["rank 0 tries"] = ray.exceptions.RaySystemError("no such thing")
    assert "rank 0 raised RaySystemError: System error: no such thing" in refusal(tries("rank 0", "a", 0))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_nodes_with_one_address_both_are_heard(answers: dict[str, Any], order: tuple[int, int]) -> None:
    answers["rank 1 tries"] = {"10.0.0.0:50": REFUSED}
    said = refusal(*(tries(f"rank {rank}", "a", 0) for rank in order))
    assert said.startswith("the host a cannot connect to optimizer 0 at 10.0.0.0:50: Connection refused; ")


def test_one_pair_is_one_whoever_has_tried(answers: dict[str, Any]) -> None:
    answers |= {f"rank {rank} tries": {"10.0.0.0:50": REFUSED} for rank in range(2)}
    assert "more such" not in refusal(tries("rank 0", "a", 0), tries("rank 1", "a", 0))


@pytest.mark.thorough
@pytest.mark.ray
def test_deaths_and_errors_are_told_apart_as_ray_raises_them(local_ray: None) -> None:
    """And an owner that does not answer holds up no other call to those who are to try it."""

    class Process:
        def tensor_address(self, address: str) -> str:
            if address == "silent":
                time.sleep(600)
            if address == "broken":
                raise ValueError("boom")
            return f"{address} for tensors"

        def unreachable(self, addresses: Sequence[str]) -> dict[str, str]:
            return {"shut": REFUSED} if "shut" in addresses else {}

    def end(trial: ReachTrial) -> ReachTrial:
        while calls := list(trial.calls):
            for call in ray.wait(calls, timeout=60)[0]:
                trial.take(call)
        return trial

    rank, silent, shut, broken = [actor_class(Process).options(num_cpus=0).remote() for _ in range(4)]
    named = {"silent": silent, "shut": shut, "broken": broken}
    owners = {name: ReachTarget(name, name, actor) for name, actor in named.items()}
    try:
        trial = ReachTrial([Tries("rank 0", "a", rank, (owners["silent"], owners["shut"]))])
        assert ray.get(control(rank.unreachable).remote(["shut"]), timeout=60) == {"shut": REFUSED}
        ray.kill(silent)
        with pytest.raises(ConfigError, match="the host a cannot connect to shut at shut: Connection refused"):
            end(trial).require()
        end(ReachTrial([Tries("silent", "b", silent, (owners["shut"],))])).require()
        with pytest.raises(ConfigError, match="broken raised ValueError: boom; ask again"):
            end(ReachTrial([Tries("rank 0", "a", rank, (owners["broken"],))])).require()
    finally:
        for process in (rank, silent, shut, broken):
            ray.kill(process)
