"""The copy lane of a CUDA device: one stream out, one stream in.

[Note: who may free device memory] A source was allocated on the computing stream. Without ``keep`` the allocator is
told of the copy (``record_stream``) and the reference goes at once. With ``keep`` the reference stays until the
computing stream has been made to wait for the copy: after that, reuse by the computing stream is ordered, with no help
from the allocator, which is what a CUDA graph needs. A target is allocated on the computing stream too, so the copy in
waits for that stream first; nobody frees it before the computing stream has waited for the copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rayzero.activations.copy_lane import Parcel, Resident, Span, Stamp, Ticket
from rayzero.activations.tensors.codec import Raw
from rayzero.errors import ConfigError, UnsupportedError

_SPANS_KEPT = 4096


class CudaTicket:
    """A copy on a stream, known by the event behind it."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def finished(self) -> bool:
        """True once the event has passed; False while a graph is being captured (no query is allowed then)."""
        return not torch.cuda.is_current_stream_capturing() and _passed(self._event)

    def failed(self) -> bool:
        """Never: CUDA reports errors at the next call."""
        return False

    def wait(self) -> None:
        """The current stream waits; this thread does not."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def join(self) -> None:
        """Block this thread until the event has passed."""
        self._event.synchronize()


@dataclass(frozen=True, slots=True)
class _Timed:
    direction: str
    label: str
    start: torch.cuda.Event
    stop: torch.cuda.Event
    nbytes: int


class CudaLane:
    """Copies on two streams of one CUDA device. See [Note: who may free device memory]."""

    pins = True

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise ConfigError(f"a CUDA lane needs a CUDA device, got {self.device}")
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._out = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # overlaps with the forward
        self._in = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # overlaps with the backward
        self._epoch = _event(timing=True)
        self._epoch.record(torch.cuda.current_stream(self.device))
        self._timed: deque[_Timed] = deque(maxlen=_SPANS_KEPT)

    def copy_out(self, source: Resident, parcel: Parcel, *, take: int, keep: bool) -> Ticket:
        """Enqueue behind what the current stream has so far."""
        data = source.bytes
        assert data is not None, "cleared before it was copied"
        if not keep and self.capturing():
            raise UnsupportedError("activation offload inside a CUDA graph capture needs max_in_flight to be a number")
        ticket = self._enqueue(self._out, "out", parcel, lambda: self._send(parcel, data[-take:]))
        if not keep:
            data.record_stream(self._out)
            source.clear()
        return ticket

    def copy_in(self, parcel: Parcel, target: Tensor, *, after: Ticket) -> Ticket:
        """Enqueue behind ``after`` and behind what the current stream has so far."""
        with torch.cuda.stream(self._in):
            after.wait()
        return self._enqueue(self._in, "in", parcel, lambda: self._receive(parcel, target))

    def let_go(self, source: Resident, ticket: Ticket) -> None:
        """The current stream waits for the copy, then the memory is its own again."""
        ticket.wait()
        source.clear()

    def drop_out(self, source: Resident, ticket: Ticket) -> None:
        """The same: freed memory may be reused at once by the current stream."""
        if source.bytes is not None:
            ticket.wait()
            source.drop()

    def drop_in(self, ticket: Ticket) -> None:
        """The current stream waits: the target is its memory."""
        ticket.wait()

    def capturing(self) -> bool:
        """True while the current stream records a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def stamp(self) -> Stamp:
        """An event on the current stream."""
        event = _event(timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: Stamp, stop: Stamp) -> float | None:
        """Time between two events; None until both have passed."""
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(stop, torch.cuda.Event)
        if self.capturing() or not (_passed(start) and _passed(stop)):
            return None
        return float(start.elapsed_time(stop)) / 1e3

    def spans(self) -> list[Span]:
        """The latest copies that have passed, timed by the device."""
        return [self._span(timed) for timed in list(self._timed) if _passed(timed.stop)]

    def join_out(self) -> None:
        """The current stream waits for the stream out."""
        torch.cuda.current_stream(self.device).wait_stream(self._out)

    def join_in(self) -> None:
        """The current stream waits for the stream in."""
        torch.cuda.current_stream(self.device).wait_stream(self._in)

    def close(self) -> None:
        """Streams need no end; what is queued runs on."""

    def _send(self, parcel: Parcel, data: Tensor) -> None:
        encoded = parcel.codec.encode(data, parcel.dtype)
        parcel.host.copy_(encoded, non_blocking=True)

    def _receive(self, parcel: Parcel, target: Tensor) -> None:
        if isinstance(parcel.codec, Raw):
            target.copy_(parcel.host, non_blocking=True)
            return
        landed = parcel.host.to(self.device, non_blocking=True)
        parcel.codec.decode(landed, parcel.dtype, target)

    def _enqueue(self, stream: torch.cuda.Stream, direction: str, parcel: Parcel, work: Callable[[], None]) -> Ticket:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        timing = not self.capturing()
        start, stop = _event(timing=timing), _event(timing=timing)
        with torch.no_grad(), torch.cuda.stream(stream):
            start.record(stream)
            work()
            stop.record(stream)
        if timing:
            self._timed.append(_Timed(direction, parcel.label, start, stop, parcel.host.numel()))
        return CudaTicket(stop, self.device)

    def _span(self, timed: _Timed) -> Span:
        start = self._epoch.elapsed_time(timed.start) / 1e3
        return Span(timed.direction, timed.label, start, self._epoch.elapsed_time(timed.stop) / 1e3, timed.nbytes)


def _event(*, timing: bool) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]


def _passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
