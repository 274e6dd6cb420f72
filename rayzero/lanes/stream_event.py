"""A point of a stream's work, inside and outside of captures into CUDA graphs.

[Note: captured work] While a stream is captured, nothing runs: what the stream is given becomes a part of a graph,
which runs when it is launched. CUDA refuses to let captured work wait for work outside its graph, or other work for
captured work, and to ask whether captured work is over (CUDA C++ Programming Guide, Stream Capture). Between graphs,
waits are not needed: each graph ends only after all copies in it, and whoever launches a backward's graph has launched
the forward's before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from rayzero.errors import UnsupportedError


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
        """See ``Event``: the current stream waits, and whoever is handed the memory next waits for it."""
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
