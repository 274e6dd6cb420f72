"""How far ahead units are asked for follows from measured seconds; and what waiting for one is put down to."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from itertools import chain, repeat

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.units import residency as fetching
from rayzero.engine.units.residency import ConditionalFetch, Fetching, UnitBuffer, Waited
from rayzero.engine.units.schedule import Phase, PrefetchPace, wanted_depth
from rayzero.memory.pool import MemoryBudget


@pytest.mark.parametrize(
    ("fetch", "compute", "limit", "depth"),
    [
        (0.5, 1.0, 16, 1),
        (1.0, 1.0, 16, 1),
        (1.1, 1.0, 16, 2),
        (7.5, 1.0, 16, 8),
        (99.0, 1.0, 16, 16),
        (1.0, 0.0, 16, 16),
        (0.0, 0.0, 16, 16),
        (0.0, 1.0, 16, 1),
        (5.0, 1.0, 1, 1),
        (5.0, 1.0, 0, 0),
    ],
)
def test_as_few_units_ahead_as_are_in_time(fetch: float, compute: float, limit: int, depth: int) -> None:
    assert wanted_depth(fetch, compute, limit) == depth


seconds = st.floats(1e-6, 100.0)


@given(seconds, seconds, st.integers(1, 64))
def test_one_unit_less_would_be_late(fetch: float, compute: float, limit: int) -> None:
    depth = wanted_depth(fetch, compute, limit)
    assert 1 <= depth <= limit
    assert depth == limit or depth * compute >= fetch * (1 - 1e-9)
    assert depth == 1 or (depth - 1) * compute < fetch * (1 + 1e-9)


def paced(computed: list[tuple[str, float]], fetches: list[float]) -> PrefetchPace:
    """A pace that was told of computing (phase, seconds) and fetches (seconds)."""
    pace = PrefetchPace()
    for phase, seconds in computed:
        pace.computed(Phase(phase), seconds)
    for fetch in fetches:
        pace.fetched(fetch)
    return pace


def test_nothing_measured_is_the_limit() -> None:
    assert paced([], []).depth(16) == 16
    assert paced([("forward", 1.0)], []).depth(16) == 16
    assert paced([], [1.0]).depth(16) == 16


def test_the_faster_phase_and_the_slower_fetches_count() -> None:
    computed = [("forward", 1.0), ("forward", 1.0), ("backward", 4.0)]
    assert paced(computed, [0.1] * 5 + [2.5] * 5).depth(16) == 3  # 2.5 for nine of ten fetches


# ---- what a wait is put down to ---------------------------------------------------------------------------------


def buffer() -> UnitBuffer:
    lease = MemoryBudget(None).reserve(0)
    assert lease is not None
    return UnitBuffer(flat=torch.empty(0), slices=(), lease=lease)


def test_a_wait_is_the_optimizers_until_the_version_is_published_then_the_fetchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published: Future[int] = Future()
    done: Future[None] = Future()
    looks = threading.Semaphore(0)
    times = chain([0.0, 1.0], repeat(4.0))  # the wait begins, the version is published, the bytes are there

    def clock() -> float:
        looks.release()
        return next(times)

    def owners() -> None:
        looks.acquire()
        published.set_result(1)
        looks.acquire()
        done.set_result(None)

    monkeypatch.setattr(fetching.time, "perf_counter", clock)
    under_way = Fetching(1, published, done=done, request=None, buffer=buffer(), ahead=True)
    thread = threading.Thread(target=owners)
    thread.start()
    assert under_way.wait() == Waited(1.0, 3.0)
    thread.join()


def test_what_is_there_costs_nothing() -> None:
    published: Future[int] = Future()
    published.set_result(3)
    under_way = Fetching(3, published, done=published, request=None, buffer=buffer(), ahead=True)
    assert under_way.wait() == Waited(0.0, 0.0)
    assert under_way.seconds is None
    assert under_way.cancel()


@pytest.mark.parametrize(("content", "asks"), [(4, 0), (5, 1)])
def test_a_copy_is_renewed_only_where_the_content_is_newer(content: int, asks: int) -> None:
    published: Future[int] = Future()
    fetches: list[Future[None]] = []

    def ask() -> Future[None]:
        fetches.append(Future())
        return fetches[-1]

    renewal = ConditionalFetch(published, 4, ask)
    assert not renewal.done.done()
    published.set_result(content)
    assert len(fetches) == asks
    for fetch in fetches:
        fetch.set_result(None)
    assert renewal.done.result() is None


def test_a_renewal_that_is_called_off_asks_for_nothing_and_one_that_has_asked_passes_it_on() -> None:
    published: Future[int] = Future()
    early = ConditionalFetch(published, 0, lambda: pytest.fail("asked"))
    fetch: Future[None] = Future()
    late = ConditionalFetch(published, 0, lambda: fetch)
    assert early.cancel()
    published.set_result(1)
    assert early.done.cancelled()
    fetch.set_running_or_notify_cancel()
    assert not late.cancel()
    fetch.set_exception(ValueError("lost"))
    with pytest.raises(ValueError, match="lost"):
        late.done.result()
