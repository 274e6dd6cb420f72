"""Who gets new certificates when, and what is said if somebody does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ray
from clock import Clock

from rayzero.cluster.upkeep import renewal
from rayzero.cluster.upkeep.renewal import LOOK_S, Renewal
from rayzero.errors import ConfigError

EVERYBODY = ["coordinator", "optimizer 0", "rank 0"]


class Certificates:
    """A run's: due when the test says so."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.due: bool | ConfigError = False

    def refresh(self) -> bool:
        due, self.due = self.due, False
        if isinstance(due, ConfigError):
            self.due = due
            raise due
        return due


class Actors:
    """The processes of a run: calls are numbers, and answers are what the test says."""

    def __init__(self) -> None:
        self.everybody = list(EVERYBODY)
        self.certificates = Certificates()
        self.asked: list[str] = []
        self.clock = Clock()
        self.answers: dict[int, Exception | None] = {}  # of calls that have ended

    def renew(self, who: str) -> int:
        self.asked.append(who)
        return len(self.asked) - 1

    def wait(self, calls: list[int], **_: Any) -> tuple[list[int], list[int]]:
        ready = [call for call in calls if call in self.answers]
        return ready, [call for call in calls if call not in ready]

    def get(self, call: int) -> None:
        answer = self.answers[call]
        if answer is not None:
            raise answer


class Run:
    """A driver that looks when the test says so."""

    def __init__(self, actors: Actors, others: dict[str, Callable[[], None]] | None = None) -> None:
        self.clock, self.actors, self.said = actors.clock, actors, list[str]()
        self.renewal = Renewal(actors, say=self.said.append, others=others)

    def look(self) -> list[str]:
        """Who is asked by the next look."""
        before = len(self.actors.asked)
        self.clock.now += LOOK_S
        self.renewal.act()
        return self.actors.asked[before:]


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> Actors:
    made = Actors()
    monkeypatch.setattr(renewal.ray, "wait", made.wait)
    monkeypatch.setattr(renewal.ray, "get", made.get)
    monkeypatch.setattr(renewal, "monotonic", made.clock)
    return made


def test_everybody_is_given_new_ones_once_they_are_due(actors: Actors) -> None:
    told: list[int] = []
    run = Run(actors, {"rayzero top": lambda: told.append(1)})
    assert run.look() == []
    actors.certificates.due = True
    assert run.look() == EVERYBODY
    assert told == [1]
    actors.answers = dict.fromkeys(range(3))
    assert (run.look(), run.look(), told, run.said) == ([], [], [1], [])
    actors.certificates.due = True
    assert run.look() == EVERYBODY


def test_answers_about_older_ones_do_not_count(actors: Actors) -> None:
    run = Run(actors)
    actors.certificates.due = True
    run.look()
    actors.certificates.due = True
    assert run.look() == EVERYBODY, "also who has not answered yet"
    actors.answers = dict.fromkeys(range(3))
    run.look()
    assert len(run.said) == 3, "nobody has the newest ones"
    actors.answers = dict.fromkeys(range(6))
    assert (run.look(), len(run.said)) == ([], 3)


def test_it_looks_once_a_minute(actors: Actors) -> None:
    run = Run(actors)
    actors.certificates.due = True
    run.clock.now += LOOK_S - 1
    run.renewal.act()
    assert actors.asked == []
    run.clock.now += 1
    run.renewal.act()
    assert actors.asked == EVERYBODY


def test_who_does_not_take_its_own_is_named_and_asked_again(actors: Actors) -> None:
    def full() -> None:
        raise ConfigError("cannot write x: no space")

    run = Run(actors, {"rayzero top": full})
    actors.certificates.due = True
    run.look()
    actors.answers = {0: None, 2: ray.exceptions.GetTimeoutError("too busy")}
    assert run.look() == ["rank 0"]
    assert len(run.said) == 3
    assert (
        run.said[0]
        == "rayzero top cannot get new certificates: cannot write x: no space; it is tried again each minute"
    )
    assert run.said[1].startswith("rank 0 does not take its new certificate: ")
    assert run.said[2] == "optimizer 0 has not answered for 60 s whether it takes its new certificate"
    actors.answers |= {1: None, 3: None}
    assert (run.look(), len(run.said)) == ([], 3), "each is said once"


def test_who_dies_or_parts_is_owed_nothing(actors: Actors) -> None:
    run = Run(actors)
    actors.certificates.due = True
    run.look()
    actors.answers = {0: None, 1: ray.exceptions.ActorDiedError()}
    actors.everybody.remove("rank 0")
    assert (run.look(), run.look(), run.said) == ([], [], [])


def test_files_that_cannot_be_used_are_named_from_the_second_look_on(actors: Actors) -> None:
    """At the first, somebody may have written one of two files."""
    run = Run(actors)
    actors.certificates.due = ConfigError("run.security.key: k is not the key of c")
    run.look()
    assert run.said == []
    run.look()
    run.look()
    assert run.said == ["certificates cannot be renewed: run.security.key: k is not the key of c"]
    actors.certificates.due = True
    assert run.look() == EVERYBODY


def test_what_may_end_before_the_run_is_said_at_its_start_and_when_it_comes_near(actors: Actors) -> None:
    actors.certificates.warnings = ["c is valid until"]
    run = Run(actors)
    assert run.said == ["c is valid until"]
    actors.certificates.warnings.append("w is valid until")
    run.look()
    run.look()
    assert run.said == ["c is valid until", "w is valid until"]
