"""Which streams compute with memory on a device that copies fill again and again."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from rayzero.lanes.lane import Event, Lane


class StreamUses:
    """The streams that use one piece of device memory, and the copy that filled it.

    Knows streams; not what the memory is for. See [Note: several computing streams] in lane.py."""

    def __init__(self, lane: Lane, memory: Tensor) -> None:
        """``memory``: of any shape and dtype."""
        self._lane, self._memory = lane, memory
        self._streams: set[Hashable] = set()  # all that have used it
        self._behind: set[Hashable] = set()  # those that come after the last copy
        self._filled: Event | None = None

    def filled(self, copied: Event) -> None:
        """A copy that ends with ``copied`` fills the memory. Nobody uses it while the copy is issued."""
        self._behind = set()
        self._filled = copied

    def use(self) -> None:
        """The caller's stream is about to compute with the memory: order it after the copy, unless it is."""
        stream = self._lane.stream()
        if stream in self._behind:
            return
        if self._filled is not None:
            self._filled.wait()
        self._lane.used(self._memory)
        self._streams.add(stream)
        self._behind.add(stream)

    def so_far(self) -> list[Event]:
        """What must be over before the memory may be written again: what every stream that uses it has been given so
        far, and the caller's."""
        return [self._lane.now(stream) for stream in self._streams | {self._lane.stream()}]
