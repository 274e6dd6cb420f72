"""Copy lanes: bytes between the store and the device, beside the compute.

[Note: lanes] A fetch on a CPU rank goes from the store straight into the unit's buffer. On CUDA it goes into a
(pinned) staging buffer and from there to the device on a stream of its own; the copy waits for what the compute
stream had queued when the fetch was asked for, because the buffer may have been read until then. Gradients go the
other way: into a host buffer (CPU: by the lane's worker thread; CUDA: on a stream of its own), then to the store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from rayzero.engine.param_unit import Fetching
from rayzero.engine.residency import UnitBuffer
from rayzero.errors import StoreClosedError
from rayzero.layout.model_layout import ALIGN, UnitLayout
from rayzero.memory.pool import Buffer, BufferPool
from rayzero.messages import COMPUTE, Contribution
from rayzero.store.protocol import ParameterStore

_ZEROS = torch.zeros(ALIGN, dtype=torch.uint8)
_SMALL = 1 << 20  # bytes: copying them takes about 0.1 ms, a thread switch under the GIL up to 1 ms

Grads = Sequence[Tensor | None]  # per slot of a unit; None: the parameter got no gradient


class Lane(Protocol):
    """Carries one rank's bytes. Knows buffers and streams; not when something is needed, or by whom."""

    def fetch(self, unit: UnitLayout, version: int, buffer: UnitBuffer, *, ahead: bool) -> Fetching:
        """Ask for a unit's parameters of exactly ``version``; returns at once."""
        ...

    def push(self, unit: UnitLayout, contribution: Contribution, grads: Grads) -> Future[None]:
        """Send a unit's gradients; done when they have landed with the owners. Returns at once."""
        ...

    def close(self) -> None:
        """Finish what is queued and end the worker thread. Idempotent."""
        ...


def make_lane(store: ParameterStore, device: torch.device, *, pinned: bool) -> Lane:
    """The lane for a rank on ``device``; ``pinned``: page-lock staging buffers (CUDA only)."""
    return CudaLane(store, device, pinned=pinned) if device.type == "cuda" else HostLane(store)


class HostLane:
    """The lane of a CPU rank: fetches need no copy, gradients are gathered by one worker thread."""

    def __init__(self, store: ParameterStore) -> None:
        self._store = store
        self._pool = BufferPool()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rayzero-lane")

    def fetch(self, unit: UnitLayout, version: int, buffer: UnitBuffer, *, ahead: bool) -> Fetching:
        """See :class:`Lane`."""
        done = self._store.fetch(unit.index, version, COMPUTE, buffer.flat)
        return Fetching(version=version, done=done, request=done, buffer=buffer, ahead=ahead)

    def push(self, unit: UnitLayout, contribution: Contribution, grads: Grads) -> Future[None]:
        """See :class:`Lane`. A unit of one contiguous gradient without padding goes as it is; a small one is gathered
        here, because handing it to another thread takes longer."""
        landed: Future[None] = Future()
        if unit.size_bytes <= _SMALL:
            self._send(landed, unit, contribution, list(grads))
        else:
            _submit(self._worker, landed, self._send, landed, unit, contribution, list(grads))
        return landed

    def _send(
        self, landed: Future[None], unit: UnitLayout, contribution: Contribution, grads: list[Tensor | None]
    ) -> None:
        try:
            flat, buffer = _whole(unit, grads), None
            if flat is None:
                buffer = _host_buffer(self._pool, unit)
                flat = buffer.tensor.view(unit.dtype)
                gather_into(flat, unit, grads)
            grads.clear()
            _follow(self._store.push(contribution, flat), landed, buffer)
        except Exception as exc:  # the worker's only way to tell: the rank's next wait raises it
            landed.set_exception(exc)

    def close(self) -> None:
        """See :class:`Lane`."""
        self._worker.shutdown(wait=True)


class CudaLane:
    """The lane of a CUDA rank: one stream in, one stream out, staging in (pinned) host memory."""

    def __init__(self, store: ParameterStore, device: torch.device, *, pinned: bool) -> None:
        self._store = store
        self._device = device
        self._staging = BufferPool(pinned=pinned)
        self._in: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # with compute
        self._out: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # with compute
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rayzero-lane")
        self._copied: list[tuple[torch.cuda.Event, Buffer]] = []  # freed by: _reap, once the copy has run
        self._lock = threading.Lock()

    def fetch(self, unit: UnitLayout, version: int, buffer: UnitBuffer, *, ahead: bool) -> Fetching:
        """See :class:`Lane`."""
        self._reap()
        free = torch.cuda.current_stream(self._device).record_event()
        staged = _host_buffer(self._staging, unit)
        host = staged.tensor.view(unit.dtype)
        request = self._store.fetch(unit.index, version, COMPUTE, host)
        ready: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done: Future[None] = Future()

        def arrived(answer: Future[None]) -> None:
            try:
                answer.result()
                with torch.cuda.stream(self._in):
                    self._in.wait_event(free)
                    buffer.flat.copy_(host, non_blocking=True)
                    ready.record(self._in)
            except (
                Exception,
                CancelledError,
            ) as exc:  # the store's thread must not end here; the rank's wait raises it
                staged.release()
                done.set_exception(exc)
                return
            with self._lock:
                self._copied.append((ready, staged))
            done.set_result(None)

        request.add_done_callback(arrived)
        return Fetching(version=version, done=done, request=request, buffer=buffer, ahead=ahead, ready=ready)

    def _reap(self) -> None:
        with self._lock:
            over = [pair for pair in self._copied if pair[0].query()]  # type: ignore[no-untyped-call]
            self._copied = [pair for pair in self._copied if pair not in over]
        for _, staged in over:
            staged.release()

    def push(self, unit: UnitLayout, contribution: Contribution, grads: Grads) -> Future[None]:
        """See :class:`Lane`. The copy is queued here; the worker waits for it and announces."""
        buffer = _host_buffer(self._staging, unit)
        flat = buffer.tensor.view(unit.dtype)
        gathered = torch.empty(unit.numel, dtype=unit.dtype, device=self._device)
        gather_into(gathered, unit, grads)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            flat.copy_(gathered, non_blocking=True)
            copied = self._out.record_event()
        gathered.record_stream(self._out)
        landed: Future[None] = Future()
        _submit(self._worker, landed, self._announce, landed, contribution, flat, copied, buffer)
        return landed

    def _announce(
        self, landed: Future[None], contribution: Contribution, flat: Tensor, copied: torch.cuda.Event, buffer: Buffer
    ) -> None:
        try:
            copied.synchronize()
            _follow(self._store.push(contribution, flat), landed, buffer)
        except Exception as exc:  # the worker's only way to tell: the rank's next wait raises it
            landed.set_exception(exc)

    def close(self) -> None:
        """See :class:`Lane`."""
        self._worker.shutdown(wait=True)


def _submit(worker: ThreadPoolExecutor, landed: Future[None], act: Callable[..., None], *args: Any) -> None:
    try:
        worker.submit(act, *args)
    except RuntimeError:  # the lane was closed, perhaps by another thread
        landed.set_exception(StoreClosedError("this rank has left the run: its lane is closed"))


def gather_into(flat: Tensor, unit: UnitLayout, grads: Grads) -> None:
    """Copy gradients to their slots in ``flat`` (1D, unit.numel elements, the unit's dtype, on the gradients' device).
    Padding becomes zero; the range of a parameter without a gradient is left as it is or becomes zero."""
    parts = []
    for slot, gap, grad in zip(unit.slots, unit.gaps, grads, strict=True):
        parts.append(grad.flatten() if grad is not None else flat.new_zeros(slot.numel))
        if gap:
            parts.append(_ZEROS[:gap].to(flat))
    with torch.no_grad():  # under create_graph gradients have a graph of their own
        torch.cat(parts, out=flat)  # one call: a third of the time of a copy per parameter (20 of 16 KiB each)


def _whole(unit: UnitLayout, grads: Grads) -> Tensor | None:
    """The unit's flat gradient, where one tensor already is just that."""
    if len(grads) != 1 or grads[0] is None or grads[0].numel() != unit.numel:
        return None
    return grads[0].flatten() if grads[0].is_contiguous() and grads[0].dtype is unit.dtype else None


def _host_buffer(pool: BufferPool, unit: UnitLayout) -> Buffer:
    with torch.inference_mode(False):
        buffer = pool.acquire(unit.size_bytes)
    assert buffer is not None, "a pool without a limit always has room"
    return buffer


def _follow(sent: Future[None], landed: Future[None], buffer: Buffer | None) -> None:
    """Let ``landed`` end as ``sent`` does; the host buffer is free then."""

    def over(answer: Future[None]) -> None:
        if buffer is not None:
            buffer.release()
        try:
            landed.set_result(answer.result())
        except (Exception, CancelledError) as exc:  # whatever it is, it is the push's own error
            landed.set_exception(exc)

    sent.add_done_callback(over)
