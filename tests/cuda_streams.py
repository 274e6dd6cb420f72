"""CUDA's devices, streams, events and captures as far as lanes use them, without a device.

Two devices, of which only ``OURS`` has a context; a thread's current device is 0 until it says otherwise, as in CUDA.
What would make a context on another device fails, and so does what CUDA refuses. torch changes the device by itself
in some of these calls; here none does, so that nobody relies on which. All calls are recorded, in words::

    cuda = Cuda(monkeypatch)
    lane = CudaLane(OURS)
    ...
    assert cuda.calls == ["record compute#1", "out waits for compute#1", ...]

torch's own ``torch.cuda.device`` and ``torch.cuda.stream`` run on top: how they leave a device is part of the question.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

OURS = torch.device("cuda", 1)


class Refused(RuntimeError):
    """CUDA refuses this."""


class Devices:
    """The current device of each thread, and which devices have a context."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.contexts = {OURS.index}
        self.exchanges = 0
        self._of_thread = threading.local()
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", self.current)
        patch.setattr(torch.cuda, "_exchange_device", self._exchange)
        patch.setattr(torch.cuda, "_maybe_exchange_device", self._maybe_exchange)

    def current(self) -> int:
        return getattr(self._of_thread, "index", 0)

    def set(self, index: int) -> None:
        """cudaSetDevice, which makes a context."""
        self._of_thread.index = index
        self.touch()

    def touch(self) -> None:
        """What the runtime does in a call that needs a context: make one on the current device, if it has none."""
        assert self.current() in self.contexts, f"this makes a context on device {self.current()}"

    def _exchange(self, index: int) -> int:
        before = self.current()
        self.exchanges += 1
        self.set(index)
        return before

    def _maybe_exchange(self, index: int) -> int:
        before, self._of_thread.index = self.current(), index
        return before


class Graph:
    """``torch.cuda.CUDAGraph``."""

    cuda: Cuda

    @classmethod
    def get_currently_capturing_graph(cls) -> object:
        """Of the current device's current stream."""
        found = cls.cuda.current_stream().graph
        if found is None:
            raise RuntimeError("The current stream is not currently capturing.")
        if not isinstance(found, Graph):
            raise RuntimeError("get_currently_capturing_graph() can be used only between capture_begin() and capture_")
        return found


class Stream:
    """``torch.cuda.Stream``."""

    cuda: Cuda
    device_type = 1

    def __init__(self, device: torch.device | None = None, *, name: str = "") -> None:
        self.device = torch.device("cuda", self.cuda.current()) if device is None else torch.device(device)
        self.device_index = self.device.index
        self.graph: object | None = None  # that it is captured into
        self.stream_id = len(self.cuda.streams)
        self.cuda.streams.append(self)
        self.name = name or f"stream {self.stream_id}"

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.cuda.touch()
        self.cuda.calls.append(f"spin until {self.name} is done")


class Event:
    """``torch.cuda.Event``."""

    cuda: Cuda

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.enable_timing, self.blocking = enable_timing, blocking
        self.stream: Stream | None = None
        self.graph: object | None = None
        self.at = 0
        self.name = ""
        self.cuda.events.append(self)

    def record(self, stream: Stream) -> None:
        self.cuda.touch()
        assert self.cuda.current() == stream.device_index, f"{stream.name} is of another device"
        self.cuda.counts[stream.name] += 1
        self.name = f"{stream.name}#{self.cuda.counts[stream.name]}"
        self.stream, self.graph, self.at = stream, stream.graph, len(self.cuda.calls)
        self.cuda.calls.append(f"record {self.name}")

    def wait(self, stream: Stream) -> None:
        """cudaStreamWaitEvent."""
        self.cuda.touch()
        if self.graph is None and stream.graph is not None:
            raise Refused("dependency created on uncaptured work in another stream")
        if self.graph is not None and self.graph is not stream.graph:
            if stream.graph is not None or self.graph not in self.cuda.captures:
                raise Refused("the event was captured into another graph")
            stream.graph = self.graph  # from here on, it is captured too
            self.cuda.captures[self.graph].append(stream)
        self.cuda.calls.append(f"{stream.name} waits for {self.name}")

    def query(self) -> bool:
        self._ask()
        return not self.cuda.late

    def synchronize(self) -> None:
        self._ask()
        self.cuda.calls.append(f"{'sleep' if self.blocking else 'spin'} until {self.name}")

    def elapsed_time(self, end: Event) -> float:
        for event in (self, end):
            event._ask()
            if not event.enable_timing:
                raise Refused(f"{event.name} has no time")
        return float(end.at - self.at)

    def _ask(self) -> None:
        self.cuda.touch()
        assert self.stream is not None, "it was not recorded"
        if self.graph is not None or self.cuda.captures:
            raise Refused("operation not permitted when stream is capturing")


class Memory:
    """A tensor on the device."""

    def __init__(self, cuda: Cuda, name: str) -> None:
        self._cuda, self._name = cuda, name

    def record_stream(self, stream: Stream) -> None:
        self._cuda.touch()
        self._cuda.calls.append(f"hold {self._name} for {stream.name}")


class Cuda(Devices):
    """The whole of it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.calls: list[str] = []
        self.counts = Counter[str]()
        self.events: list[Event] = []
        self.streams: list[Stream] = []
        self.captures: dict[object, list[Stream]] = {}  # by graph: the streams that are captured into it
        self.late = False  # the device has not come to any event yet
        self._default: dict[int, Stream] = {}
        self._chosen = threading.local()
        for fake, real in ((Stream, "Stream"), (Event, "Event"), (Graph, "CUDAGraph")):
            patch.setattr(fake, "cuda", self, raising=False)
            patch.setattr(torch.cuda, real, fake)
        patch.setattr(torch.cuda, "current_stream", self.current_stream)
        patch.setattr(torch.cuda, "set_stream", self._set_stream)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.current_stream().graph is not None)

    def current_stream(self, device: torch.device | int | None = None) -> Stream:
        """Of this thread, on the current device unless one is named."""
        index = self.current() if device is None else getattr(device, "index", device)
        if index not in self._default:
            name = "compute" if index == OURS.index else f"compute of device {index}"
            self._default[index] = Stream(torch.device("cuda", index), name=name)
        return getattr(self._chosen, f"of_{index}", self._default[index])

    def _set_stream(self, stream: Stream) -> None:
        if stream.device_index != self.current():
            self.set(stream.device_index)
        setattr(self._chosen, f"of_{stream.device_index}", stream)

    @contextmanager
    def captured(self, graph: object) -> Iterator[None]:
        """Capture our device's current stream. ``graph``: a ``Graph``, or what torch does not know."""
        begun = self.current_stream(OURS)
        begun.graph, self.captures[graph] = graph, [begun]
        try:
            yield
        finally:
            for stream in self.captures.pop(graph):
                stream.graph = None

    def memory(self, name: str) -> Memory:
        return Memory(self, name)

    def work(self, what: str) -> None:
        """Queue something on our device's current stream."""
        self.calls.append(f"{what} on {self.current_stream(OURS).name}")

    def take(self) -> Sequence[str]:
        """The calls since the last time."""
        taken, self.calls = self.calls, []
        return taken
