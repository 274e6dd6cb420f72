"""Keeps gathered parameters within their budget of bytes on the device, and owns the buffers they lie in;
and knows each fetch into one: what the store was asked for, when it arrived, and how long the rank waited for it.

[Note: the target] Under memory pressure, units aim at less than the budget (engine_memory.py). The target is a wish:
what computes gets its memory up to the budget. So a lower target evicts earlier, and never fails.

[Note: the budget] Every gathered unit leases its bytes from ``gpu_param_memory_budget``, whether they are in a buffer
of the pool or (on CPU ranks of the owners' host) in memory that the owners write. So the transport does not change
which units may be up. Gathered parameters never exceed the budget, except that one oversize unit is admitted alone. The
cache decides which units are up (unit_cache.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayzero.concurrency.futures import fail, settle
from rayzero.config import ZeroConfig
from rayzero.engine.private_torch import owning_slice
from rayzero.errors import ConfigError
from rayzero.lanes import Event, Lane, StreamUses
from rayzero.layout.model_layout import ModelLayout, UnitLayout
from rayzero.memory.pool import Buffer, BufferPool, Lease, MemoryBudget, buffer_bytes
from rayzero.protocol.store import ParameterStore
from rayzero.telemetry.spans import Over, nothing

Slices = tuple[torch.UntypedStorage, ...]
Shape = tuple[object, ...]
Views = tuple[Tensor, Slices]  # a buffer in one shape: flat, and a storage per slot
_USES = "uses"


@dataclass(frozen=True, slots=True, eq=False)
class UnitBuffer:
    """Leased memory for one unit's parameters, and a storage over each slot's range of it."""

    flat: Tensor  # 1D, unit.numel elements, the unit's dtype
    slices: Slices  # per slot; swapped under its Parameter while the unit is up
    lease: Buffer | Lease  # freed by: Residency.release
    mapped: bool = False  # True: the owners' memory, which only they fill
    made: dict[Any, Any] = field(default_factory=dict)  # stays with the memory from lease to lease

    def uses(self, lane: Lane) -> StreamUses:
        """Which streams of ``lane`` use the memory."""
        known: StreamUses | None = self.made.get(_USES)
        if known is None:
            known = self.made[_USES] = StreamUses(lane, self.flat)
        return known

    def settle(self) -> None:
        """Order what the caller computes next after all that uses the memory, if it is a device's."""
        uses: StreamUses | None = self.made.get(_USES)
        for event in uses.so_far() if uses is not None else ():
            event.wait()


def buffer_shape(unit: UnitLayout) -> Shape:
    """What two units must share to use the same buffer with the same slices: dtype and slot ranges."""
    return (unit.dtype, tuple((slot.start, slot.numel) for slot in unit.slots))


def stays_up(layout: ModelLayout, config: ZeroConfig) -> bool:
    """Whether the whole model fits the budget and so stays up from first use to step; then weights need no handles.

    Raises ConfigError if ``offload_params=False`` asks for it and the budget is too small."""
    needed, budget = sum(buffer_bytes(unit.size_bytes) for unit in layout.units), config.gpu_param_memory_budget
    if not config.offload_params and needed > budget:
        raise ConfigError(
            f"offload_params=False keeps the whole model up, {needed:,} bytes, but "
            f"gpu_param_memory_budget={budget:,}; raise it or use offload_params=True"
        )
    return needed <= budget


def mapped_units(store: ParameterStore, units: Iterable[UnitLayout]) -> dict[int, Tensor]:
    """Flat parameters of the units that a rank can read where the owners write them; see ``ParameterStore.mapped``."""
    return {unit.index: flat for unit in units if (flat := store.mapped(unit.index)) is not None}


class Residency:
    """Leases memory for gathered units within the budget.

    Knows bytes, buffers and their slices; not units' states or the schedule."""

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        *,
        budget: int,
        device: torch.device,
        poison: bool,
        mapped: Mapping[int, Tensor] | None = None,
    ) -> None:
        """``budget``: bytes. ``poison``: fill released buffers with NaN. ``mapped``: unit -> 1D tensor over the owners'
        memory (``ParameterStore.mapped``), which is used in place of a buffer."""
        self.budget = MemoryBudget(budget)  # its ``used``: bytes of gathered parameters, prefetches included
        self._limit = self.target = budget  # bytes; units stay below the target where they can, see ``shrink``
        self._pool = BufferPool(device, budget=self.budget, poison=poison)
        self.device, self.poisons = device, poison
        self._layouts = layouts
        numbers: dict[Shape, int] = {}  # one object per shape: shapes are slow to hash
        self._shapes = [("views", numbers.setdefault(buffer_shape(layout), len(numbers))) for layout in layouts]
        self._mapped: dict[int, Views] = {
            unit: (flat, self._slices(unit, flat)) for unit, flat in (mapped or {}).items()
        }

    @property
    def allocated(self) -> int:
        """Bytes of buffers, in use or free; the owners' memory is not included."""
        return self._pool.held_bytes

    def trim(self) -> int:
        """Free the buffers that are not in use; returns their bytes."""
        return self._pool.trim()

    def window(self, root: Iterable[int], count: int) -> int:
        """The bytes of the units ``root`` and of ``count`` more, each as large as the largest."""
        sizes = [buffer_bytes(layout.size_bytes) for layout in self._layouts]
        return sum(sizes[unit] for unit in root) + count * max(sizes)

    def shrink(self, target: int) -> None:
        """Aim at no more than ``target`` bytes from now on, and drop free buffers beyond it."""
        self.target = min(self._limit, target)
        if self.target < self._limit:
            self._pool.trim(max(0, self.target - self.budget.used))

    @property
    def has_buffers(self) -> bool:
        """Whether some units are gathered into buffers, not read from the owners' memory."""
        return len(self._mapped) < len(self._layouts)

    def acquire(self, unit: int, *, beyond: bool = False) -> UnitBuffer | None:
        """Lease memory for a unit; None if the target has no room now, or the budget if ``beyond`` the target. Its
        content is undefined (mapped: the owners')."""
        if self.target < self._limit and not self._fits(unit, beyond):
            return None
        if unit in self._mapped:
            return self._map(unit)
        if torch.is_inference_mode_enabled():  # a buffer created in inference mode could not be filled outside it
            with torch.inference_mode(False):
                return self.acquire(unit, beyond=beyond)
        lease = self._pool.acquire(self._layouts[unit].size_bytes)
        if lease is None:
            return None
        shape = self._shapes[unit]
        if shape not in lease.made:
            flat = lease.tensor.view(self._layouts[unit].dtype)
            lease.made[shape] = (flat, self._slices(unit, flat))
        flat, slices = lease.made[shape]
        return UnitBuffer(flat=flat, slices=slices, lease=lease, made=lease.made)

    def _fits(self, unit: int, beyond: bool) -> bool:
        """Whether the target leaves room, or need not. Drops free buffers that would go beyond it."""
        used = self.budget.used
        if used and not beyond and used + buffer_bytes(self._layouts[unit].size_bytes) > self.target:
            return False
        self._pool.trim(max(0, self.target - used))
        return True

    def _map(self, unit: int) -> UnitBuffer | None:
        lease = self.budget.reserve(buffer_bytes(self._layouts[unit].size_bytes))
        if lease is None:
            return None
        flat, slices = self._mapped[unit]
        return UnitBuffer(flat=flat, slices=slices, lease=lease, mapped=True)

    def _slices(self, unit: int, flat: Tensor) -> Slices:
        return tuple(owning_slice(flat, slot.start, slot.numel) for slot in self._layouts[unit].slots)

    def release(self, buffer: UnitBuffer) -> None:
        """Return memory whose slices are in the buffer again. Does not wait for the device: on CUDA, later copies into
        it wait for all streams that have used it (transfers.py)."""
        if self.poisons:
            buffer.settle()  # the pool overwrites it at once
        buffer.lease.release()


class Waited(NamedTuple):
    """Seconds that the host waited for a fetch, by cause."""

    optimizer: float  # the version was not published yet
    fetch: float  # its bytes were still being copied

    @property
    def total(self) -> float:
        """Both."""
        return self.optimizer + self.fetch


_NOTHING = Waited(0.0, 0.0)


@dataclass(frozen=True, eq=False, slots=True)
class DeviceCopy:
    """A copy to a device that is issued."""

    event: Event  # its end
    moments: list[Event]  # its begin and its end, once the lane has come to it

    def seconds(self, lane: Lane) -> float | None:
        """How long the copy itself took; None while that is not known."""
        return lane.seconds(*self.moments) if len(self.moments) == 2 else None


@dataclass(eq=False, slots=True)
class Fetching:
    """A fetch in flight. Owns its buffer until somebody waits for it or drops it.

    Knows its futures; not units, or which bytes they are."""

    version: int
    published: Future[int]  # the version is published
    done: Future[Any]  # every byte is in the buffer, or its copy to the device is issued
    request: Future[None] | ConditionalFetch | None  # None: the buffer is the owners' memory, so nothing is requested
    buffer: UnitBuffer
    ahead: bool  # True: prefetched; False: requested when it was needed
    ready: Future[DeviceCopy | None] | None = None  # CUDA: ``done``, with the copy where there is one
    _asked: float = 0.0
    _published_at: float | None = None
    _done_at: float | None = None
    _arrived: Over = nothing

    def __post_init__(self) -> None:
        if self.request is not None:
            self._asked = time.perf_counter()
            self.published.add_done_callback(self._note_published)
        self.done.add_done_callback(self._note_done)

    def _note_published(self, _: Future[int]) -> None:
        self._published_at = time.perf_counter()

    def _note_done(self, _: Future[Any]) -> None:
        self._done_at = time.perf_counter()

    def follow(self, arrived: Over) -> None:
        """Call ``arrived`` once the bytes are there, before anyone who waits for them continues. It is often called
        twice."""
        self._arrived = arrived
        self.done.add_done_callback(lambda _: arrived())

    @property
    def seconds(self) -> float | None:
        """The host's seconds from when the bytes were both requested and published until they were there, or until
        their copy to the device was issued. None if no bytes had to be copied."""
        held = isinstance(self.request, ConditionalFetch) and not self.request.renewed
        if self.request is None or held or self._done_at is None:
            return None
        return max(0.0, self._done_at - max(self._asked, self._published_at or 0.0))

    @property
    def lead(self) -> float:
        """Seconds since it was done; 0 if it is not."""
        return 0.0 if self._done_at is None else time.perf_counter() - self._done_at

    def cancel(self) -> bool:
        """Cancel the fetch; True if neither host nor device will write to the buffer any more."""
        if self.request is None or self.request.cancel():
            return True
        if not self.done.done():
            return False
        self.join()
        return True

    def join(self) -> None:
        """Block until the device has stopped writing to the buffer. The fetch must be done."""
        if (copied := self.copied) is not None:
            copied.event.join()

    @property
    def on_device(self) -> bool:
        """Whether the bytes go on to a device."""
        return self.ready is not None

    @property
    def copied(self) -> DeviceCopy | None:
        """The copy to the device; None if there was none or the fetch failed. The fetch must be done."""
        return None if self.ready is None or self.ready.exception() is not None else self.ready.result()

    def wait(self) -> Waited:
        """Block until the bytes are there, on the device too if it has one."""
        waited = self._wait()
        self._arrived()
        if (copied := self.copied) is not None:
            copied.event.wait()
        return waited

    def _wait(self) -> Waited:
        if self.done.done():
            self.done.result()
            return _NOTHING
        start = time.perf_counter()
        wait_for([self.published, self.done], return_when=FIRST_COMPLETED)  # a fetch may fail before it is published
        published = time.perf_counter()
        if self.done is self.published:
            self.done.result()
            return Waited(published - start, 0.0)
        self.done.result()
        return Waited(published - start, time.perf_counter() - published)


class ConditionalFetch:
    """A fetch that is requested only once the owners have published different content.

    Knows the version held and the version published; not whose bytes they are. ``done`` ends as the fetch does, or at
    once if the bytes held are still right."""

    def __init__(self, published: Future[int], held: int, ask: Callable[[], Future[None]]) -> None:
        """``held``: the version that the bytes held are right for. ``ask`` requests the fetch; it is called at most
        once, on the thread that completes ``published``."""
        self.done: Future[None] = Future()
        self._held = held
        self._ask = ask
        self._lock = threading.Lock()
        self._cancelled = False
        self._fetch: Future[None] | None = None
        published.add_done_callback(self._begin)

    @property
    def renewed(self) -> bool:
        """Whether the fetch replaces, or will replace, the bytes held."""
        return self._fetch is not None

    def _begin(self, published: Future[int]) -> None:
        try:
            if published.result() <= self._held:
                settle(self.done, None)
                return
            with self._lock:
                if self._cancelled:
                    return
                self._fetch = self._ask()
        except Exception as exc:  # must not end the thread that completes ``published``; the rank's wait raises it
            fail(self.done, exc)
            return
        self._fetch.add_done_callback(self._follow)

    def _follow(self, fetch: Future[None]) -> None:
        error = CancelledError() if fetch.cancelled() else fetch.exception()
        if error is None:
            settle(self.done, None)
        else:
            fail(self.done, error)

    def cancel(self) -> bool:
        """Call it off; True when nothing will be written any more."""
        with self._lock:
            if self._fetch is not None:
                return self._fetch.cancel()
            self._cancelled = True
        self.done.cancel()
        return True
