"""Spares: processes that wait to become successors, and die without a word before that."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from rayzero.cluster.actors import spares as spares_module
from rayzero.cluster.actors.spares import Spares
from rayzero.cluster.run import Member


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
