"""The last elements of pieces, updated by torch's own fused kernel.

[Note: tails] Torch computes the elements after a tensor's last full vector with scalar code, which rounds differently.
So the tile kernel updates whole lines of 64 elements, and torch's kernel the rest of each piece, as a tensor that
begins at a line. Vector widths divide 64, so torch splits this tensor into vectors and scalars exactly as it splits the
whole one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rayzero.hybrid.host.buckets import Bucket
from rayzero.kernels import AdamOptions
from rayzero.kernels.torch_kernel import fused_adam
from rayzero.layout.model_layout import ALIGN


def lines(numel: int) -> int:
    """The largest multiple of 64 that is at most ``numel``."""
    return numel // ALIGN * ALIGN


class Tails:
    """The elements of a bucket's pieces after their last full line, and their moments."""

    def __init__(self, bucket: Bucket, moments: Mapping[str, Tensor]) -> None:
        """``moments``: kind -> fp32, flat like the bucket."""
        self._bucket = bucket
        self._ranges = [
            (at + lines(piece.numel), at + piece.numel) for at, piece in zip(bucket.offsets, bucket.pieces, strict=True)
        ]
        self._flats = [bucket.master, *moments.values()]

    @torch.no_grad()
    def update(
        self, present: Sequence[int], options: Mapping[int, AdamOptions], steps: Sequence[int], scale: float
    ) -> None:
        """Update the tails of the pieces ``present``. ``options`` and ``steps`` (counting this one) are by piece."""
        alike: dict[tuple[AdamOptions, int], list[int]] = {}
        for index in present:
            start, stop = self._ranges[index]
            if stop > start:
                alike.setdefault((options[index], steps[index]), []).append(index)
        for (chosen, step), members in alike.items():
            self._fused(members, chosen, step, scale)

    def _fused(self, members: Sequence[int], options: AdamOptions, step: int, scale: float) -> None:
        assert self._bucket.grads is not None
        ranges = [self._ranges[index] for index in members]
        grads = [self._bucket.grads[start:stop].float() for start, stop in ranges]
        masters, means, squares, *largest = [[flat[start:stop] for start, stop in ranges] for flat in self._flats]
        fused_adam(
            options,
            masters,
            grads if scale == 1.0 else torch._foreach_mul(grads, scale),
            means,
            squares,
            largest[0] if options.amsgrad else [],
            [torch.tensor(float(step), dtype=torch.float32, device="cpu")] * len(members),
        )
        if self._bucket.params is not self._bucket.master:
            torch._foreach_copy_([self._bucket.params[start:stop] for start, stop in ranges], masters)
