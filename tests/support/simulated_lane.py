"""A lane that plays the streams of a CUDA device on the CPU, with copies as late as CUDA may make them.

::

    lane = SimulatedLane(seed=7)
    with device_behind(lane):  # what is prepared here is on a device behind this lane
        model, optimizer = rayzero.prepare(model, optimizer)
    with lane.watching():  # finds accesses that nothing orders, also where the bits are right
        ...                # ActivationOffload(..., lane=lane), HybridDeviceOptimizer(..., lane=lane)
    with lane.watching(each=lambda: check(lane.held("out"))):  # also what holds at every operation
        ...

A computing stream is the thread itself: what it computes is done at once. A copy is taken apart into its operations
when it is issued, as CUDA queues kernels, and makes them later: when the seeded scheduler picks it, or when somebody
waits. So a missing wait gives wrong bits with some seed, and a ``RaceError`` with every seed. As with CUDA's caching
allocator, device memory that nobody holds until its copy has run, and that is not in ``holds``, is gone by then:
``FreedError``.

A program may compute on several streams, as under ``torch.cuda.stream()``. What they share must be ordered, and memory
of one that another uses must be held for it: else ``RaceError``::

    with lane.on("side"):  # torch.cuda.stream(side)
        lane.wait_stream("compute")  # side.wait_stream(main)
        y = branch(x)
    lane.wait_stream("side")
    lane.used(y)  # y.record_stream(main)
    simulated_autograd.backward(lane, y.sum())  # each node on the stream of its forward, as autograd does it

and be captured into CUDA graphs, where CUDA refuses many a wait: else ``CaptureError``::

    with lane.captured():  # torch.cuda.graph(torch.cuda.CUDAGraph())
        loss = model(x)
        offload.graph_marks.forward_record()
    with lane.captured():
        loss.backward()

Each direction has a clock of its own. A copy takes its bytes / ``link`` seconds there, however late it is made, and
begins when its direction and what it waits for are ready. The computing streams' is the thread's clock, which jumps
when one waits for a copy that would not have ended by then.

What it cannot play: work of a computing stream that is late itself (the check of orders finds what depends on it),
graphs that are launched again, pageable memory, and operations that pass torch's dispatcher by (native kernels).
"""

from __future__ import annotations

import importlib
import random
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rayzero.engine.units.transfers import UnitTransfers, device_transfers
from rayzero.lanes.cuda_lane import StreamEvent
from rayzero.lanes.lane import SPANS_KEPT, Direction, Event, Lane, Span
from rayzero.layout.model_layout import UnitLayout
from rayzero.modes import MachineMode
from rayzero.protocol.store import ParameterStore
from tests.support.happens_before import HappensBefore, Stamp
from tests.support.simulated_copy import Recording, Work, accesses, makes_view, shares_memory

COMPUTE, _HOST = "compute", "host"
sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
_LINGER_S = (0.0, 0.0, 2e-4, 2e-3)  # how late a copy may be for which a thread waits


class CaptureError(AssertionError):
    """CUDA refuses this while a stream is captured into a graph, or of what was."""


class _Graph:
    """A CUDA graph that is being captured, or was."""

    def __init__(self) -> None:
        self.last: dict[Direction, Stamp] = {}  # the ends of the last copies in it


@dataclass(eq=False)
class SimulatedEvent(StreamEvent):
    """A point of a stream's work."""

    lane: SimulatedLane
    work: Work | None  # None: of a computing stream, which has passed it
    stamp: Stamp
    at: float  # seconds of its stream's clock
    graph: _Graph | None = None

    def join(self) -> BaseException | None:
        """See ``Event``."""
        self.lane._join(self)
        return None

    def _caller(self) -> object | None:
        return self.lane._graph

    def _passed(self) -> bool:
        return self.lane._finished(self)

    def _order(self) -> None:
        self.lane._wait(self)

    def _hold(self, memory: Tensor) -> None:
        self.lane._hold(self, memory)

    def _hold_for_caller(self, memory: Tensor) -> None:
        self.lane.used(memory)


class SimulatedLane:
    """See ``Lane``. Thread-safe."""

    def __init__(self, seed: int = 0, *, link: float = 10e9, clock: Callable[[], float] = time.perf_counter) -> None:
        """``seed``: of the scheduler. Every third one makes all copies at the last moment. ``link``: bytes per second
        in each direction. ``clock``: of the thread that computes, seconds."""
        self.device = torch.device("cpu")
        self._draws = random.Random(seed)
        self._eager = (0.0, 0.3, 0.8)[seed % 3]  # how likely a call makes a copy that nobody waits for
        self._queues: dict[Direction, deque[Work]] = {"in": deque(), "out": deque()}
        self._link, self._clock = link, clock
        self._ahead = 0.0  # seconds that the computing stream has stood
        self._free_at: dict[Direction, float] = {"in": 0.0, "out": 0.0}
        self._orders = HappensBefore(_HOST)
        self._streams = [COMPUTE]  # the last one is current
        self._made_on: list[tuple[int, str]] = [(0, COMPUTE)]  # first sequence number of autograd's nodes -> stream
        self._spans: deque[Span] = deque(maxlen=SPANS_KEPT)
        self._lock = threading.RLock()
        self._issuing: Work | None = None  # whose copy is being taken apart
        self._busy = 0  # the thread that takes it apart, or makes copies
        self._capture: tuple[int, _Graph] | None = None  # the thread whose work is captured, and into what
        self._checks = False
        self._each: Callable[[], object] = lambda: None

    # ---- the lane

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
        """See ``Lane``: takes the work of ``copy`` apart and queues it."""
        with self._lock:
            self._schedule()
            events = [self.now()] if after is None else list(after)
            assert all(isinstance(event, SimulatedEvent) for event in events), "events of another lane"
            events = [event for event in events if event.waits_in(self._graph)]  # type: ignore[attr-defined]
            self._check_graphs(events)  # type: ignore[arg-type]
            work = Work(direction, events, holds=list(holds), label=label)  # type: ignore[arg-type]
            work.began = work.ended = max(
                self._time(), self._free_at[direction], *(each.at for each in work.after), 0.0
            )
            self._issuing = work
            try:
                with self._at_work(), torch.no_grad(), Recording(work, self._link):
                    work.nbytes = nbytes if copy() is not False else 0
            finally:
                self._issuing = None
                self._free_at[direction] = work.ended
                self._queues[direction].append(work)
            for event in work.after:
                self._orders.order(direction, event.stamp)
            self._orders.order(direction, self._orders.record(_HOST))
            if self._checks:
                for tensor in work.holds:
                    self._orders.hold(direction, tensor)
                for operation in work.operations:
                    operation.check(self._orders, work)
            stamp = self._orders.record(direction)
            if self._graph is not None:
                self._graph.last[direction] = stamp
            return SimulatedEvent(self, work, stamp, work.ended, self._graph)

    def now(self, stream: Hashable = None) -> Event:
        """See ``Lane``."""
        with self._lock:
            if (work := self._issuing) is not None:
                return SimulatedEvent(self, work, self._orders.record(work.direction), work.ended, self._graph)
            on = self._current if stream is None else str(stream)
            self._orders.order(on, self._orders.record(_HOST))
            return SimulatedEvent(self, None, self._orders.record(on), self._time(), self._graph)

    def stream(self) -> Hashable:
        """See ``Lane``."""
        return self._current

    def used(self, memory: Tensor) -> None:
        """See ``Lane``."""
        with self._lock:
            self._orders.hold(self._current, memory)

    def _hold(self, event: SimulatedEvent, memory: Tensor) -> None:
        with self._lock:
            assert event.work is not None, "held for a copy"
            self._orders.hold(event.work.direction, memory)
            if not event.work.has_run:
                event.work.holds.append(memory)

    def _time(self) -> float:
        """Of the computing streams."""
        return self._clock() + self._ahead

    def _stand_until(self, at: float) -> None:
        self._ahead += max(0.0, at - self._time())

    def seconds(self, start: Event, stop: Event) -> float | None:
        """See ``Lane``."""
        assert isinstance(start, SimulatedEvent)
        assert isinstance(stop, SimulatedEvent)
        known = all(each.graph is None and (each.work is None or each.work.has_run) for each in (start, stop))
        return stop.at - start.at if known and self._graph is None else None

    def spans(self) -> list[Span]:
        """See ``Lane``."""
        return list(self._spans)

    def settle(self, direction: Direction) -> None:
        """See ``Lane``."""
        with self._lock:
            if self._graph is not None and direction not in self._graph.last:
                return  # its stream is not captured
            self._run_all(direction)
            self._orders.order(self._current, self._orders.record(direction))
            self._stand_until(self._free_at[direction])

    def drain(self, direction: Direction) -> None:
        """See ``Lane``."""
        self._refuse_in_capture("synchronize a stream")
        with self._lock:
            self._run_all(direction)
            self._orders.order(_HOST, self._orders.record(direction))
            self._stand_until(self._free_at[direction])

    def capturing(self) -> bool:
        """See ``Lane``."""
        return self._graph is not None

    def close(self) -> None:
        """See ``Lane``."""
        with self._lock:
            for direction in self._queues:
                self._run_all(direction)

    @property
    def waiting(self) -> int:
        """How many copies are queued."""
        return sum(map(len, self._queues.values()))

    def allocated(self) -> int:
        """Bytes of the device memory that was allocated while the lane watched, and is not freed. Host memory is taken
        for device memory here, so let a step make the host's buffers before."""
        with self._lock:
            return self._orders.allocated()

    def held(self, direction: Direction) -> int:
        """Bytes of device memory that nobody but queued copies of a direction holds, whole storages."""
        with self._lock:
            held = [tensor.untyped_storage() for work in self._queues[direction] for tensor in work.holds]
            return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())

    # ---- computing streams

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """What the caller computes inside is queued on ``stream``, and so is the backward of that; see
        ``torch.cuda.stream``."""
        self._enter(stream)
        try:
            yield
        finally:
            self._leave()

    def _enter(self, stream: str) -> None:
        self._streams.append(stream)
        self._made_on.append((sequence_number(), stream))

    def _leave(self) -> None:
        self._streams.pop()
        self._made_on.append((sequence_number(), self._current))

    @property
    def _current(self) -> str:
        return self._streams[-1]

    def made_on(self, node: int) -> str:
        """The stream on which autograd's node with this sequence number was made."""
        at = bisect_right(self._made_on, node, key=lambda change: change[0]) - 1
        return self._made_on[at][1]

    def wait_stream(self, stream: str) -> None:
        """What the current stream does next comes after what ``stream`` has done so far."""
        self.now(stream).wait()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Capture all that this thread does into one CUDA graph, by CUDA's rules. The graph is launched once:
        as the block runs.

        Raises CaptureError for what CUDA refuses, also if the block ends before the computing stream comes after all
        copies in it."""
        assert self._capture is None, "one capture at a time"
        graph = _Graph()
        self._capture = threading.get_ident(), graph
        try:
            yield
        finally:
            self._capture = None
        for direction, stamp in graph.last.items():
            if not self._orders.comes_after(self._current, stamp):
                raise CaptureError(f"the stream of copies {direction!r} is not joined at the end of a capture")

    @contextmanager
    def watching(self, each: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Check the order of everything that this thread computes, and of the copies that it issues. Raises RaceError
        where it happens. ``each``: called before every operation of the thread; it raises what it finds."""
        self._checks, self._each = True, each
        try:
            with _Watching(self):
                yield
            with self._lock:
                self._orders.check_freed()
        finally:
            self._checks, self._each = False, lambda: None

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        outer, self._busy = self._busy, threading.get_ident()
        try:
            yield
        finally:
            self._busy = outer

    @property
    def _computes(self) -> bool:
        """Whether what this thread does now is its own, not a copy's."""
        return self._busy != threading.get_ident()

    @property
    def _graph(self) -> _Graph | None:
        """Into which the calling thread's work is captured."""
        thread, graph = self._capture or (0, None)
        return graph if thread == threading.get_ident() else None

    # ---- events

    def _check_graphs(self, events: Sequence[SimulatedEvent]) -> None:
        if any(event.graph is not self._graph for event in events):
            raise CaptureError("a stream waits for an event of another CUDA graph, or of none")

    def _refuse_in_capture(self, what: str, event: SimulatedEvent | None = None) -> None:
        if self._graph is not None or (event is not None and event.graph is not None):
            raise CaptureError(f"{what} during a capture, or after it")

    def _finished(self, event: SimulatedEvent) -> bool:
        self._refuse_in_capture("query an event", event)
        with self._lock:
            self._schedule()
            if event.work is None or self._orders.comes_after(_HOST, event.stamp):
                return True
            # A stream that waited for it has had it made here, but on a device may still be behind the host.
            done = event.work.has_run and self._draws.random() < self._eager
            if done:
                self._orders.order(_HOST, event.stamp)
            return done

    def _wait(self, event: SimulatedEvent) -> None:
        self._check_graphs([event])
        with self._lock:
            if self._issuing is None:
                self._run_until(event)
                self._orders.order(self._current, event.stamp)
                self._stand_until(event.at)
            elif event.work is not self._issuing:  # a stream waits inside a copy
                self._issuing.after = [*self._issuing.after, event]
                self._issuing.ended = max(self._issuing.ended, event.at)
                self._orders.order(self._issuing.direction, event.stamp)

    def _join(self, event: SimulatedEvent) -> None:
        self._refuse_in_capture("synchronize an event", event)
        time.sleep(self._draws.choice(_LINGER_S))  # the link is slow: the fault under test
        with self._lock:
            self._run_until(event)
            self._orders.order(_HOST, event.stamp)

    # ---- the scheduler

    def _schedule(self) -> None:
        """Make some copies that nobody waits for yet."""
        while self.waiting and self._draws.random() < self._eager:
            self._run_next(self._draws.choice([d for d, queue in self._queues.items() if queue]))

    def _run_until(self, event: SimulatedEvent) -> None:
        while event.work is not None and event.work is not self._issuing and not event.work.has_run:
            self._run_next(event.work.direction)

    def _run_all(self, direction: Direction) -> None:
        while self._queues[direction]:
            self._run_next(direction)

    def _run_next(self, direction: Direction) -> None:
        work = self._queues[direction].popleft()
        for event in work.after:
            self._run_until(event)
        try:
            with self._at_work():
                for operation in work.operations:
                    operation.run(work)
        finally:
            work.has_run = True
            work.operations, work.holds, work.after = [], [], []
        if work.nbytes:
            self._spans.append(Span(direction, work.label, work.began, work.ended, work.nbytes))


@contextmanager
def device_behind(lane: Lane) -> Iterator[None]:
    """Models that are prepared in this block are those of a rank on the device of ``lane``."""

    def make(
        store: ParameterStore, device: torch.device, units: Sequence[UnitLayout], *, pinned: bool
    ) -> UnitTransfers:
        return device_transfers(store, lane, units, pinned=False)

    prepare = importlib.import_module("rayzero.engine.prepare")
    # A device computes with memory of its own, never with the owners'.
    with patch.object(prepare, "make_transfers", make), patch.object(prepare, "mapped_units", lambda *_: {}):
        yield


class _Watching(MachineMode):
    """Notes what the current stream allocates, reads and writes."""

    def __init__(self, lane: SimulatedLane) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lane = lane

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._lane._computes or makes_view(func):
            return func(*args, **kwargs)
        self._lane._each()
        reads, writes = accesses(func, args, kwargs)
        self._note(func, reads, writes=False)
        self._note(func, writes, writes=True)
        result = func(*args, **kwargs)
        if not writes:
            made = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.numel()]
            self._allocated([each for each in made if not any(shares_memory(each, read) for read in reads)])
            if not str(func).startswith("aten.empty"):  # which touches nothing
                self._note(func, made, writes=True)
        return result

    def _allocated(self, made: Sequence[Tensor]) -> None:
        with self._lane._lock:
            for tensor in made:
                self._lane._orders.allocate(self._lane._current, tensor)

    def _note(self, func: Any, tensors: Sequence[Tensor], *, writes: bool) -> None:
        with self._lane._lock:
            orders, stream = self._lane._orders, self._lane._current
            orders.order(stream, orders.record(_HOST))  # it is queued after what this thread knows
            orders.check_freed()
            for tensor in tensors:
                orders.access(stream, tensor, writes=writes, what=str(func).removeprefix("aten."))
