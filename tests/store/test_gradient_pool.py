"""Ranges of a rank's pool: never two at once in one place, and all of it free again at the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rayzero.protocol.gradient_sum import POOL_ALIGN
from rayzero.store.rank.gradient_region import GradientPool

SIZE = 16 * POOL_ALIGN


def test_the_lowest_free_range_is_given_first() -> None:
    pool = GradientPool(SIZE)
    first, second = pool.take(3 * POOL_ALIGN), pool.take(1)
    assert (first, second) == (0, 3 * POOL_ALIGN)
    pool.give_back(0, 3 * POOL_ALIGN)
    assert pool.take(2 * POOL_ALIGN) == 0
    assert pool.take(2 * POOL_ALIGN) == 4 * POOL_ALIGN, "one is left before the second"


def test_an_empty_pool_has_no_range() -> None:
    assert GradientPool(0).take(1) is None


@given(st.lists(st.tuples(st.integers(1, SIZE), st.integers(0, 5)), max_size=60))
def test_ranges_never_meet_and_what_is_given_back_is_whole_again(moves: list[tuple[int, int]]) -> None:
    pool, taken = GradientPool(SIZE), list[tuple[int, int]]()
    for size, back in moves:
        start = pool.take(size)
        if start is not None:
            assert start + size <= SIZE
            assert all(start + size <= at or at + length <= start for at, length in taken)
            taken.append((start, size))
        if taken and (back < 2 or start is None):
            pool.give_back(*taken.pop(back % len(taken)))
    for each in taken:
        pool.give_back(*each)
    assert pool.take(SIZE) == 0
