"""The lane of a CUDA device: one stream per direction."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayzero.errors import ConfigError
from rayzero.lanes.lane import SPANS_KEPT, Direction, Event, Span


class CudaEvent:
    """A point in a stream's work."""

    __slots__ = ("_device", "event")

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event = event
        self._device = device

    def finished(self) -> bool:
        """See ``Event``; False while a graph is being captured, when no query is allowed."""
        return not torch.cuda.is_current_stream_capturing() and self.passed()

    def passed(self) -> bool:
        """Whether the device has reached it."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """See ``Event``: like ``wait()``. CUDA reports errors itself, at a later call."""
        self.wait()

    def wait(self) -> None:
        """See ``Event``: the current stream waits."""
        torch.cuda.current_stream(self._device).wait_event(self.event)

    def join(self) -> None:
        """See ``Event``."""
        self.event.synchronize()

    def before_free(self, *memory: Tensor) -> None:
        """See ``Event``: the current stream waits, and whoever is handed the memory next waits for it."""
        self.wait()
        for tensor in memory:
            tensor.record_stream(torch.cuda.current_stream(self._device))


@dataclass(frozen=True, slots=True)
class _Copy:
    direction: Direction
    label: str
    start: torch.cuda.Event
    stop: torch.cuda.Event
    nbytes: int


class CudaLane:
    """Copies on two streams of one CUDA device. See ``Lane`` and [Note: who may free device memory]."""

    def __init__(self, device: torch.device | str = "cuda", *, overlap: bool = True) -> None:
        """``overlap=False``: copies run on the current stream. Raises ConfigError if ``device`` is not CUDA."""
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise ConfigError(f"a CUDA lane needs a CUDA device, got {self.device}")
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._streams: dict[Direction, torch.cuda.Stream] = {}
        if overlap:
            self._streams["out"] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._streams["in"] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._copies: deque[_Copy] = deque(maxlen=SPANS_KEPT)
        self._made = self._record()

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
        stream = self._stream(direction)
        if after is None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), torch.cuda.stream(stream):
            for event in after or ():
                event.wait()
            began = self._record() if nbytes and not self.capturing() else None
            try:
                copied = copy() is not False
            finally:  # if it raised, the work that it had queued runs all the same
                for tensor in holds:
                    tensor.record_stream(stream)
            ended = self._record()
        if copied and began is not None:
            self._copies.append(_Copy(direction, label, began, ended, nbytes))
        return CudaEvent(ended, self.device)

    def now(self, stream: Hashable = None) -> Event:
        """See ``Lane``: an event on the current stream, or on ``stream``."""
        return CudaEvent(self._record(stream), self.device)

    def _record(self, stream: Any = None) -> torch.cuda.Event:
        """Record an event on a stream, by default the current one. A thread that joins it sleeps; inside a graph
        capture it has no time."""
        event = torch.cuda.Event(enable_timing=not self.capturing(), blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream or torch.cuda.current_stream(self.device))
        return event

    def stream(self) -> Hashable:
        """See ``Lane``."""
        return torch.cuda.current_stream(self.device)

    def used(self, memory: Tensor) -> None:
        """See ``Lane``. The allocator ignores the stream that the memory was allocated on."""
        memory.record_stream(torch.cuda.current_stream(self.device))

    def seconds(self, start: Event, stop: Event) -> float | None:
        """See ``Lane``. The device's time; None until the device has reached both events."""
        assert isinstance(start, CudaEvent)
        assert isinstance(stop, CudaEvent)
        if self.capturing() or not (start.passed() and stop.passed()):
            return None
        return _seconds(start.event, stop.event)

    def spans(self) -> list[Span]:
        """See ``Lane``. The clock is the device's and starts when the lane is made."""
        return [self._span(copy) for copy in list(self._copies) if copy.stop.query()]  # type: ignore[no-untyped-call]

    def _span(self, copy: _Copy) -> Span:
        start = _seconds(self._made, copy.start)
        return Span(copy.direction, copy.label, start, start + _seconds(copy.start, copy.stop), copy.nbytes)

    def settle(self, direction: Direction) -> None:
        """See ``Lane``: the current stream waits for the direction's stream."""
        torch.cuda.current_stream(self.device).wait_stream(self._stream(direction))

    def drain(self, direction: Direction) -> None:
        """See ``Lane``."""
        self._stream(direction).synchronize()

    def capturing(self) -> bool:
        """See ``Lane``."""
        return torch.cuda.is_current_stream_capturing()

    def close(self) -> None:
        """See ``Lane``: does nothing. Streams need no end, and queued work still runs."""

    def _stream(self, direction: Direction) -> torch.cuda.Stream:
        return self._streams.get(direction) or torch.cuda.current_stream(self.device)


def _seconds(start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
    return float(start.elapsed_time(stop)) / 1e3
