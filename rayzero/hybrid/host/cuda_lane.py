"""The transfer lane of a CUDA device: a stream for each direction, one copy over the link for each bucket.

[Note: staging] Many small gradients become one copy by way of device memory, and parameters on their way back too. It
is allocated and used on one stream alone, so that the allocator hands a bucket's memory to the next without waiting:
at most about one bucket of each direction exists.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rayzero.hybrid.host.buckets import Bucket
from rayzero.hybrid.host.lane import Moment, Ticket
from rayzero.tensor_metadata import plain


class CudaTicket:
    """A copy on a stream, known by the event behind it."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def join(self) -> None:
        """See ``Ticket``."""
        self._event.synchronize()

    def wait(self) -> None:
        """See ``Ticket``: the current stream waits."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaLane:
    """Copies on streams of their own; with ``overlap=False`` on the stream that is current."""

    def __init__(self, device: torch.device, *, overlap: bool = True) -> None:
        self._device = device
        self._own = overlap
        self._out: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # beside backward
        self._in: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # beside forward

    def send(self, bucket: Bucket, indices: Sequence[int], grads: Sequence[Tensor]) -> Ticket:
        """See ``Lane``."""
        present = torch.cuda.current_stream(self._device)
        stream = self._out if self._own else present
        stream.wait_stream(present)
        assert bucket.grads is not None
        with torch.no_grad(), torch.cuda.stream(stream):
            start, stop = _span(bucket, indices)
            if len(indices) == 1:
                bucket.grad_views[indices[0]].copy_(grads[0], non_blocking=True)
            else:
                staged = torch.zeros(stop - start, dtype=bucket.grads.dtype, device=self._device)
                torch._foreach_copy_(_parts(bucket, indices, staged, start, grads), list(grads))
                bucket.grads[start:stop].copy_(staged, non_blocking=True)
            for grad in grads:
                grad.record_stream(stream)
            return CudaTicket(stream.record_event(), self._device)

    def bring(self, bucket: Bucket, indices: Sequence[int], params: Sequence[Tensor], after: Moment) -> Ticket:
        """See ``Lane``."""
        assert isinstance(after, torch.cuda.Event)
        stream = self._in if self._own else torch.cuda.current_stream(self._device)
        with torch.no_grad(), plain(), torch.cuda.stream(stream):
            stream.wait_event(after)
            start, stop = _span(bucket, indices)
            if len(indices) == 1:
                params[0].copy_(bucket.param_views[indices[0]], non_blocking=True)
            else:
                staged = bucket.params[start:stop].to(self._device, non_blocking=True)
                torch._foreach_copy_(list(params), _parts(bucket, indices, staged, start, params))
            return CudaTicket(stream.record_event(), self._device)

    def now(self) -> Moment:
        """See ``Lane``."""
        present: Moment = torch.cuda.current_stream(self._device).record_event()
        return present

    def close(self) -> None:
        """See ``Lane``: streams need no end."""


def _span(bucket: Bucket, indices: Sequence[int]) -> tuple[int, int]:
    last = indices[-1]
    return bucket.offsets[indices[0]], bucket.offsets[last] + bucket.pieces[last].numel


def _parts(
    bucket: Bucket, indices: Sequence[int], staged: Tensor, start: int, shaped: Sequence[Tensor]
) -> list[Tensor]:
    """The pieces within ``staged``, which is the bucket from element ``start`` on."""
    begins = [bucket.offsets[index] - start for index in indices]
    return [staged[at : at + like.numel()].view(like.shape) for at, like in zip(begins, shaped, strict=True)]
