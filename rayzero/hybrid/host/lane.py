"""The transfer lane: gradients device → host, parameters host → device, beside whatever computes.

[Note: join and wait] ``join()`` blocks the calling thread until the bytes are there. ``wait()`` orders: what the caller
computes next comes after the copy. On CUDA the stream waits then and not the thread; without streams both block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from rayzero.hybrid.host.buckets import Bucket
from rayzero.tensor_metadata import plain

BeforeCopy = Callable[[str], None]  # called on the copying thread with "out" or "in", for tests that delay or fail


class Ticket(Protocol):
    """A copy that was asked for. See [Note: join and wait]."""

    def join(self) -> None:
        """Block until it has ended; raises what it raised."""
        ...

    def wait(self) -> None:
        """Order the caller's following work after it; raises what it raised."""
        ...


class Moment(Protocol):
    """A point in the computation's time."""


class Lane(Protocol):
    """Moves pieces of buckets. Knows bytes and their order; not what they mean. Copies of a direction are in order."""

    def send(self, bucket: Bucket, indices: Sequence[int], grads: Sequence[Tensor]) -> Ticket:
        """Copy gradients into the bucket's gradient memory, after what the caller has computed. ``grads[i]`` has the
        shape of piece ``indices[i]`` (ascending), on the device."""
        ...

    def bring(self, bucket: Bucket, indices: Sequence[int], params: Sequence[Tensor], after: Moment) -> Ticket:
        """Copy the pieces' values from ``bucket.params`` into ``params``, not before ``after``."""
        ...

    def now(self) -> Moment:
        """The calling thread's present."""
        ...

    def close(self) -> None:
        """Finish what is queued and end the threads. Idempotent."""
        ...


class Inline(Executor):
    """Runs what is submitted at once, in the caller."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The result is there on return."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # whoever waits for the future gets it
            future.set_exception(error)
        return future


class ThreadTicket:
    """A copy on a thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def join(self) -> None:
        """See ``Ticket``."""
        self._future.result()

    def wait(self) -> None:
        """See ``Ticket``: a thread has no other way to order its work."""
        self._future.result()


class ThreadLane:
    """The lane of a device without streams: a thread for each direction, or none."""

    def __init__(self, *, threads: bool = True, before_copy: BeforeCopy | None = None) -> None:
        """``threads=False``: copies run in the caller."""
        self._out = ThreadPoolExecutor(1, "rayzero-hybrid-out") if threads else Inline()
        self._in = ThreadPoolExecutor(1, "rayzero-hybrid-in") if threads else Inline()
        self._before_copy = before_copy

    def send(self, bucket: Bucket, indices: Sequence[int], grads: Sequence[Tensor]) -> Ticket:
        """See ``Lane``."""
        targets = [bucket.grad_views[index] for index in indices]
        return ThreadTicket(self._out.submit(self._copy, "out", targets, list(grads)))

    def bring(self, bucket: Bucket, indices: Sequence[int], params: Sequence[Tensor], after: Moment) -> Ticket:
        """See ``Lane``."""
        sources = [bucket.param_views[index] for index in indices]
        return ThreadTicket(self._in.submit(self._copy, "in", list(params), sources))

    def _copy(self, direction: str, targets: list[Tensor], sources: list[Tensor]) -> None:
        if self._before_copy is not None:
            self._before_copy(direction)
        with torch.no_grad(), plain():
            torch._foreach_copy_(targets, sources)  # one call: models have thousands of parameters

    def now(self) -> Moment:
        """See ``Lane``: the caller has computed all that it will have when this returns."""
        return None

    def close(self) -> None:
        """See ``Lane``."""
        self._out.shutdown(wait=True)
        self._in.shutdown(wait=True)
