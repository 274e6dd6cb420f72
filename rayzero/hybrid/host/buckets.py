"""Buckets: flat host memory for pieces that are copied and updated together; each begins at a multiple of 64."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from rayzero.hybrid.split import Piece
from rayzero.layout.model_layout import aligned
from rayzero.memory.page_lock import host_zeros

Shape = tuple[int, ...]


def plan_buckets(pieces: Iterable[tuple[Piece, torch.dtype, torch.device]], bucket_bytes: int) -> list[list[Piece]]:
    """Group neighbouring pieces of one dtype and device into buckets of at most ``bucket_bytes`` of parameters; a piece
    larger than that has a bucket to itself."""
    buckets: list[list[Piece]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Piece], int]] = {}
    for piece, dtype, device in pieces:
        size = aligned(piece.numel) * dtype.itemsize
        bucket, filled = filling.get((dtype, device), ([], bucket_bytes))
        if filled + size > bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(piece)
        filling[dtype, device] = bucket, filled + size
    return buckets


class Bucket:
    """Flat host memory for some pieces: masters, their rounded values for the device, and gradients. Knows memory; not
    who computes, copies or waits. Padding between pieces is always zero."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        shapes: Mapping[int, Shape],
        dtype: torch.dtype,
        *,
        working: torch.dtype,
        params_pinned_for: torch.device | None,
        grads_pinned_for: torch.device | None,
    ) -> None:
        """``shapes``: parameter index -> shape. ``dtype``: of the parameters and of their copies. ``working``: of the
        masters. ``params_pinned_for``, ``grads_pinned_for``: the CUDA device whose copies read or write them, if they
        are page-locked."""
        self.pieces = tuple(pieces)
        self.dtype = dtype
        self._shapes = [shapes[piece.param] if piece.whole else (piece.numel,) for piece in pieces]
        ends = list(accumulate(aligned(piece.numel) for piece in pieces))
        self.offsets = [end - aligned(piece.numel) for end, piece in zip(ends, pieces, strict=True)]
        self.numel = ends[-1]
        same = working is dtype
        self.master = host_zeros(self.numel, working, pinned_for=params_pinned_for if same else None)
        self.params = self.master if same else host_zeros(self.numel, dtype, pinned_for=params_pinned_for)
        self.grads: Tensor | None = None  # made at the first use, kept: gradients of every step land in it
        self.master_views = self.views(self.master)
        self.param_views = self.master_views if same else self.views(self.params)
        self.grad_views: list[Tensor] = []
        self._grads_pinned_for = grads_pinned_for

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of ``flat``, which is laid out like the bucket: one per piece, in the piece's shape."""
        cut = zip(self.offsets, self.pieces, self._shapes, strict=True)
        return [flat[at : at + piece.numel].view(shape) for at, piece, shape in cut]

    def gradient_memory(self, dtype: torch.dtype) -> Tensor:
        """1D memory for gradients of ``dtype``. Asking for another dtype replaces it and loses its contents."""
        if self.grads is None or self.grads.dtype is not dtype:
            self.grads = host_zeros(self.numel, dtype, pinned_for=self._grads_pinned_for)
            self.grad_views = self.views(self.grads)
        return self.grads

    def publish(self) -> None:
        """Round the masters to the parameters' dtype, if that differs."""
        if self.params is not self.master:
            self.params.copy_(self.master)

    @property
    def host_bytes(self) -> int:
        """Bytes of masters, rounded values and gradients (0 before the first one); optimizer states are not
        included."""
        apart = [] if self.params is self.master else [self.params]
        return sum(t.nbytes for t in (self.master, *apart, *([] if self.grads is None else [self.grads])))


def range_of(param: Tensor, piece: Piece) -> Tensor:
    """The piece's elements of ``param``, or of a tensor of its shape. A view if the piece is the whole parameter or
    ``param`` is contiguous; otherwise possibly a copy."""
    whole = param.detach()
    return whole if piece.whole else whole.reshape(-1)[piece.start : piece.stop]
