"""Copies a unit's bytes between the store and the device while the device computes.

[Note: transfers] A CPU rank on the owners' host reads parameters in the owners' memory: a fetch waits for their version
and copies nothing. On other CPU ranks the store fills the unit's buffer. On CUDA a lane copies the store's memory, or a
(pinned) staging buffer, to the device; the copy waits for the work that was queued at the request on every stream that
has used the buffer, because that work may still read it. Streams are noticed where a unit's forward starts and where
autograd saves or unpacks a weight; another stream that a forward uses without gradients, the forward has to wait for
before it ends. Gradients go the other way, gathered on the lane's thread (CPU) or stream
(CUDA) into the store's landing memory if it offers some for the push, else into staging. At most two largest units'
gradients wait for their copy, or in staging for their owners: a backward that is faster than the copies waits for them
instead of keeping the whole model's gradients.

[Note: all cores] Torch's threads meet at a barrier after each operation, and spin there. If another thread has one of
the cores meanwhile, the others wait for as long. So a CPU rank that computes on all cores, or with owners in its
process, gathers gradients in its computing threads, and begins no forward while owners of its host update (with owners
in its process, its step() waits for that). If it is the only rank, owners square its gradients at its finish.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from rayzero.concurrency.futures import chain, failed, settled
from rayzero.engine.units.residency import ConditionalFetch, DeviceCopy, Fetching, UnitBuffer, mapped_units
from rayzero.lanes import CudaLane, Event, Lane, ThreadLane
from rayzero.lanes.lane import LinkSpeed
from rayzero.layout.model_layout import ALIGN, UnitLayout
from rayzero.memory.pool import Buffer, BufferPool, Lease, MemoryBudget, buffer_bytes
from rayzero.protocol.gradient_sum import ScatteredUnit
from rayzero.protocol.messages import COMPUTE, Contribution
from rayzero.protocol.store import ParameterStore

_SMALL = 1 << 20  # bytes: copying them takes about 0.1 ms, a thread switch under the GIL up to 1 ms

Grads = Sequence[Tensor | None]  # per slot of a unit; None: the parameter got no gradient


def make_transfers(
    store: ParameterStore, device: torch.device, units: Sequence[UnitLayout], *, pinned: bool
) -> UnitTransfers:
    """The transfers of a rank on ``device``; ``pinned``: page-lock staging buffers (CUDA only)."""
    if device.type == "cuda":
        return device_transfers(store, CudaLane(device), units, pinned=pinned)
    return UnitTransfers(store, BufferPool(budget=_on_their_way(units)), has_all_cores=has_all_cores(device))


def has_all_cores(device: torch.device) -> bool:
    """Whether a rank on ``device`` computes on every core that it may use."""
    return device.type == "cpu" and torch.get_num_threads() >= len(os.sched_getaffinity(0))


def device_transfers(
    store: ParameterStore, lane: Lane, units: Sequence[UnitLayout], *, pinned: bool
) -> DeviceTransfers:
    """The transfers of a rank on the device of ``lane``. ``pinned``: page-lock staging buffers."""
    staging = BufferPool(pinned_for=lane.device if pinned else None, budget=_on_their_way(units))
    return DeviceTransfers(store, staging, lane, mapped_units(store, units))


def _on_their_way(units: Sequence[UnitLayout]) -> MemoryBudget:
    """Room for the gradients of two largest units."""
    return MemoryBudget(2 * max((buffer_bytes(unit.size_bytes) for unit in units if unit.trainable), default=1))


class UnitTransfers:
    """Copies one rank's bytes. This class is a CPU rank's: it copies only gradients, on a thread.

    Knows buffers and the store; not when something is needed, or by whom."""

    def __init__(self, store: ParameterStore, staging: BufferPool, *, has_all_cores: bool = False) -> None:
        """``has_all_cores``: the rank computes on every core that it may use. See [Note: all cores]."""
        self._has_all_cores = has_all_cores
        self.store = store
        self._staging = staging
        self._thread = ThreadPoolExecutor(1, "rayzero-push")  # gathers or announces gradients, in push order
        self.lane: Lane = ThreadLane()  # copies units; its clock is the computation's
        self.link: LinkSpeed | None = None  # between device and host memory; None: not measured

    @property
    def owners_are_here(self) -> bool:
        """Whether owners compute in the rank's process, on the cores that it computes on."""
        return self.store.in_process

    def owners_share_cores(self, units: Iterable[int]) -> bool:
        """Whether the rank computes on all cores of a host where owners of any of ``units`` are. See
        [Note: all cores]."""
        return self._has_all_cores and any(self.store.mapped(unit) is not None for unit in units)

    def fetch(
        self,
        unit: UnitLayout,
        version: int,
        buffer: UnitBuffer,
        *,
        published: Future[int],
        held: int | None,
        ahead: bool,
    ) -> Fetching:
        """Request a unit's parameters of exactly ``version``; returns at once. ``published``: the result of the store's
        method of that name. ``held``: the version that the buffer's content was right for; None: it is undefined.
        ``ahead``: this is a prefetch."""
        if buffer.mapped and self.store.mapped(unit.index) is not None:
            return Fetching(version, published, done=published, request=None, buffer=buffer, ahead=ahead)
        done, request = self._ask(unit, version, buffer.flat, published, held)
        return Fetching(version, published, done=done, request=request, buffer=buffer, ahead=ahead)

    def _ask(
        self, unit: UnitLayout, version: int, out: Tensor, published: Future[int], held: int | None
    ) -> tuple[Future[None], Future[None] | ConditionalFetch]:
        """Request a unit's bytes into ``out`` (1D, unit.numel elements, the unit's dtype), unless it holds version
        ``held`` and that content is still right."""
        if held is None:
            done = self.store.fetch(unit.index, version, COMPUTE, out)
            return done, done
        renewal = ConditionalFetch(published, held, lambda: self.store.fetch(unit.index, version, COMPUTE, out))
        return renewal.done, renewal

    def use(self, buffer: UnitBuffer) -> None:
        """The caller is about to compute with a buffer's bytes, which somebody has waited for."""

    def push(self, unit: UnitLayout, contribution: Contribution, grads: Grads) -> Future[None] | None:
        """Send a unit's gradients; returns a future that is done once the owners have them. Returns None at once if
        earlier pushes leave no room: wait for one of them and call again. With none in flight there is always room.

        Gathers a small unit here, because handing it to another thread takes longer; nothing, if owners read gradients
        where they are."""
        if self.store.takes_scattered and _can_stay(unit, contribution, grads):
            return self.store.push(contribution, ScatteredUnit(unit, grads))
        small = self.store.in_process or self._has_all_cores or unit.size_bytes <= _SMALL
        target = _target(self.store, self._staging, unit, contribution, grads, at_once=small)
        if target is None:
            return None
        held = list(grads)

        def gather() -> None:
            if not target.filled:
                gather_into(target.flat, unit, held)
            held.clear()

        return self._send(contribution, target, gather) if small else self._send_beside(contribution, target, gather)

    def _send_beside(self, contribution: Contribution, target: _Target, gather: Callable[[], None]) -> Future[None]:
        """``_send`` on the thread; here if another thread has closed it meanwhile."""
        landed: Future[None] = Future()
        send = partial(self._send, contribution, target, gather)
        try:
            self._thread.submit(lambda: chain(send(), landed))
        except RuntimeError:
            return send()
        return landed

    def _send(self, contribution: Contribution, target: _Target, gather: Callable[[], None]) -> Future[None]:
        """Push once ``gather`` has filled the target."""
        try:
            try:
                gather()
            finally:
                if target.until_gathered is not None:
                    target.until_gathered.release()
            sent = self.store.push(contribution, target.flat)
        except Exception as exc:  # the push failed, perhaps on the lane's thread: the rank's next wait raises it
            sent = failed(exc)
        if target.until_landed is not None:
            room, answer, sent = target.until_landed, sent, Future()
            answer.add_done_callback(lambda _: room.release())
            chain(answer, sent)
        return sent

    def drain(self) -> None:
        """Wait until no copy from or to the store's memory is in flight, except those of fetches that are not done."""

    def allocated(self) -> dict[tuple[str, str], int]:
        """Bytes of staging memory: (kind, tier) -> bytes, with the labels of ``names.MEMORY_BYTES``. Any thread may
        call it."""
        return {("staging", "pinned" if self._staging.pinned_for is not None else "ram"): self._staging.held_bytes}

    def trim(self) -> int:
        """Free the staging buffers that are not in use; returns their bytes."""
        return self._staging.trim()

    def close(self) -> None:
        """Finish what is queued and end the thread. Idempotent."""
        self._thread.shutdown()


class DeviceTransfers(UnitTransfers):
    """The transfers of a CUDA rank: a lane between the device and host memory that the store reads and writes."""

    def __init__(self, store: ParameterStore, staging: BufferPool, lane: Lane, mapped: dict[int, Tensor]) -> None:
        """``mapped``: unit -> its parameters in the owners' memory, which the store has page-locked, until owners on
        another host take it over."""
        super().__init__(store, staging)
        self.lane = lane
        self._mapped = mapped
        self._arriving = BufferPool(pinned_for=staging.pinned_for)  # bounded by the prefetches, as their buffers are
        self._copied: list[tuple[Event, Buffer]] = []  # freed by: _reap, once the copy has run
        self._lock = threading.Lock()

    def fetch(
        self,
        unit: UnitLayout,
        version: int,
        buffer: UnitBuffer,
        *,
        published: Future[int],
        held: int | None,
        ahead: bool,
    ) -> Fetching:
        self._reap()
        uses = buffer.uses(self.lane)
        free = uses.so_far()
        host, staged = self._source(unit)
        arrival, request = self._ask(unit, version, host, published, held)
        ready: Future[DeviceCopy | None] = Future()

        def arrived(answer: Future[None]) -> None:
            try:
                answer.result()
                copied = None
                if not isinstance(request, ConditionalFetch) or request.renewed:
                    copied = self._copy(unit, buffer, host, free)
                    uses.filled(copied.event)
            except Exception as exc:  # must not end the store's thread; the rank's wait raises it
                self._let_go(staged, None)
                ready.set_exception(exc)
                return
            self._let_go(staged, copied)
            ready.set_result(copied)

        arrival.add_done_callback(arrived)
        return Fetching(version, published, done=ready, request=request, buffer=buffer, ahead=ahead, ready=ready)

    def _copy(self, unit: UnitLayout, buffer: UnitBuffer, host: Tensor, free: Sequence[Event]) -> DeviceCopy:
        """Issue the copy of a unit from ``host`` (1D, unit.numel elements, the unit's dtype), after ``free``."""
        moments: list[Event] = []

        def copy() -> None:
            moments.append(self.lane.now())
            buffer.flat.copy_(host, non_blocking=True)
            moments.append(self.lane.now())

        return DeviceCopy(self.lane.issue("in", copy, after=free, label=unit.name), moments)

    def _let_go(self, staged: Buffer | None, copied: DeviceCopy | None) -> None:
        """Release a staging buffer once ``copied`` has read it. None: nobody reads it."""
        if staged is not None and copied is not None:
            with self._lock:
                self._copied.append((copied.event, staged))
        elif staged is not None:
            staged.release()

    def _ask(
        self, unit: UnitLayout, version: int, out: Tensor, published: Future[int], held: int | None
    ) -> tuple[Future[None], Future[None] | ConditionalFetch]:
        if not self._is_mapped(unit):
            return super()._ask(unit, version, out, published, held)
        renewal = ConditionalFetch(published, -1 if held is None else held, lambda: settled(None))
        return renewal.done, renewal

    def _source(self, unit: UnitLayout) -> tuple[Tensor, Buffer | None]:
        """The host memory to copy a unit from, and the staging buffer if that is what it is."""
        if self._is_mapped(unit):
            return self._mapped[unit.index], None
        with torch.inference_mode(False):
            staged = self._arriving.acquire(unit.size_bytes)
        assert staged is not None, "a pool without a limit always has room"
        return staged.tensor.view(unit.dtype), staged

    @property
    def owners_are_here(self) -> bool:
        """See ``UnitTransfers``: the rank computes on its device."""
        return False

    def owners_share_cores(self, units: Iterable[int]) -> bool:
        """See ``UnitTransfers``: as above."""
        return False

    def _is_mapped(self, unit: UnitLayout) -> bool:
        return unit.index in self._mapped and self.store.mapped(unit.index) is not None

    def use(self, buffer: UnitBuffer) -> None:
        """See ``UnitTransfers``. The caller's stream waits too, if it is another."""
        buffer.uses(self.lane).use()

    def _reap(self) -> None:
        with self._lock:
            over = [pair for pair in self._copied if pair[0].finished()]
            self._copied = [pair for pair in self._copied if pair not in over]
        for _, staged in over:
            staged.release()

    def push(self, unit: UnitLayout, contribution: Contribution, grads: Grads) -> Future[None] | None:
        """See ``UnitTransfers``. The copy is queued here; the thread waits for it and announces."""
        target = _target(self.store, self._staging, unit, contribution, (), at_once=False)
        if target is None:
            return None
        gathered = torch.empty(unit.numel, dtype=unit.dtype, device=self.lane.device)
        gather_into(gathered, unit, grads)
        copied = self.lane.issue(
            "out", lambda: target.flat.copy_(gathered, non_blocking=True), holds=[gathered], label=unit.name
        )

        def join() -> None:
            if (error := copied.join()) is not None:
                raise error

        return self._send_beside(contribution, target, join)

    def drain(self) -> None:
        """See ``UnitTransfers``. Call it before the step's finish, after which owners may overwrite what a copy reads,
        and before the store closes and frees what a copy writes."""
        if self._mapped:
            self.lane.drain("in")
        self.lane.drain("out")

    def allocated(self) -> dict[tuple[str, str], int]:
        return {key: size + self._arriving.held_bytes for key, size in super().allocated().items()}

    def trim(self) -> int:
        self._reap()
        return super().trim() + self._arriving.trim()

    def close(self) -> None:
        super().close()
        self.lane.close()


# ---- gradients --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Target:
    """Host memory that a unit's gradients are gathered in, and the room they take there or in flight."""

    flat: Tensor  # 1D, unit.numel elements, the unit's dtype
    filled: bool = False  # it is the gradient itself: nothing is left to gather
    until_gathered: Lease | None = None  # freed by: UnitTransfers._send
    until_landed: Lease | Buffer | None = None  # freed by: UnitTransfers._send


def _target(
    store: ParameterStore,
    staging: BufferPool,
    unit: UnitLayout,
    contribution: Contribution,
    grads: Grads,
    *,
    at_once: bool,
) -> _Target | None:
    """The store's landing memory; else the gradient itself, if one tensor is the unit's flat gradient; else staging.
    None if gradients in flight leave no room now. at_once: gathered before anything else is pushed."""
    landing = store.landing(contribution)
    if landing is not None:
        if at_once:
            return _Target(landing)
        waiting = staging.budget.reserve(unit.size_bytes)
        return None if waiting is None else _Target(landing, until_gathered=waiting)
    whole = _whole(unit, grads)
    if whole is not None:
        sending = staging.budget.reserve(unit.size_bytes)
        return None if sending is None else _Target(whole, filled=True, until_landed=sending)
    with torch.inference_mode(False):
        staged = staging.acquire(unit.size_bytes)
    return None if staged is None else _Target(staged.tensor.view(unit.dtype), until_landed=staged)


def _can_stay(unit: UnitLayout, contribution: Contribution, grads: Grads) -> bool:
    """Whether gradients can be read where they are: there are none to add them to, and they are as in the unit."""
    given = [grad for grad in grads if grad is not None]
    return not (contribution.seq or contribution.sum_of or any(unit.gaps)) and all(
        grad.dtype is unit.dtype and grad.is_contiguous() for grad in given
    )


def _whole(unit: UnitLayout, grads: Grads) -> Tensor | None:
    """The unit's flat gradient if a single tensor already is that; else None."""
    if len(grads) != 1 or grads[0] is None or grads[0].numel() != unit.numel:
        return None
    return grads[0].detach().flatten() if grads[0].is_contiguous() and grads[0].dtype is unit.dtype else None


def gather_into(flat: Tensor, unit: UnitLayout, grads: Grads) -> None:
    """Copy gradients to their slots in ``flat`` (1D, unit.numel elements, the unit's dtype, on the gradients' device).
    Padding becomes zero; the range of a parameter without a gradient becomes zero or keeps its bytes."""
    parts: list[Tensor] = []
    for slot, gap, grad in zip(unit.slots, unit.gaps, grads, strict=True):
        parts.append(flat.new_zeros(slot.numel) if grad is None else grad if grad.dim() == 1 else grad.flatten())
        if gap:
            parts.append(_zeros(gap, flat.dtype, flat.device))
    with torch.no_grad():  # under create_graph gradients have a graph of their own
        torch.cat(parts, out=flat)  # one call: a third of the time of a copy per parameter (20 of 16 KiB each)


@lru_cache(4 * ALIGN)  # each under ALIGN elements; models have many parameters
def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(numel, dtype=dtype, device=device)
