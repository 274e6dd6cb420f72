"""Adam by ``torch._fused_adamw_`` over tiles that stay in cache, where there is no native kernel.

28 bytes per parameter, bf16 gradients in, bf16 parameters out, against the memory limit of the same run
(benchmarks/adam.py): 0.85 on a Zen 5, untiled 0.62; 0.53-0.61 on a Xeon with AVX-512, untiled 0.50. There one core does
not saturate memory, and torch has no prefetch ahead of use: its fused kernel alone takes what the limit allows for all,
and the casts before and after it, each 2 bytes from memory, come on top.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from rayzero.kernels.base import AdamMemory, Segment
from rayzero.kernels.rank_sum import RankSum
from rayzero.kernels.stamps import STAMP

Tile = tuple[Segment, int, int]  # and the elements it takes of the segment

TILE = 1 << 19  # elements: with 512k-1M fp32 elements the scratch stays in L2/L3 between the passes


class TorchKernel:
    """The tiled kernel. Bits do not depend on the tile size or torch's thread count, because segments, and so
    tiles, are multiples of 64 elements: no vector tail anywhere."""

    name = "torch"

    def __init__(self, tile: int = TILE) -> None:
        self._tile = tile
        self._sum = RankSum(tile)
        self._scaled = torch.zeros(tile)
        self._step = torch.zeros(())  # torch's kernels read the step count from a tensor

    @torch.no_grad()
    def update(
        self,
        memory: AdamMemory,
        gradients: Sequence[Tensor],
        segments: Sequence[Segment],
        scale: float,
        on_tile: Callable[[int, int], None],
        *,
        limit: float = math.inf,
    ) -> None:
        """See ``Kernel.update``."""
        windows = list(self._windows(segments, memory.master.numel()))
        done, total = 0, sum(len(tiles) for _, _, tiles in windows)
        for begin, end, tiles in windows:
            with memory.stamps.writing(begin, end) if memory.stamps is not None else nullcontext():
                for segment, start, stop in tiles:
                    self._update_tile(memory, gradients, segment, start, stop, scale, limit)
                    on_tile(done := done + 1, total)

    def _windows(self, segments: Sequence[Segment], numel: int) -> Iterator[tuple[int, int, list[Tile]]]:
        """Where stamps are cut, and the tiles of all segments between two cuts."""
        size = -(-self._tile // STAMP) * STAMP
        for begin in range(0, numel, size):
            end = min(begin + size, numel)
            tiles = [tile for segment in segments for tile in self._tiles(segment, begin, end)]
            if tiles:
                yield begin, end, tiles

    def _tiles(self, segment: Segment, begin: int, end: int) -> Iterator[Tile]:
        first, last = max(begin, segment.offset), min(end, segment.offset + segment.length)
        for start in range(first, last, self._tile):
            yield segment, start, min(start + self._tile, last)

    def _update_tile(
        self,
        memory: AdamMemory,
        gradients: Sequence[Tensor],
        segment: Segment,
        start: int,
        stop: int,
        scale: float,
        limit: float,
    ) -> None:
        grad = self._sum.sum(gradients, segment.ranks, start, stop)
        if scale != 1.0 or limit < math.inf:
            out = grad if self._sum.owns(grad) else self._scaled[: stop - start]  # where it was: one tile less in cache
            grad = torch.mul(grad, scale, out=out)
        if limit < math.inf:
            grad.clamp_(-limit, limit)
        master = memory.master[start:stop]
        self._adam(memory, master, grad, segment, start, stop)
        if memory.params is not None:
            memory.params[start:stop].copy_(master)

    def _adam(self, memory: AdamMemory, master: Tensor, grad: Tensor, segment: Segment, start: int, stop: int) -> None:
        options = segment.options
        fused = torch._fused_adamw_ if options.decoupled else torch._fused_adam_
        largest = [memory.max_exp_avg_sq[start:stop]] if memory.max_exp_avg_sq is not None else []
        fused(
            [master],
            [grad],
            [memory.exp_avg[start:stop]],
            [memory.exp_avg_sq[start:stop]],
            largest if options.amsgrad else [],
            [self._step.fill_(segment.step)],
            lr=options.lr,
            beta1=options.beta1,
            beta2=options.beta2,
            weight_decay=options.weight_decay,
            eps=options.eps,
            amsgrad=options.amsgrad,
            maximize=options.maximize,
        )
