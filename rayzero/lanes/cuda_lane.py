"""The lane of a CUDA device: one stream per direction.

[Note: captured work] While a stream is captured, nothing runs: what the stream is given becomes a part of a graph,
which runs when it is launched. CUDA refuses to let captured work wait for work outside its graph, or other work for
captured work, and to ask whether captured work is over (CUDA C++ Programming Guide, Stream Capture). Between graphs,
waits are not needed: each graph ends only after all copies in it, and a backward's graph is launched after the
forward's.

[Note: graph marks] A graph may only contain side-stream work that its own stream has waited for, and may only begin
with such work if an event orders it. So copies of a captured forward and backward stay inside their graph: at the end
of a captured forward, ``GraphMarks.forward_record()`` joins the copies out and records ``event``. At the layer's input,
``backward_record(x)`` does the same with the copies in once the backward has passed it. On a thread lane both wait for
the copies, and ``event`` is None.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from rayzero.concurrency.threads import on_device, sleep_until_done, with_index
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.lanes.lane import SPANS_KEPT, Direction, Event, Lane, Span


class StreamEvent(ABC):
    """See ``Event``. Decides what is waited for and asked; its subclasses do that on their device."""

    __slots__ = ()

    graph: object | None  # that it is captured into; None: it is not captured

    def waits_in(self, graph: object | None) -> bool:
        """Whether a stream that is captured into ``graph`` (None: into none) has to wait for it.

        Raises UnsupportedError if the stream is captured and this event is not: CUDA has no such wait."""
        if self.graph is not None:
            return self.graph is graph
        if graph is not None:
            raise UnsupportedError(
                "what is captured into a CUDA graph would have to wait for a copy outside that graph: capture both, or "
                "neither"
            )
        return True

    def finished(self) -> bool:
        """See ``Event``; False also where CUDA allows no question."""
        return self.graph is None and self._caller() is None and self._passed()

    def settle(self) -> None:
        """See ``Event``: like ``wait()``. A device reports errors itself, at a later call."""
        self.wait()

    def wait(self) -> None:
        """See ``Event``: the current stream waits, unless launches order it. Raises as ``waits_in`` does."""
        if self.waits_in(self._caller()):
            self._order()

    def before_free(self, *memory: Tensor) -> None:
        """See ``Event``: the current stream waits, and the next user of the memory waits for it."""
        if self.graph is None and self._caller() is not None:
            for tensor in memory:
                self._hold(tensor)
            return
        self.wait()
        for tensor in memory:
            self._hold_for_caller(tensor)

    @abstractmethod
    def _caller(self) -> object | None:
        """The graph that the current stream is captured into."""

    @abstractmethod
    def _passed(self) -> bool:
        """Whether the device has reached it."""

    @abstractmethod
    def _order(self) -> None:
        """Let the current stream wait."""

    @abstractmethod
    def _hold(self, memory: Tensor) -> None:
        """Once freed, ``memory`` is handed out again only after what the event's own stream has been given by then."""

    @abstractmethod
    def _hold_for_caller(self, memory: Tensor) -> None:
        """Once freed, ``memory`` is handed out again only after what the current stream has been given by then."""


class CudaEvent(StreamEvent):
    """A point of a stream's work."""

    __slots__ = ("_lane", "_stream", "event", "graph")

    def __init__(self, lane: CudaLane, stream: torch.cuda.Stream, graph: object | None) -> None:
        """Record it on ``stream``, which is captured into ``graph``; the caller is on the lane's device. A thread that
        joins it sleeps; what is captured has no time."""
        self._lane, self._stream, self.graph = lane, stream, graph
        self.event = torch.cuda.Event(enable_timing=graph is None, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def join(self) -> None:
        with self._lane.current():
            self.event.synchronize()

    def _caller(self) -> object | None:
        return self._lane.graph()

    def _passed(self) -> bool:
        with self._lane.current():
            return bool(self.event.query())  # type: ignore[no-untyped-call]

    def _order(self) -> None:
        with self._lane.current():
            torch.cuda.current_stream(self._lane.device).wait_event(self.event)

    def _hold(self, memory: Tensor) -> None:
        with self._lane.current():
            memory.record_stream(self._stream)

    def _hold_for_caller(self, memory: Tensor) -> None:
        self._lane.used(memory)


@dataclass(frozen=True, slots=True)
class _Copy:
    direction: Direction
    label: str
    start: CudaEvent
    stop: CudaEvent
    nbytes: int


class CudaLane:
    """Copies on two streams of one CUDA device. See ``Lane`` and [Note: who may free device memory].

    Any thread may call it: CUDA is only asked on the lane's device. [Note: a thread's device]"""

    def __init__(self, device: torch.device | str = "cuda", *, overlap: bool = True) -> None:
        """``overlap=False``: copies run on the current stream. Raises ConfigError if ``device`` is not CUDA."""
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise ConfigError(f"a CUDA lane needs a CUDA device, got {self.device}")
        self.device = with_index(self.device)
        self._streams: dict[Direction, torch.cuda.Stream] = {}
        if overlap:
            self._streams["out"] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._streams["in"] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._copies: deque[_Copy] = deque(maxlen=SPANS_KEPT)
        self._graphs: WeakKeyDictionary[torch.cuda.CUDAGraph, object] = WeakKeyDictionary()
        self._last: dict[Direction, object | None] = {}  # the graph that the last copy is captured into
        with self.current():
            self._made = CudaEvent(self, torch.cuda.current_stream(self.device), None)

    def current(self) -> AbstractContextManager[object]:
        """Makes the lane's device the calling thread's."""
        return on_device(self.device)

    def issue(
        self,
        direction: Direction,
        copy: Callable[[], object],
        *,
        after: Sequence[Event] | None = None,
        holds: Sequence[Tensor] = (),
        label: str = "",
        nbytes: int = 0,
    ) -> Event:
        """See ``Lane``: queues the work of ``copy`` on the direction's stream."""
        with self.current():
            stream, graph = self._stream(direction), self.graph()
            # first of all: what is refused must leave no stream that is captured and not joined
            before = [event for event in after or () if not isinstance(event, StreamEvent) or event.waits_in(graph)]
            if after is None or graph is not None:  # so the stream is captured too
                stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.no_grad(), torch.cuda.stream(stream):
                for event in before:
                    event.wait()
                began = CudaEvent(self, stream, None) if nbytes and graph is None else None
                try:
                    copied = copy() is not False
                finally:  # if it raised, the work that it had queued runs all the same
                    for tensor in holds:
                        tensor.record_stream(stream)
                ended = CudaEvent(self, stream, graph)
            self._last[direction] = graph
            if copied and began is not None:
                self._copies.append(_Copy(direction, label, began, ended, nbytes))
            return ended

    def now(self, stream: Hashable = None) -> Event:
        """See ``Lane``: an event on the current stream, or on ``stream``."""
        with self.current():
            if stream is None:
                return CudaEvent(self, torch.cuda.current_stream(self.device), self.graph())
            assert isinstance(stream, torch.cuda.Stream)
            with torch.cuda.stream(stream):
                return CudaEvent(self, stream, self.graph())

    def stream(self) -> Hashable:
        return torch.cuda.current_stream(self.device)

    def used(self, memory: Tensor) -> None:
        """See ``Lane``. The allocator ignores the stream that the memory was allocated on."""
        with self.current():
            memory.record_stream(torch.cuda.current_stream(self.device))

    def seconds(self, start: Event, stop: Event) -> float | None:
        """See ``Lane``. The device's time; None until the device has reached both events."""
        assert isinstance(start, CudaEvent)
        assert isinstance(stop, CudaEvent)
        with self.current():
            return _seconds(start, stop) if start.finished() and stop.finished() else None

    def spans(self) -> list[Span]:
        """See ``Lane``. The clock is the device's and starts when the lane is made."""
        with self.current():
            return [self._span(copy) for copy in list(self._copies) if copy.stop.finished()]

    def _span(self, copy: _Copy) -> Span:
        start = _seconds(self._made, copy.start)
        return Span(copy.direction, copy.label, start, start + _seconds(copy.start, copy.stop), copy.nbytes)

    def settle(self, direction: Direction) -> None:
        """See ``Lane``: the current stream waits for the direction's stream, in a capture if that is captured too."""
        with self.current():
            graph = self.graph()
            if graph is None or self._last.get(direction) is graph:
                torch.cuda.current_stream(self.device).wait_stream(self._stream(direction))

    def drain(self, direction: Direction) -> None:
        """See ``Lane``. The thread sleeps."""
        with self.current():
            sleep_until_done(self._stream(direction))

    def capturing(self) -> bool:
        """See ``Lane``: the current stream of the lane's device."""
        with self.current():
            return torch.cuda.is_current_stream_capturing()

    def graph(self) -> object | None:
        """What stands for the graph that the current stream is captured into; None outside a capture.

        Raises UnsupportedError if torch does not know the graph."""
        with self.current():
            if not torch.cuda.is_current_stream_capturing():
                return None
            try:
                graph = torch.cuda.CUDAGraph.get_currently_capturing_graph()
            except RuntimeError as error:  # the capture was begun at CUDA itself
                raise _unknown_graph() from error
        if not isinstance(graph, torch.cuda.CUDAGraph):
            raise _unknown_graph()
        return self._graphs.setdefault(graph, object())

    def close(self) -> None:
        """See ``Lane``: does nothing. Streams need no end, and queued work still runs."""

    def _stream(self, direction: Direction) -> torch.cuda.Stream:
        return self._streams.get(direction) or torch.cuda.current_stream(self.device)


def _seconds(start: CudaEvent, stop: CudaEvent) -> float:
    return float(start.event.elapsed_time(stop.event)) / 1e3


def _unknown_graph() -> UnsupportedError:
    return UnsupportedError("copies can only be captured into graphs of torch.cuda.CUDAGraph")


# ---- marks for CUDA graphs ------------------------------------------------------------------------------------------


class GraphMarks:
    """The stream and the events between a captured graph and the copies around it. [Note: graph marks]"""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._cuda = lane.device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """A stream to capture on, made at the first use; None on a thread lane."""
        if self._cuda and self._stream is None:
            self._stream = torch.cuda.Stream(self._lane.device)  # type: ignore[no-untyped-call]
        return self._stream

    @property
    def event(self) -> torch.cuda.Event | None:
        """The event that both marks record, visible outside the graph; None on a thread lane."""
        if self._cuda and self._event is None:
            self._event = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
        return self._event

    def forward_record(self, event: torch.cuda.Event | None = None) -> None:
        """Join the copies out, then record ``event`` (by default ``self.event``)."""
        self._lane.settle("out")
        self._record(event)

    def backward_record(self, x: Tensor, event: torch.cuda.Event | None = None) -> Tensor:
        """Returns a view of ``x``, of any shape and dtype. Its backward joins the copies in, then records ``event``."""
        marked: Tensor = _BackwardMark.apply(x, self, event)  # type: ignore[no-untyped-call]
        return marked

    def _joined_in(self, event: torch.cuda.Event | None) -> None:
        self._lane.settle("in")
        self._record(event)

    def _record(self, event: torch.cuda.Event | None) -> None:
        event = event if event is not None else self.event
        if event is not None:
            event.record(torch.cuda.current_stream(self._lane.device))


class _BackwardMark(torch.autograd.Function):
    """The identity. Its backward joins the copies in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, marks: GraphMarks, event: torch.cuda.Event | None) -> Tensor:
        ctx.marks, ctx.event = marks, event
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.marks._joined_in(ctx.event)
        return grad, None, None
