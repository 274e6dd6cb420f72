"""Copy lanes: bytes between the store and the device, beside the compute.

[Note: lanes] A CPU rank on the owners' host reads parameters where the owners write them: a fetch waits for their
version and moves nothing. Elsewhere a fetch goes from the store straight into the unit's buffer. On CUDA the store's
memory, or else a (pinned) staging buffer, is copied to the device on a stream of its own; the copy waits for what the
compute stream had queued when the fetch was asked for, because the buffer may have been read until then. Gradients go
the other way (CPU: gathered by the lane's worker thread; CUDA: on a stream of its own): into the store's landing
memory where it has some for the push, else into staging of at most two largest units in flight.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rayzero.concurrency.futures import failed, settled
from rayzero.engine.units.fetch import Fetching, Renewal
from rayzero.engine.units.residency import UnitBuffer
from rayzero.errors import StoreClosedError
from rayzero.layout.model_layout import ALIGN, UnitLayout
from rayzero.memory.budget import MemoryBudget
from rayzero.memory.pool import Buffer, BufferPool, buffer_bytes
from rayzero.protocol.messages import COMPUTE, Contribution
from rayzero.protocol.store import ParameterStore

_SMALL = 1 << 20  # bytes: copying them takes about 0.1 ms, a thread switch under the GIL up to 1 ms

Grads = Sequence[Tensor | None]  # per slot of a unit; None: the parameter got no gradient


class Lane(Protocol):
    """Carries one rank's bytes. Knows buffers and streams; not when something is needed, or by whom."""

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
        """Ask for a unit's parameters of exactly ``version``; returns at once. ``published``: what the store's
        method of that name gave. ``held``: the buffer's content was right for this version; None: it is undefined."""
        ...

    def push(self, unit: UnitLayout, contribution: Contribution, grads: Grads) -> Future[None] | None:
        """Send a unit's gradients; done when they have landed with the owners. Returns at once. None: earlier pushes
        have taken all staging; wait for one of them and call again. With none in flight there is always room."""
        ...

    def drain(self) -> None:
        """Wait until no copy out of the store's own memory is under way. Fetches that are not done do not count."""
        ...

    def allocated(self) -> dict[tuple[str, str], int]:
        """Bytes of staging memory there are: (kind, tier) -> bytes, as ``names.MEMORY_BYTES`` calls them. From any
        thread."""
        ...

    def close(self) -> None:
        """Finish what is queued and end the worker thread. Idempotent."""
        ...


def make_lane(store: ParameterStore, device: torch.device, units: Sequence[UnitLayout], *, pinned: bool) -> Lane:
    """The lane for a rank on ``device``; ``pinned``: page-lock staging buffers (CUDA only)."""
    staging_bytes = 2 * max((buffer_bytes(unit.size_bytes) for unit in units if unit.trainable), default=1)
    if device.type != "cuda":
        return HostLane(store, staging_bytes)
    mapped = {unit.index: flat for unit in units if (flat := store.mapped(unit.index)) is not None}
    return CudaLane(store, device, staging_bytes, mapped, pinned=pinned)


class HostLane:
    """The lane of a CPU rank: fetches need no copy, gradients are gathered by one worker thread."""

    def __init__(self, store: ParameterStore, staging_bytes: int) -> None:
        self._store = store
        self._staging = BufferPool(budget=MemoryBudget(staging_bytes))
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rayzero-lane")

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
        """See :class:`Lane`."""
        if buffer.mapped:
            return Fetching(version, published, done=published, request=None, buffer=buffer, ahead=ahead)
        done, request = _ask(self._store, unit, version, buffer.flat, published, held)
        return Fetching(version, published, done=done, request=request, buffer=buffer, ahead=ahead)

    def push(self, unit: UnitLayout, contribution: Contribution, grads: Grads) -> Future[None] | None:
        """See :class:`Lane`. A small unit is gathered here, because handing it to another thread takes longer."""
        target = _target(self._store, self._staging, unit, contribution, grads)
        if target is None:
            return None
        small = unit.size_bytes <= _SMALL
        if small and target.staged is None:
            return self._send(unit, contribution, list(grads), target)
        landed: Future[None] = Future()

        def send(its: list[Tensor | None]) -> None:
            _follow(self._send(unit, contribution, its, target), landed, target)

        if small:
            send(list(grads))
        else:
            _submit(self._worker, landed, target, send, list(grads))
        return landed

    def _send(
        self, unit: UnitLayout, contribution: Contribution, grads: list[Tensor | None], target: _Target
    ) -> Future[None]:
        try:
            if not target.filled:
                gather_into(target.flat, unit, grads)
            grads.clear()
            return self._store.push(contribution, target.flat)
        except Exception as exc:  # of the push, perhaps in the worker: the rank's next wait raises it
            return failed(exc)

    def drain(self) -> None:
        """See :class:`Lane`. Nothing is copied out of the owners' memory."""

    def allocated(self) -> dict[tuple[str, str], int]:
        """See :class:`Lane`."""
        return {("staging", "ram"): _held(self._staging)}

    def close(self) -> None:
        """See :class:`Lane`."""
        self._worker.shutdown(wait=True)


class CudaLane:
    """The lane of a CUDA rank: one stream in, one stream out, staging in (pinned) host memory."""

    def __init__(
        self,
        store: ParameterStore,
        device: torch.device,
        staging_bytes: int,
        mapped: dict[int, Tensor],
        *,
        pinned: bool,
    ) -> None:
        """``mapped``: units' parameters in the owners' memory, which the store has page-locked."""
        self._store = store
        self._device = device
        self._mapped = mapped
        self._arriving = BufferPool(pinned=pinned)  # bounded by the prefetches, which are bounded on the device
        self._staging = BufferPool(pinned=pinned, budget=MemoryBudget(staging_bytes))
        self._in: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # with compute
        self._out: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # with compute
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rayzero-lane")
        self._copied: list[tuple[torch.cuda.Event, Buffer]] = []  # freed by: _reap, once the copy has run
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
        """See :class:`Lane`."""
        self._reap()
        free = torch.cuda.current_stream(self._device).record_event()
        host, staged = self._source(unit)
        arrival, request = self._ask(unit, version, host, published, held)
        ready: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done: Future[None] = Future()

        def arrived(answer: Future[None]) -> None:
            try:
                answer.result()
                if not isinstance(request, Renewal) or request.renewed:
                    with torch.cuda.stream(self._in):
                        self._in.wait_event(free)
                        buffer.flat.copy_(host, non_blocking=True)
                        ready.record(self._in)
            except Exception as exc:  # the store's thread must not end here; the rank's wait raises it
                if staged is not None:
                    staged.release()
                done.set_exception(exc)
                return
            if staged is not None:
                with self._lock:
                    self._copied.append((ready, staged))
            done.set_result(None)

        arrival.add_done_callback(arrived)
        return Fetching(version, published, done=done, request=request, buffer=buffer, ahead=ahead, ready=ready)

    def _ask(
        self, unit: UnitLayout, version: int, host: Tensor, published: Future[int], held: int | None
    ) -> tuple[Future[None], Future[None] | Renewal]:
        if unit.index not in self._mapped:
            return _ask(self._store, unit, version, host, published, held)
        renewal = Renewal(published, -1 if held is None else held, lambda: settled(None))
        return renewal.done, renewal

    def _source(self, unit: UnitLayout) -> tuple[Tensor, Buffer | None]:
        """Host memory that a unit is copied to the device from, and its staging buffer where it is one."""
        if unit.index in self._mapped:
            return self._mapped[unit.index], None
        with torch.inference_mode(False):
            staged = self._arriving.acquire(unit.size_bytes)
        assert staged is not None, "a pool without a limit always has room"
        return staged.tensor.view(unit.dtype), staged

    def _reap(self) -> None:
        with self._lock:
            over = [pair for pair in self._copied if pair[0].query()]  # type: ignore[no-untyped-call]
            self._copied = [pair for pair in self._copied if pair not in over]
        for _, staged in over:
            staged.release()

    def push(self, unit: UnitLayout, contribution: Contribution, grads: Grads) -> Future[None] | None:
        """See :class:`Lane`. The copy is queued here; the worker waits for it and announces."""
        target = _target(self._store, self._staging, unit, contribution, ())
        if target is None:
            return None
        gathered = torch.empty(unit.numel, dtype=unit.dtype, device=self._device)
        gather_into(gathered, unit, grads)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            target.flat.copy_(gathered, non_blocking=True)
            copied = self._out.record_event()
        gathered.record_stream(self._out)
        landed: Future[None] = Future()
        _submit(self._worker, landed, target, self._announce, landed, contribution, target, copied)
        return landed

    def _announce(
        self, landed: Future[None], contribution: Contribution, target: _Target, copied: torch.cuda.Event
    ) -> None:
        try:
            copied.synchronize()
            _follow(self._store.push(contribution, target.flat), landed, target)
        except Exception as exc:  # the worker's only way to tell: the rank's next wait raises it
            _give_up(landed, target, exc)

    def drain(self) -> None:
        """See :class:`Lane`. The owners may write to what a copy reads once the step's finish is sent."""
        if self._mapped:
            self._in.synchronize()

    def allocated(self) -> dict[tuple[str, str], int]:
        """See :class:`Lane`."""
        tier = "pinned" if self._staging.pinned else "ram"
        return {("staging", tier): _held(self._staging) + _held(self._arriving)}

    def close(self) -> None:
        """See :class:`Lane`."""
        self._worker.shutdown(wait=True)


def _held(pool: BufferPool) -> int:
    stats = pool.stats
    return stats.leased + stats.free


# ---- parameters -------------------------------------------------------------------------------------------------


def _ask(
    store: ParameterStore, unit: UnitLayout, version: int, out: Tensor, published: Future[int], held: int | None
) -> tuple[Future[None], Future[None] | Renewal]:
    """Have a unit's bytes come into ``out``, unless those of version ``held`` are in the buffer and still good."""
    if held is None:
        done = store.fetch(unit.index, version, COMPUTE, out)
        return done, done
    renewal = Renewal(published, held, lambda: store.fetch(unit.index, version, COMPUTE, out))
    return renewal.done, renewal


# ---- gradients --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a unit's gradients are gathered, in host memory."""

    flat: Tensor  # 1D, unit.numel elements, the unit's dtype
    staged: Buffer | None = None  # the staging that is. freed by: _follow, _give_up
    filled: bool = False  # the gradients are there

    def release(self) -> None:
        """The store has what it needs."""
        if self.staged is not None:
            self.staged.release()


def _target(
    store: ParameterStore, staging: BufferPool, unit: UnitLayout, contribution: Contribution, grads: Grads
) -> _Target | None:
    """The store's landing memory; else the one gradient there is, where it is the unit's flat gradient; else staging,
    or None where it has no room now."""
    landing = store.landing(contribution)
    if landing is not None:
        return _Target(landing)
    whole = _whole(unit, grads)
    if whole is not None:
        return _Target(whole, filled=True)
    with torch.inference_mode(False):
        staged = staging.acquire(unit.size_bytes)
    return None if staged is None else _Target(staged.tensor.view(unit.dtype), staged)


def _whole(unit: UnitLayout, grads: Grads) -> Tensor | None:
    """The unit's flat gradient, where one tensor already is just that."""
    if len(grads) != 1 or grads[0] is None or grads[0].numel() != unit.numel:
        return None
    return grads[0].detach().flatten() if grads[0].is_contiguous() and grads[0].dtype is unit.dtype else None


def gather_into(flat: Tensor, unit: UnitLayout, grads: Grads) -> None:
    """Copy gradients to their slots in ``flat`` (1D, unit.numel elements, the unit's dtype, on the gradients' device).
    Padding becomes zero; the range of a parameter without a gradient is left as it is or becomes zero."""
    parts: list[Tensor] = []
    for slot, gap, grad in zip(unit.slots, unit.gaps, grads, strict=True):
        parts.append(flat.new_zeros(slot.numel) if grad is None else grad if grad.dim() == 1 else grad.flatten())
        if gap:
            parts.append(_zeros(gap, flat.dtype, flat.device))
    with torch.no_grad():  # under create_graph gradients have a graph of their own
        torch.cat(parts, out=flat)  # one call: a third of the time of a copy per parameter (20 of 16 KiB each)


@functools.lru_cache(4 * ALIGN)  # each under ALIGN elements; models have many parameters
def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(numel, dtype=dtype, device=device)


def _submit(
    worker: ThreadPoolExecutor, landed: Future[None], target: _Target, act: Callable[..., None], *args: Any
) -> None:
    try:
        worker.submit(act, *args)
    except RuntimeError:  # the lane was closed, perhaps by another thread
        _give_up(landed, target, StoreClosedError("this rank has left the run: its lane is closed"))


def _follow(sent: Future[None], landed: Future[None], target: _Target) -> None:
    """Let ``landed`` end as ``sent`` does; staging is free then."""

    def over(answer: Future[None]) -> None:
        target.release()
        try:
            landed.set_result(answer.result())
        except Exception as exc:  # whatever it is, it is the push's own error
            landed.set_exception(exc)

    sent.add_done_callback(over)


def _give_up(landed: Future[None], target: _Target, error: Exception) -> None:
    target.release()
    landed.set_exception(error)
