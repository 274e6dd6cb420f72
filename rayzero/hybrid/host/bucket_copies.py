"""Copies a bucket's gradients to the host and its parameters back to the device.

[Note: staging] On a device with streams, many small gradients are gathered in device memory and copied as one;
parameters come back the same way. That memory is allocated and used on a single stream, so the allocator can give one
bucket's memory to the next without waiting: there is about one bucket of it per direction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rayzero.hybrid.host.buckets import Bucket
from rayzero.lanes import Event, Lane
from rayzero.tensor_metadata import plain


def send(lane: Lane, bucket: Bucket, indices: Sequence[int], grads: Sequence[Tensor], after: Sequence[Event]) -> Event:
    """Copy gradients into the bucket's gradient memory, once all in ``after`` has happened. ``grads[i]`` is on the
    device and has the shape of piece ``indices[i]``; indices ascend."""
    found, landing = list(grads), bucket.grads
    assert landing is not None
    targets = [bucket.grad_views[index] for index in indices]

    def copy() -> None:
        with plain():
            if len(found) == 1 or lane.device.type != "cuda":
                torch._foreach_copy_(targets, found, non_blocking=True)  # one call: models have thousands
                return
            start, stop = _range(bucket, indices)
            staged = torch.zeros(stop - start, dtype=landing.dtype, device=lane.device)
            torch._foreach_copy_(_within(bucket, indices, staged, start, found), found)
            landing[start:stop].copy_(staged, non_blocking=True)

    return lane.issue("out", copy, after=after, holds=grads)  # zero_grad() may drop them before it has run


def bring(lane: Lane, bucket: Bucket, indices: Sequence[int], params: Sequence[Tensor], after: Event) -> Event:
    """Copy the pieces' values from ``bucket.params`` into ``params``, once ``after`` has happened."""
    targets, sources = list(params), [bucket.param_views[index] for index in indices]

    def copy() -> None:
        with plain():
            if len(targets) == 1 or lane.device.type != "cuda":
                torch._foreach_copy_(targets, sources, non_blocking=True)
                return
            start, stop = _range(bucket, indices)
            staged = bucket.params[start:stop].to(lane.device, non_blocking=True)
            torch._foreach_copy_(targets, _within(bucket, indices, staged, start, targets))

    return lane.issue("in", copy, after=[after], holds=params)  # a model may be dropped before it has run


def _range(bucket: Bucket, indices: Sequence[int]) -> tuple[int, int]:
    last = indices[-1]
    return bucket.offsets[indices[0]], bucket.offsets[last] + bucket.pieces[last].numel


def _within(
    bucket: Bucket, indices: Sequence[int], staged: Tensor, start: int, shaped: Sequence[Tensor]
) -> list[Tensor]:
    """Views of the pieces in ``staged``, which begins at element ``start`` of the bucket."""
    begins = [bucket.offsets[index] - start for index in indices]
    return [staged[at : at + like.numel()].view(like.shape) for at, like in zip(begins, shaped, strict=True)]
