"""Which elements live where: exact, in order, at most one parameter cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.hybrid.buckets import plan_buckets
from rayzero.hybrid.placement import FractionSearch, Item, chunks, host_elements, total_bytes

LINE = 64
TENS = [Item(numel=numel * LINE, weight=4) for numel in (10, 20, 30, 40)]


def lines(fraction: float, **options) -> list[int]:
    return [n / LINE for n in host_elements(TENS, round(fraction * total_bytes(TENS)), **options)]


def test_the_fraction_is_exact_where_whole_parameters_would_overshoot():
    assert lines(0.5) == [10, 20, 20, 0]  # by whole parameters: 10, 20, 30, which is 60 %
    assert lines(0.01) == [1, 0, 0, 0]  # by whole parameters: 10 %
    assert lines(0.0) == [0, 0, 0, 0]
    assert lines(1.0) == [10, 20, 30, 40]


def test_the_last_parameters_can_go_first():
    assert lines(0.5, order="last") == [0, 0, 10, 40]


def test_what_must_stay_whole_goes_where_the_error_is_smaller():
    whole = [Item(numel=item.numel, weight=4, whole=True) for item in TENS]
    targets = [0, 4, 5, 24, 25, 50, 80, 100]
    found = [[n // LINE for n in host_elements(whole, t * LINE * 4)] for t in targets]
    assert [sum(share) for share in found] == [0, 0, 10, 30, 30, 60, 100, 100]


def test_what_lives_on_the_host_anyway_is_not_counted():
    items = [Item(numel=640, weight=4, on_host=True), Item(numel=640, weight=4)]
    assert total_bytes(items) == 2560
    assert host_elements(items, 0) == [640, 0]
    assert host_elements(items, 1280) == [640, 320]


items = st.lists(
    st.builds(Item, numel=st.integers(0, 5000), weight=st.sampled_from([2, 4, 8, 12])), min_size=1, max_size=12
)


@given(items, st.floats(0, 1), st.sampled_from(["first", "last"]))
def test_any_target_is_met_to_half_a_line_with_one_cut(items, fraction, order):
    target = round(fraction * total_bytes(items))
    shares = host_elements(items, target, order=order)
    assert all(0 <= share <= item.numel for share, item in zip(shares, items, strict=True))
    cut = [i for i, (share, item) in enumerate(zip(shares, items, strict=True)) if 0 < share < item.numel]
    assert len(cut) <= 1
    assert all(shares[i] % LINE == 0 for i in cut)
    taken = [share > 0 for share, item in zip(shares, items, strict=True) if item.numel]
    assert taken == sorted(taken, reverse=order == "first")
    got = sum(share * item.weight for share, item in zip(shares, items, strict=True))
    assert abs(got - target) <= max(item.weight for item in items) * LINE


@given(items, st.floats(0, 1))
def test_a_budget_is_never_exceeded(items, fraction):
    target = round(fraction * total_bytes(items))
    shares = host_elements(items, target, at_least=True)
    assert sum(share * item.weight for share, item in zip(shares, items, strict=True)) >= target


@given(st.integers(1, 3000), st.data())
def test_chunks_cover_a_range_once(numel, data):
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    pieces = chunks(3, numel, start, stop, data.draw(st.sampled_from([None, 64, 640])))
    assert [i for piece in pieces for i in range(piece.start, piece.stop)] == list(range(start, stop))
    assert [piece.whole for piece in pieces] == [len(pieces) == 1 and piece.numel == numel for piece in pieces]


def test_buckets_hold_neighbours_of_one_kind_up_to_their_size():
    pieces = [piece for param in range(6) for piece in chunks(param, 128, 0, 128, None)]
    kinds = [(4, "a"), (2, "a"), (4, "a"), (4, "a"), (2, "b"), (2, "a")]

    class Kind:
        def __init__(self, itemsize: int) -> None:
            self.itemsize = itemsize

    four, two = Kind(4), Kind(2)
    placed = [(piece, four if size == 4 else two, where) for piece, (size, where) in zip(pieces, kinds, strict=True)]
    found = plan_buckets(placed, 2 * 128 * 4)  # type: ignore[arg-type]
    assert [[piece.param for piece in bucket] for bucket in found] == [[0, 2], [1, 5], [3], [4]]


# ---- measured ---------------------------------------------------------------------------------------------------


def settle(search: FractionSearch, start: float, stall, steps: int = 100) -> float:
    """Where the search ends if updates take a second per fraction 1 and ``stall(fraction)`` is waited for."""
    fraction = start
    for _ in range(steps):
        fraction = search.note(fraction, fraction, stall(fraction)) or fraction
    return fraction


@pytest.mark.parametrize("hides", [0.15, 0.3, 0.6, 0.95])
def test_the_measured_fraction_ends_near_what_hides(hides):
    found = settle(FractionSearch(), 0.5, lambda fraction: max(0.0, fraction - hides))
    assert hides - 0.1 <= found <= hides + 0.05


def test_nothing_waited_for_ends_at_everything():
    assert settle(FractionSearch(), 0.5, lambda fraction: 0.0) == 1.0


def test_one_slow_step_moves_nothing():
    search = FractionSearch()
    found = [search.note(1.0, 1.0, stall) for stall in (0.0, 5.0, 0.0, 0.0, 0.0)]
    assert found == [None] * 5
