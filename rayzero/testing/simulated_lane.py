"""A lane that plays the streams of a CUDA device on the CPU, with copies as late as CUDA may make them.

::

    lane = SimulatedLane(seed=7)
    with device_behind(lane):  # what is prepared here is on a device behind this lane
        model, optimizer = rayzero.prepare(model, optimizer)
    with lane.watching():  # finds accesses that nothing orders, also where the bits are right
        ...                # ActivationOffload(..., lane=lane), HybridDeviceOptimizer(..., lane=lane)
    with lane.watching(each=lambda: check(lane.held("out"))):  # also what holds at every operation
        ...

The computing stream is the thread itself: what it computes is done at once. A copy is taken apart into its operations
when it is issued, as CUDA queues kernels, and makes them later: when the seeded scheduler picks it, or when somebody
waits. So a missing wait gives wrong bits with some seed, and a ``RaceError`` with every seed. As with CUDA's caching
allocator, device memory that nobody holds until its copy has run, and that is not in ``holds``, is gone by then:
``FreedError``.

Every stream has a clock of its own. A copy takes its bytes / ``link`` seconds there, however late it is made, and
begins when its stream and what it waits for are ready. The computing stream's is the thread's clock, which jumps when
it waits for a copy that would not have ended by then.

What it cannot play: work of the computing stream that is late itself (the check of orders finds what depends on it),
CUDA graphs, pageable memory, and operations that pass torch's dispatcher by (native kernels).
"""

from __future__ import annotations

import importlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from rayzero.engine.units.transfers import UnitTransfers, device_transfers
from rayzero.lanes.lane import SPANS_KEPT, Direction, Event, Lane, Span
from rayzero.layout.model_layout import UnitLayout
from rayzero.protocol.store import ParameterStore
from rayzero.testing.happens_before import HappensBefore, Stamp

_COMPUTE, _HOST = "compute", "host"
_LINGER_S = (0.0, 0.0, 2e-4, 2e-3)  # how late a copy may be for which a thread waits


class FreedError(AssertionError):
    """Device memory was freed before a copy that uses it had run, and nothing held it."""


@dataclass(eq=False)
class SimulatedEvent:
    """A point of a stream's work."""

    lane: SimulatedLane
    work: _Work | None  # None: of the computing stream, which has passed it
    stamp: Stamp
    at: float  # seconds of its stream's clock

    def finished(self) -> bool:
        """See ``Event``."""
        return self.lane._finished(self)

    def settle(self) -> BaseException | None:
        """See ``Event``."""
        self.wait()
        return None

    def wait(self) -> None:
        """See ``Event``: what the computing stream does next comes after it."""
        self.lane._wait(self)

    def join(self) -> BaseException | None:
        """See ``Event``."""
        self.lane._join(self)
        return None

    def before_free(self) -> None:
        """See ``Event``."""
        self.wait()


@dataclass(eq=False)
class _Work:
    """A copy that is queued."""

    direction: Direction
    after: Sequence[SimulatedEvent]
    operations: list[_Operation] = field(default_factory=list)
    holds: list[Tensor] = field(default_factory=list)  # until it has run
    label: str = ""
    nbytes: int = 0
    began: float = 0.0  # on its stream's clock
    ended: float = 0.0
    has_run: bool = False


class SimulatedLane:
    """See ``Lane``. Thread-safe."""

    def __init__(self, seed: int = 0, *, link: float = 10e9, clock: Callable[[], float] = time.perf_counter) -> None:
        """``seed``: of the scheduler. Every third one makes all copies at the last moment. ``link``: bytes per second
        in each direction. ``clock``: of the thread that computes, seconds."""
        self.device = torch.device("cpu")
        self._draws = random.Random(seed)
        self._eager = (0.0, 0.3, 0.8)[seed % 3]  # how likely a call makes a copy that nobody waits for
        self._queues: dict[Direction, deque[_Work]] = {"in": deque(), "out": deque()}
        self._link, self._clock = link, clock
        self._ahead = 0.0  # seconds that the computing stream has stood
        self._free_at: dict[Direction, float] = {"in": 0.0, "out": 0.0}
        self._orders = HappensBefore()
        self._spans: deque[Span] = deque(maxlen=SPANS_KEPT)
        self._lock = threading.RLock()
        self._issuing: _Work | None = None  # whose copy is being taken apart
        self._busy = 0  # the thread that takes it apart, or makes copies
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
            work = _Work(direction, events, holds=list(holds), label=label)  # type: ignore[arg-type]
            work.began = work.ended = max(
                self._time(), self._free_at[direction], *(each.at for each in work.after), 0.0
            )
            self._issuing = work
            try:
                with self._at_work(), torch.no_grad(), _Recording(work, self._link):
                    work.nbytes = nbytes if copy() is not False else 0
            finally:
                self._issuing = None
                self._free_at[direction] = work.ended
                self._queues[direction].append(work)
            for event in work.after:
                self._orders.order(direction, event.stamp)
            self._orders.order(direction, self._orders.record(_HOST))
            if self._checks:
                for operation in work.operations:
                    operation.check(self._orders, work)
            return SimulatedEvent(self, work, self._orders.record(direction), work.ended)

    def now(self) -> Event:
        """See ``Lane``."""
        with self._lock:
            if (work := self._issuing) is not None:
                return SimulatedEvent(self, work, self._orders.record(work.direction), work.ended)
            self._orders.order(_COMPUTE, self._orders.record(_HOST))
            return SimulatedEvent(self, None, self._orders.record(_COMPUTE), self._time())

    def _time(self) -> float:
        """Of the computing stream."""
        return self._clock() + self._ahead

    def _stand_until(self, at: float) -> None:
        self._ahead += max(0.0, at - self._time())

    def seconds(self, start: Event, stop: Event) -> float | None:
        """See ``Lane``."""
        assert isinstance(start, SimulatedEvent)
        assert isinstance(stop, SimulatedEvent)
        if any(event.work is not None and not event.work.has_run for event in (start, stop)):
            return None
        return stop.at - start.at

    def spans(self) -> list[Span]:
        """See ``Lane``."""
        return list(self._spans)

    def settle(self, direction: Direction) -> None:
        """See ``Lane``."""
        with self._lock:
            self._run_all(direction)
            self._orders.order(_COMPUTE, self._orders.record(direction))
            self._stand_until(self._free_at[direction])

    def drain(self, direction: Direction) -> None:
        """See ``Lane``."""
        with self._lock:
            self._run_all(direction)
            self._orders.order(_HOST, self._orders.record(direction))
            self._stand_until(self._free_at[direction])

    def capturing(self) -> bool:
        """Never."""
        return False

    def close(self) -> None:
        """See ``Lane``."""
        with self._lock:
            for direction in self._queues:
                self._run_all(direction)

    @property
    def waiting(self) -> int:
        """How many copies are queued."""
        return sum(map(len, self._queues.values()))

    def held(self, direction: Direction) -> int:
        """Bytes of device memory that nobody but queued copies of a direction holds, whole storages."""
        with self._lock:
            held = [tensor.untyped_storage() for work in self._queues[direction] for tensor in work.holds]
            return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())

    @contextmanager
    def watching(self, each: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Check the order of everything that this thread computes, and of the copies that it issues. Raises RaceError
        where it happens. ``each``: called before every operation of the thread; it raises what it finds."""
        self._checks, self._each = True, each
        try:
            with _Watching(self):
                yield
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

    # ---- events

    def _finished(self, event: SimulatedEvent) -> bool:
        with self._lock:
            self._schedule()
            done = event.work is None or event.work.has_run
            if done:
                self._orders.order(_HOST, event.stamp)
            return done

    def _wait(self, event: SimulatedEvent) -> None:
        with self._lock:
            if self._issuing is None:
                self._run_until(event)
                self._orders.order(_COMPUTE, event.stamp)
                self._stand_until(event.at)
            elif event.work is not self._issuing:  # a stream waits inside a copy
                self._issuing.after = [*self._issuing.after, event]
                self._issuing.ended = max(self._issuing.ended, event.at)
                self._orders.order(self._issuing.direction, event.stamp)

    def _join(self, event: SimulatedEvent) -> None:
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

    with patch.object(importlib.import_module("rayzero.engine.prepare"), "make_transfers", make):
        yield


# ---- operations ---------------------------------------------------------------------------------------------------


class _Weak:
    """A tensor whose memory is its owner's: gone once the owner has freed it."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._like = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self, work: _Work) -> Tensor:
        dtype, offset, shape, stride = self._like
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise FreedError(
                f"copy {work.label!r} ({work.direction}) uses {dtype} {tuple(shape)} on the device, which was freed "
                "before it ran: name it in holds, or keep it until after wait()"
            )
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


@dataclass(eq=False)
class _Operation:
    """One operation of a copy."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    made: list[Tensor]  # what it returns that is new memory: filled when it runs
    reads: list[Tensor | _Weak]
    writes: list[Tensor | _Weak]

    @property
    def name(self) -> str:
        return str(self.function).removeprefix("aten.")

    def check(self, orders: HappensBefore, work: _Work) -> None:
        """Note its accesses; see ``HappensBefore.access``."""
        what = f"{self.name} of copy {work.label!r}"
        for found, writes in ((self.reads, False), (self.writes, True)):
            for each in found:
                tensor = each.tensor(work) if isinstance(each, _Weak) else each
                orders.access(work.direction, tensor, writes=writes, what=what)

    def run(self, work: _Work) -> None:
        """Make it."""

        def strong(each: Any) -> Any:
            return each.tensor(work) if isinstance(each, _Weak) else each

        arguments, keywords = tree_map_only(_Weak, strong, (self.arguments, self.keywords))
        with torch.no_grad():
            result = self.function(*arguments, **keywords)
            for into, values in zip(self.made, tree_leaves(result), strict=False):
                into.copy_(values)


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes a copy apart. What it reads (out) or writes (in) on the device it must not keep alive."""

    def __init__(self, work: _Work, link: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._work, self._link = work, link
        self._own = set[int]()  # addresses of memory that the copy itself has made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads, writes = _accesses(func, args, kwargs)
        if not writes and _makes_view(func):
            return func(*args, **kwargs)
        on_device = reads if self._work.direction == "out" else writes

        def kept(tensor: Tensor) -> Tensor | _Weak:
            address = tensor.untyped_storage().data_ptr()
            theirs = any(tensor is each for each in on_device) and address not in self._own
            return _Weak(tensor) if theirs else tensor.detach()

        result: Any = None
        made: list[Tensor] = []
        if not writes:  # it makes new memory: which has its size now, and its values once it runs
            result = func(*args, **kwargs)
            made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
            self._own.update(each.untyped_storage().data_ptr() for each in made)
        elif func._schema.returns:
            result = writes[0] if len(func._schema.returns) == 1 else tuple(writes)
        arguments, keywords = tree_map_only(Tensor, kept, (args, kwargs))
        self._work.ended += sum(each.nbytes for each in (writes or made)) / self._link
        self._work.operations.append(
            _Operation(func, arguments, keywords, made, [*map(kept, reads)], [*map(kept, writes)])
        )
        return result


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what the computing stream reads and writes."""

    def __init__(self, lane: SimulatedLane) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lane = lane

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._lane._computes or _makes_view(func):
            return func(*args, **kwargs)
        self._lane._each()
        reads, writes = _accesses(func, args, kwargs)
        self._note(func, reads, writes=False)
        self._note(func, writes, writes=True)
        result = func(*args, **kwargs)
        if not writes and not str(func).startswith("aten.empty"):  # which touches nothing
            self._note(func, [each for each in tree_leaves(result) if isinstance(each, Tensor)], writes=True)
        return result

    def _note(self, func: Any, tensors: Sequence[Tensor], *, writes: bool) -> None:
        with self._lane._lock:
            orders = self._lane._orders
            orders.order(_COMPUTE, orders.record(_HOST))  # it is queued after what this thread knows
            for tensor in tensors:
                orders.access(_COMPUTE, tensor, writes=writes, what=str(func).removeprefix("aten."))


def _accesses(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads, and those that it writes."""
    reads, writes = list[Tensor](), list[Tensor]()
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(each for each in tree_leaves(value) if isinstance(each, Tensor))
    return reads, writes


def _makes_view(func: Any) -> bool:
    """Whether what an operation returns is the memory of its argument, which it does not touch."""
    infos = [each.alias_info for each in func._schema.arguments if each.alias_info is not None]
    return bool(infos) and not any(info.is_write for info in infos)
