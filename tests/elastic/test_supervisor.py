"""Whose processes are started, called and ended for what the controller decides; on processes that are a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayzero.elastic.controller import Controller, Supervisor
from rayzero.elastic.members import Answered, Died, Ended, MemberId, MemberKind, Process, Serves
from rayzero.elastic.reform import Step
from rayzero.layout.shard_map import Rescale
from rayzero.protocol.ownership import Ownership, Prepared


def rank(index: int, life: int = 0) -> Process:
    return Process(MemberId(MemberKind.RANK, index), life)


def owner(index: int, life: int = 0) -> Process:
    return Process(MemberId(MemberKind.OWNER, index), life)


class Listed:
    """Processes that are not there: what would be done is listed."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []

    def start(self, process: Process, ownership: Ownership | None) -> None:
        self.done.append(("start", process, ownership))

    def join(self, process: Process, ownership: Ownership, addresses: Sequence[str]) -> None:
        self.done.append(("join", process, ownership, tuple(addresses)))

    def run(self, rank: Process, addresses: Sequence[str], ownership: Ownership | None) -> None:
        self.done.append(("run", rank, tuple(addresses), ownership))

    def call(self, processes: Sequence[Process], method: str, *arguments: Any) -> None:
        self.done.append((method, tuple(processes), *arguments))

    def kill(self, processes: Sequence[Process]) -> None:
        self.done.append(("kill", tuple(processes)))

    def end(self, process: Process) -> None:
        self.done.append(("end", process))

    def take(self) -> list[tuple[Any, ...]]:
        done, self.done = self.done, []
        return done


def supervised(max_failures: int = 4) -> tuple[Supervisor, Listed]:
    processes = Listed()
    return Supervisor(Controller(2, ("a0", "a1"), max_failures=max_failures), processes), processes


def test_a_successor_serves_is_connected_and_others_are_told_in_the_lives_that_they_have_by_then() -> None:
    run, processes = supervised()
    run.take(Died(rank(1)))
    assert processes.take() == [("lose", (owner(0), owner(1)), 1, 1), ("start", rank(1, 1), Ownership(2))]
    run.take(Serves(rank(1, 1)))
    assert processes.take() == [("run", rank(1, 1), ("a0", "a1"), Ownership(2))]
    run.take(Died(owner(0)))
    assert processes.take() == [("start", owner(0, 1), Ownership(2))]
    run.take(Serves(owner(0, 1), "b0"))
    assert processes.take() == [("connect_peers", (owner(0, 1),), ("b0", "a1"))]
    run.take(Answered(owner(0, 1), "connect_peers"))
    assert processes.take() == [("succeed", (rank(0), rank(1, 1), owner(1)), 0, "b0")]
    assert run.take(Answered(owner(1), "succeed")) == [], "nothing depends on it"
    run.take(Ended(rank(0)))
    run.take(Died(rank(0)))
    assert processes.take() == []
    assert run.controller.outlived == 2
    run.take(Died(owner(1), counted=True))
    assert run.controller.outlived == 2


def test_a_successor_that_does_not_learn_of_the_others_is_killed_and_another_one_takes_the_place() -> None:
    run, processes = supervised()
    run.take(Died(owner(0)))
    run.take(Serves(owner(0, 1), "b0"))
    processes.take()
    run.take(Answered(owner(0, 1), "connect_peers", refused="no answer"))
    assert processes.take() == [("kill", (owner(0, 1),))]
    run.take(Died(owner(0, 1)))
    assert processes.take() == [("start", owner(0, 2), Ownership(2))]


def asked_to(step: Step, run: Supervisor, processes: Listed) -> tuple[Any, ...]:
    """Answer every step of a change until ``step`` is asked."""
    while True:
        ((method, there, *_),) = asked = processes.take()
        if method is step:
            return asked[0]
        for process in there:
            run.take(Answered(process, method, Prepared(process == owner(0), 4096) if method is Step.PREPARE else None))


def test_owners_that_are_left_over_end_once_ranks_have_gone_over_and_one_that_refuses_to_go_on_is_killed() -> None:
    run, processes = supervised()
    run.scale(Rescale.to(1, 2))
    asked_to(Step.ENTER, run, processes)
    run.take(Answered(owner(0), Step.ENTER, refused="no"))
    assert processes.take() == [("kill", (owner(0),))]
    run.take(Answered(owner(0), Step.ENTER))
    run.take(Answered(owner(1), Step.ENTER))
    (change,) = processes.take()
    assert change[:2] == (Step.CHANGE, (rank(0), rank(1)))
    run.take(Answered(rank(0), Step.CHANGE))
    assert processes.take() == []
    run.take(Answered(rank(1), Step.CHANGE))
    assert processes.take() == [("end", owner(1))]
