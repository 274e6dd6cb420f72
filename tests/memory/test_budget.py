"""Leases of a byte budget: the sum always agrees, and a refusal never blocks."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.errors import ConfigError
from rayzero.memory.pool import Lease, MemoryBudget


@given(st.none() | st.integers(1, 100), st.lists(st.tuples(st.booleans(), st.integers(0, 150)), max_size=60))
def test_used_is_the_sum_of_live_leases_and_stays_within_the_limit(
    limit: int | None, actions: list[tuple[bool, int]]
) -> None:
    budget = MemoryBudget(limit)
    live: list[Lease] = []
    most = 0
    for take, number in actions:
        if take:
            before = budget.used
            lease = budget.reserve(number)
            fits = limit is None or before + number <= limit or before == 0
            assert (lease is not None) == fits
            live += [lease] if lease else []
        elif live:
            live.pop(number % len(live)).release()
        sizes = [lease.size for lease in live]
        most = max(most, sum(sizes))
        assert (budget.used, budget.peak) == (sum(sizes), most)
        if limit is not None and budget.used > limit:
            assert [size for size in sizes if size > 0] == [budget.used]  # one oversize lease, alone


def test_an_oversize_lease_is_let_through_alone_only() -> None:
    budget = MemoryBudget(10)
    small = budget.reserve(1)
    assert small is not None
    assert budget.reserve(11) is None
    small.release()
    oversize = budget.reserve(11)
    assert oversize is not None
    assert budget.reserve(1) is None
    oversize.release()
    assert budget.reserve(10) is not None


def test_a_second_release_is_caught_and_changes_nothing() -> None:
    budget = MemoryBudget(10)
    lease = budget.reserve(4)
    assert lease is not None
    lease.release()
    with pytest.raises(RuntimeError, match="4 bytes was released twice"):
        lease.release()
    assert budget.used == 0


def test_threads_never_exceed_the_limit() -> None:
    budget = MemoryBudget(100)
    start = threading.Barrier(4)

    def take_and_release() -> None:
        start.wait(10)
        for size in range(1, 400):
            lease = budget.reserve(size % 60 + 1)
            if lease is not None:
                assert budget.used <= 100
                lease.release()

    threads = [threading.Thread(target=take_and_release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert budget.used == 0
    assert budget.peak <= 100


def test_wrong_numbers_are_errors() -> None:
    with pytest.raises(ConfigError, match="more than 0 bytes, got 0"):
        MemoryBudget(0)
    with pytest.raises(ConfigError, match="cannot reserve -1 bytes"):
        MemoryBudget(10).reserve(-1)
