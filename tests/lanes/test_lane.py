"""What every lane promises, and what the threads of one do."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import pytest
import torch

from rayzero.errors import ConfigError
from rayzero.lanes import CudaLane, Lane, ThreadLane, make_lane
from tests.support.simulated_lane import SimulatedLane
from tests.support.watched_lane import WatchedLane

CUDA = pytest.param(
    CudaLane,
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)


LANES = {
    "threads": ThreadLane,
    "inline": lambda: ThreadLane(overlap=False),
    "simulated, late": lambda: SimulatedLane(0),
    "simulated": lambda: SimulatedLane(1),
    "streams": CUDA,
}


@pytest.fixture(params=LANES.values(), ids=LANES)
def lane(request: pytest.FixtureRequest) -> Lane:
    made: Callable[[], Lane] = request.param
    return made()


def held_up(what: str) -> tuple[Callable[[str, str], None], threading.Event]:
    go = threading.Event()
    return lambda direction, label: f"{direction} {label}" == what and go.wait(60) and None, go


def test_what_goes_out_comes_back(lane: Lane) -> None:
    source = torch.arange(1000, device=lane.device)
    host = torch.zeros(1000, dtype=torch.long, pin_memory=lane.device.type == "cuda")
    target = torch.empty_like(source)
    out = lane.issue("out", lambda: host.copy_(source, non_blocking=True), holds=[source])
    back = lane.issue("in", lambda: target.copy_(host, non_blocking=True), after=[out])
    back.wait()
    assert torch.equal(target, torch.arange(1000, device=lane.device))
    assert out.join() is None
    assert back.settle() is None
    assert back.join() is None
    assert back.finished()
    lane.close()


def test_a_copy_sees_what_was_computed_before_it_was_issued(lane: Lane) -> None:
    source = torch.zeros(1 << 20, device=lane.device)
    host = torch.empty(1 << 20, pin_memory=lane.device.type == "cuda")
    for step in range(50):
        source.fill_(step)
        out = lane.issue("out", lambda: host.copy_(source, non_blocking=True))
        out.wait()
        source.fill_(-1.0)
        assert out.join() is None
        assert host.eq(step).all()


def test_spans_are_of_the_copies_that_were_given_a_size_and_made(lane: Lane) -> None:
    source, host = torch.ones(1000, device=lane.device), torch.zeros(1000)
    start = lane.now()
    lane.issue("out", lambda: host.copy_(source), label="a", nbytes=4000)
    lane.issue("out", lambda: host.copy_(source), label="b")
    lane.issue("in", lambda: False, label="c", nbytes=4000)
    for direction in ("out", "in"):
        lane.drain(direction)
    (span,) = lane.spans()
    assert (span.direction, span.label, span.nbytes) == ("out", "a", 4000)
    assert span.stop >= span.start
    stop = lane.now()
    stop.join()
    assert lane.seconds(start, stop) > 0.0


def test_gradients_are_not_recorded_in_copies(lane: Lane) -> None:
    seen = []
    lane.issue("in", lambda: seen.append(torch.is_grad_enabled())).join()
    assert seen == [False]


def test_make_lane_takes_threads_where_there_are_no_streams() -> None:
    assert isinstance(make_lane(torch.device("cpu")), ThreadLane)
    with pytest.raises(ConfigError, match="needs a CUDA device, got cpu"):
        CudaLane("cpu")


def test_copies_of_a_direction_run_in_order_and_those_of_the_other_beside_them() -> None:
    hold, go = held_up("out 0")
    lane, ran = WatchedLane(hold), []
    for i in range(3):
        last = lane.issue("out", lambda i=i: ran.append(i), label=str(i))
    lane.issue("in", lambda: ran.append("in")).join()
    assert ran == ["in"]
    assert not last.finished()
    go.set()
    lane.drain("out")
    assert ran == ["in", 0, 1, 2]
    lane.close()


@pytest.mark.parametrize("way", ["wait", "settle", "join", "drain", "lane settles", "close"])
def test_every_way_to_wait_waits(way: str) -> None:
    lane, done = WatchedLane(lambda direction, label: time.sleep(0.05)), []
    event = lane.issue("out", lambda: done.append(1))
    {
        "wait": event.wait,
        "settle": event.settle,
        "join": event.join,
        "drain": lambda: lane.drain("out"),
        "lane settles": lambda: lane.settle("out"),
        "close": lane.close,
    }[way]()
    assert done == [1]


def test_a_copy_waits_for_the_events_it_comes_after() -> None:
    hold, go = held_up("out first")
    lane, ran = WatchedLane(hold), []
    out = lane.issue("out", lambda: ran.append("out"), label="first")
    back = lane.issue("in", lambda: ran.append("in"), after=[lane.now(), out])
    assert not back.finished()
    go.set()
    back.wait()
    assert ran == ["out", "in"]
    lane.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_copy_that_fails_says_so_to_all_who_come_after_it(overlap: bool) -> None:
    def fail() -> None:
        raise OSError("cable")

    lane, ran = ThreadLane(overlap=overlap), []
    out = lane.issue("out", fail, nbytes=10)
    back = lane.issue("in", lambda: ran.append(1), after=[out])
    for event in (out, back):
        assert isinstance(event.settle(), OSError)
        assert isinstance(event.join(), OSError)
        with pytest.raises(OSError, match="cable"):
            event.wait()
    assert lane.issue("out", lambda: None).settle() is None, "the next one is not concerned"
    assert (ran, lane.spans()) == ([], [])
    lane.close()


def test_after_close_copies_run_in_the_caller() -> None:
    lane, threads = ThreadLane(), []
    lane.close()
    lane.close()
    assert lane.issue("out", lambda: threads.append(threading.current_thread())).finished()
    assert threads == [threading.main_thread()]


def test_a_copy_that_has_run_keeps_nothing_alive() -> None:
    """The lane's thread sleeps until the next copy: what the last one held is freed before that."""
    lane = ThreadLane()
    freed = threading.Event()

    class Copy:
        def __call__(self) -> None:
            pass

        def __del__(self) -> None:
            freed.set()

    event = lane.issue("out", Copy())
    event.join()
    assert freed.wait(60)
    lane.close()


def test_a_dropped_lane_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    lane = ThreadLane()
    lane.issue("out", lambda: None).join()
    lane.issue("in", lambda: None).join()
    mine = set(threading.enumerate()) - before
    assert len(mine) == 2
    del lane
    gc.collect()
    for thread in mine:
        thread.join(60)
    assert not any(thread.is_alive() for thread in mine)
