"""Contestants in their own processes: who answers, who cannot take part, who dies."""

from __future__ import annotations

import os
from functools import partial

import pytest

from lab.bench.contestants import best_transport, one_process_a_rank
from lab.bench.turns import Entry, Turn, contest
from rayzero.errors import RunFailedError

pytestmark = pytest.mark.thorough


class Counter:
    """Says who it is and what it was asked."""

    def __init__(self, seat):
        self.seat = seat

    def play(self, turn):
        if turn.what == "die":
            os._exit(3)
        return {"rank": self.seat.rank, "pid": os.getpid(), "turn": turn}


def build_absent(seat):
    raise ImportError("No module named 'peer'")


def entry(name, build):
    return Entry(name=name, programs=partial(one_process_a_rank, build))


@pytest.mark.soak
def test_ranks_answer_in_order_from_processes_of_their_own_and_the_absent_are_named(tmp_path):
    turn = Turn(first=4, steps=2, setting=0.5)
    with contest([entry("there", Counter), entry("absent", build_absent)], 2, 1, folder=str(tmp_path)) as found:
        (there,), absent = found
        accounts = there.play(turn)
        assert there.owner_pids == []
        assert min(there.peak_bytes(turn)[0], there.base_bytes) > 0
    assert absent == {"absent": "No module named 'peer'"}
    assert [account["rank"] for account in accounts] == [0, 1]
    assert [account["pid"] for account in accounts] == there.rank_pids
    assert {account["turn"] for account in accounts} == {turn}
    assert [process.exitcode for process in there.processes] == [0, 0]


def test_a_player_that_dies_is_named(tmp_path):
    with (
        contest([entry("frail", Counter)], 1, 1, folder=str(tmp_path)) as ((frail,), _),
        pytest.raises(RunFailedError, match="frail: the process of rank 0 died"),
    ):
        frail.play(Turn(what="die"))


def test_several_ranks_never_share_a_process_with_their_owners():
    assert best_transport(2) != "inproc"
