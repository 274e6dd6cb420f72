"""What a lane is: a copy is issued in one call and waited for in another.

[Note: ways to wait] ``finished()`` asks and never blocks. ``wait()`` orders: what the caller computes next comes after
the copy. On CUDA the stream waits then and not the thread; without streams the thread has no other way than to block.
``join()`` blocks the thread until the bytes are there: for host memory that the CPU reads or that is reused.

[Note: who may free device memory] A copy's device tensors are memory of the computing stream. Their owner may let go of
one in three ways: name it in ``holds``, and the allocator keeps it until the copy has run; or keep it until after
``wait()``, when reuse by the computing stream is in order without help from the allocator, which is what a CUDA graph
needs; or call ``before_free()`` where nobody will wait for the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Direction = Literal["out", "in"]  # device to host, host to device


SPANS_KEPT = 4096  # copies, the latest


@dataclass(frozen=True, slots=True)
class Span:
    """One copy that has run: times in seconds of the lane's clock."""

    direction: Direction
    label: str
    start: float
    stop: float
    nbytes: int  # host memory read or written


class Event(Protocol):
    """The end of a copy, or a moment of the computation. See [Note: ways to wait]."""

    def finished(self) -> bool:
        """True once the copy has ended, well or not; never blocks."""
        ...

    def settle(self) -> BaseException | None:
        """Order the caller's following work after the copy; what the copy raised."""
        ...

    def wait(self) -> None:
        """Order the caller's following work after the copy; raises what the copy raised."""
        ...

    def join(self) -> BaseException | None:
        """Block until the copy has ended; what it raised."""
        ...

    def before_free(self) -> None:
        """Make it safe for the caller to free the copy's device memory now, whether the copy has run or not."""
        ...


class Lane(Protocol):
    """Runs copies between one device and host memory, in order per direction, beside the computation.

    Knows order and time; not what is copied, whose memory it is, or why."""

    device: torch.device

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
        """Start ``copy`` after the events ``after``; None: after what the caller has computed so far.

        ``copy`` runs once, without recording gradients: with streams in this call, which queues its work and raises
        what it raises; else on the lane's thread, and the event raises it. It returns False where it had nothing to
        copy. ``holds``: device tensors of the copy that nobody else will keep, see [Note: who may free device memory].
        ``label`` and ``nbytes``: what ``spans`` says of it; without a size nothing."""
        ...

    def now(self) -> Event:
        """The caller's present; inside ``copy``, the copy's."""
        ...

    def seconds(self, start: Event, stop: Event) -> float | None:
        """Time from one moment that ``now`` gave to another; None while it is not known yet."""
        ...

    def spans(self) -> list[Span]:
        """The latest copies that were given a size and have ended well."""
        ...

    def settle(self, direction: Direction) -> None:
        """Order the caller's following work after every copy of a direction so far, well or not."""
        ...

    def drain(self, direction: Direction) -> None:
        """Block until every copy of a direction so far has ended, well or not."""
        ...

    def capturing(self) -> bool:
        """True while the current stream records a CUDA graph."""
        ...

    def close(self) -> None:
        """End the lane's threads after what is queued; copies issued later run at once in the caller. Idempotent."""
        ...
