"""What the lane of a CUDA device asks of CUDA: which waits, in which order, on which device, and in captures."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rayzero.errors import UnsupportedError
from rayzero.lanes import CudaLane
from tests.cuda_streams import OURS, Cuda, Graph, Refused, Stream


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


@pytest.fixture
def lane(cuda: Cuda) -> Any:
    """A lane of device 1, made and used by threads whose current device is 0, which has no context."""
    made = CudaLane(OURS)
    for direction, stream in made._streams.items():
        stream.name = direction
    cuda.take()
    return made


# ---- order ------------------------------------------------------------------------------------------------------


def test_a_copy_comes_after_what_was_computed_and_holds_what_it_uses(lane: Any, cuda: Cuda) -> None:
    lane.issue("out", lambda: cuda.work("copy"), holds=[cuda.memory("x")])
    assert cuda.take() == [
        "record compute#2",
        "out waits for compute#2",
        "copy on out",
        "hold x for out",
        "record out#1",
    ]


def test_a_copy_comes_after_the_events_that_it_is_given_and_nothing_else(lane: Any, cuda: Cuda) -> None:
    before = lane.issue("out", lambda: cuda.work("copy"))
    now = lane.now()
    cuda.take()
    lane.issue("in", lambda: cuda.work("copy"), after=[before, now])
    assert cuda.take() == ["in waits for out#1", "in waits for compute#3", "copy on in", "record in#1"]
    lane.issue("in", lambda: cuda.work("copy"), after=[])
    assert cuda.take() == ["copy on in", "record in#2"]


def test_what_a_failed_copy_has_queued_is_held(lane: Any, cuda: Cuda) -> None:
    def fail() -> None:
        cuda.work("copy")
        raise OSError("cable")

    with pytest.raises(OSError, match="cable"):
        lane.issue("in", fail, after=[], holds=[cuda.memory("x")])
    assert cuda.take() == ["copy on in", "hold x for in"]


def test_waiting_orders_the_stream_and_joining_blocks_the_thread_asleep(lane: Any, cuda: Cuda) -> None:
    event = lane.issue("in", lambda: cuda.work("copy"), after=[])
    cuda.take()
    event.wait()
    assert cuda.take() == ["compute waits for in#1"]
    assert event.settle() is None
    assert cuda.take() == ["compute waits for in#1"]
    assert event.join() is None
    assert cuda.take() == ["sleep until in#1"]


def test_settling_orders_the_stream_after_all_copies_of_a_direction(lane: Any, cuda: Cuda) -> None:
    lane.settle("in")
    assert cuda.take() == ["record in#1", "compute waits for in#1"]


def test_draining_blocks_the_thread_asleep(lane: Any, cuda: Cuda) -> None:
    lane.drain("out")
    assert cuda.take() == ["record out#1", "sleep until out#1"]


def test_memory_is_freed_after_the_wait_and_held_for_the_stream_that_frees_it(lane: Any, cuda: Cuda) -> None:
    event = lane.issue("in", lambda: cuda.work("copy"), after=[])
    cuda.take()
    event.before_free(cuda.memory("x"), cuda.memory("y"))
    assert cuda.take() == ["compute waits for in#1", "hold x for compute", "hold y for compute"]


def test_now_is_a_moment_of_the_stream_that_is_named(lane: Any, cuda: Cuda) -> None:
    other = Stream(OURS, name="other")
    with torch.cuda.device(OURS), torch.cuda.stream(other):  # type: ignore[arg-type]
        assert lane.stream() is other
        lane.now()
        lane.used(cuda.memory("x"))
    cuda.take()
    lane.now(other)
    lane.now()
    assert cuda.take() == ["record other#2", "record compute#2"]


def test_without_overlap_copies_are_in_the_computing_stream(cuda: Cuda) -> None:
    lane = CudaLane(OURS, overlap=False)
    cuda.take()
    lane.issue("out", lambda: cuda.work("copy"), after=[])
    assert cuda.take() == ["copy on compute", "record compute#2"]


def test_an_event_has_finished_once_the_device_has_come_to_it(lane: Any, cuda: Cuda) -> None:
    start, event = lane.now(), lane.issue("in", lambda: cuda.work("copy"), after=[], nbytes=8)
    cuda.late = True
    assert not event.finished()
    assert lane.seconds(start, event) is None
    assert lane.spans() == []
    cuda.late = False
    assert event.finished()
    assert lane.seconds(start, event) > 0.0
    (span,) = lane.spans()
    assert (span.direction, span.nbytes) == ("in", 8)
    assert span.stop > span.start > 0.0


# ---- the device -------------------------------------------------------------------------------------------------


def copied(lane: Any, cuda: Cuda) -> Any:
    return lane.issue("in", lambda: cuda.work("copy"), holds=[cuda.memory("x")], nbytes=8)


USES: dict[str, Callable[[Any, Cuda], object]] = {
    "issue": copied,
    "issue after": lambda lane, cuda: lane.issue("out", lambda: None, after=[copied(lane, cuda)]),
    "now": lambda lane, _: lane.now(),
    "now on a stream": lambda lane, _: lane.now(Stream(OURS)),
    "used": lambda lane, cuda: lane.used(cuda.memory("x")),
    "settle": lambda lane, _: lane.settle("out"),
    "drain": lambda lane, _: lane.drain("out"),
    "seconds": lambda lane, _: lane.seconds(lane.now(), lane.now()),
    "spans": lambda lane, cuda: (copied(lane, cuda), lane.spans()),
    "capturing": lambda lane, _: lane.capturing(),
    "wait": lambda lane, cuda: copied(lane, cuda).wait(),
    "join": lambda lane, cuda: copied(lane, cuda).join(),
    "finished": lambda lane, cuda: copied(lane, cuda).finished(),
    "before_free": lambda lane, cuda: copied(lane, cuda).before_free(cuda.memory("x")),
}


@pytest.mark.parametrize("use", [*USES.values(), lambda lane, cuda: CudaLane(OURS)], ids=[*USES, "make"])
def test_a_thread_that_never_chose_a_device_makes_no_context_on_another(
    use: Callable[[Any, Cuda], object], lane: Any, cuda: Cuda
) -> None:
    """Every rank's threads begin on device 0: a context there takes some 500 MiB of it."""

    def run() -> int:
        use(lane, cuda)
        return cuda.current()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(run).result() == 0, "the thread's device is as it was"
    assert cuda.contexts == {OURS.index}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_thread_on_the_device_does_not_change_it(use: Callable[[Any, Cuda], object], lane: Any, cuda: Cuda) -> None:
    """Each change takes a microsecond or two."""
    cuda.set(OURS.index)
    before = cuda.exchanges
    use(lane, cuda)
    assert cuda.exchanges == before


def test_a_lane_of_cuda_is_of_the_device_that_is_current_when_it_is_made(cuda: Cuda) -> None:
    cuda.set(OURS.index)
    assert CudaLane("cuda").device == OURS


# ---- captures ---------------------------------------------------------------------------------------------------


def test_only_a_capture_on_the_lanes_device_counts(lane: Any, cuda: Cuda) -> None:
    elsewhere = cuda.current_stream(0)
    elsewhere.graph = Graph()
    assert not lane.capturing()
    assert lane.graph() is None
    elsewhere.graph = None
    with cuda.captured(Graph()):
        assert lane.capturing()
        assert lane.graph() is not None


def test_a_moment_is_captured_if_the_stream_that_is_named_is(lane: Any, cuda: Cuda) -> None:
    outside = Stream(OURS)
    with cuda.captured(Graph()):
        captured = cuda.current_stream(OURS)
        assert lane.now().graph is lane.graph()
        assert lane.now(outside).graph is None
        with torch.cuda.device(OURS), torch.cuda.stream(outside):  # type: ignore[arg-type]
            assert not lane.capturing()
            assert lane.now(captured).graph is not None


def test_a_captured_copy_is_not_timed_and_stays_in_its_graph(lane: Any, cuda: Cuda) -> None:
    with cuda.captured(Graph()):
        cuda.events.clear()
        event = lane.issue("out", lambda: cuda.work("copy"), after=[], nbytes=8)
        assert cuda.take() == ["record compute#2", "out waits for compute#2", "copy on out", "record out#1"]
        assert not any(made.enable_timing for made in cuda.events)
        assert not event.finished(), "CUDA refuses the question"
        lane.settle("out")
        assert cuda.take() == ["record out#2", "compute waits for out#2"]
        lane.settle("in")
        assert cuda.take() == [], "nothing of it is captured"
    assert not event.finished()
    assert lane.spans() == []


def test_work_outside_its_graph_does_not_wait_for_what_is_captured(lane: Any, cuda: Cuda) -> None:
    """A graph ends only after its copies; whoever launches the backward's has launched the forward's before."""
    with cuda.captured(Graph()):
        out = lane.issue("out", lambda: cuda.work("copy"))
        out.wait()
        assert cuda.take()[-1] == "compute waits for out#1"
    with cuda.captured(Graph()):
        cuda.take()
        out.wait()
        lane.settle("out")
        lane.issue("in", lambda: cuda.work("copy"), after=[out])
        assert cuda.take() == ["record compute#3", "in waits for compute#3", "copy on in", "record in#1"]
    out.wait()
    lane.issue("in", lambda: cuda.work("copy"), after=[out])
    assert cuda.take() == ["copy on in", "record in#2"]
    lane.settle("out")
    assert cuda.take() == ["record out#2", "compute waits for out#2"], "the stream is not captured any more"


def test_what_is_captured_cannot_wait_for_a_copy_outside_a_graph(lane: Any, cuda: Cuda) -> None:
    event = lane.issue("in", lambda: cuda.work("copy"))
    with cuda.captured(Graph()):
        assert not event.finished(), "CUDA refuses the question"
        cuda.take()
        with pytest.raises(UnsupportedError, match="wait for a copy outside that graph"):
            event.wait()
        with pytest.raises(UnsupportedError, match="wait for a copy outside that graph"):
            lane.issue("out", lambda: cuda.work("copy"), after=[event])
        assert cuda.take() == [], "the copy's stream is not captured yet"
        event.before_free(cuda.memory("x"))
        assert cuda.take() == ["hold x for in"]


def test_a_capture_that_torch_has_not_begun_is_refused(lane: Any, cuda: Cuda) -> None:
    refusal = r"only be captured into graphs of torch\.cuda\.CUDAGraph"
    with cuda.captured("somebody's graph"), pytest.raises(UnsupportedError, match=refusal):
        lane.issue("out", lambda: cuda.work("copy"))


def test_the_fake_refuses_what_cuda_does(lane: Any, cuda: Cuda) -> None:
    outside = lane.now()
    with torch.cuda.device(OURS):
        with cuda.captured(Graph()):
            inside = lane.now()
            with pytest.raises(Refused, match="uncaptured work"):
                outside.event.wait(cuda.current_stream())
            with pytest.raises(Refused, match="when stream is capturing"):
                outside.event.query()
        with pytest.raises(Refused, match="captured into another graph"):
            inside.event.wait(cuda.current_stream())
        with pytest.raises(Refused, match="when stream is capturing"):
            inside.event.synchronize()
    with pytest.raises(AssertionError, match="makes a context on device 0"):
        outside.event.query()
    with pytest.raises(AssertionError, match="on device 0"), torch.cuda.stream(Stream(OURS)):  # type: ignore[arg-type]
        lane.now()
