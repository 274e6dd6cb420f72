"""Gradients of a bucket on their way to the host, and its parameters on their way back.

[Note: staging] On a device with streams many small gradients become one copy by way of device memory, and parameters on
their way back too. That memory is allocated and used on one stream alone, so that the allocator hands a bucket's to the
next without waiting: at most about one bucket of each direction exists.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rayzero.hybrid.host.buckets import Bucket
from rayzero.lanes import Event, Lane
from rayzero.tensor_metadata import plain


def send(lane: Lane, bucket: Bucket, indices: Sequence[int], grads: Sequence[Tensor]) -> Event:
    """Copy gradients into the bucket's gradient memory, after what the caller has computed. ``grads[i]`` has the shape
    of piece ``indices[i]`` (ascending), on the device."""
    found, landing = list(grads), bucket.grads
    assert landing is not None
    targets = [bucket.grad_views[index] for index in indices]

    def copy() -> None:
        with plain():
            if len(found) == 1 or lane.device.type != "cuda":
                torch._foreach_copy_(targets, found, non_blocking=True)  # one call: models have thousands of them
                return
            start, stop = _range(bucket, indices)
            staged = torch.zeros(stop - start, dtype=landing.dtype, device=lane.device)
            torch._foreach_copy_(_within(bucket, indices, staged, start, found), found)
            landing[start:stop].copy_(staged, non_blocking=True)

    return lane.issue("out", copy, holds=grads)


def bring(lane: Lane, bucket: Bucket, indices: Sequence[int], params: Sequence[Tensor], after: Event) -> Event:
    """Copy the pieces' values from ``bucket.params`` into ``params``, not before ``after``."""
    targets, sources = list(params), [bucket.param_views[index] for index in indices]

    def copy() -> None:
        with plain():
            if len(targets) == 1 or lane.device.type != "cuda":
                torch._foreach_copy_(targets, sources, non_blocking=True)
                return
            start, stop = _range(bucket, indices)
            staged = bucket.params[start:stop].to(lane.device, non_blocking=True)
            torch._foreach_copy_(targets, _within(bucket, indices, staged, start, targets))

    return lane.issue("in", copy, after=[after])


def _range(bucket: Bucket, indices: Sequence[int]) -> tuple[int, int]:
    last = indices[-1]
    return bucket.offsets[indices[0]], bucket.offsets[last] + bucket.pieces[last].numel


def _within(
    bucket: Bucket, indices: Sequence[int], staged: Tensor, start: int, shaped: Sequence[Tensor]
) -> list[Tensor]:
    """The pieces within ``staged``, which is the bucket from element ``start`` on."""
    begins = [bucket.offsets[index] - start for index in indices]
    return [staged[at : at + like.numel()].view(like.shape) for at, like in zip(begins, shaped, strict=True)]
