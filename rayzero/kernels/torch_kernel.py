"""Adam by ``torch._fused_adamw_`` over tiles that stay in cache, where there is no native kernel.

28 bytes per parameter, bf16 gradients in, bf16 parameters out, against the memory limit of the same run
(benchmarks/adam.py): 0.85 on a Zen 5, untiled 0.62; 0.53-0.61 on a Xeon with AVX-512, untiled 0.50. There one core does
not saturate memory, and torch has no prefetch ahead of use: its fused kernel alone takes what the limit allows for all,
and the casts before and after it, each 2 bytes from memory, come on top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rayzero.kernels.base import AdamMemory, Segment
from rayzero.kernels.rank_sum import RankSum

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
    ) -> None:
        """See ``Kernel.update``."""
        tiles = [tile for segment in segments for tile in self._tiles(segment)]
        for done, (segment, start, stop) in enumerate(tiles, 1):
            self._update_tile(memory, gradients, segment, start, stop, scale)
            on_tile(done, len(tiles))

    def _tiles(self, segment: Segment) -> Iterator[tuple[Segment, int, int]]:
        end = segment.offset + segment.length
        for start in range(segment.offset, end, self._tile):
            yield segment, start, min(start + self._tile, end)

    def _update_tile(
        self, memory: AdamMemory, gradients: Sequence[Tensor], segment: Segment, start: int, stop: int, scale: float
    ) -> None:
        grad = self._sum.sum(gradients, segment.ranks, start, stop)
        if scale != 1.0 and self._sum.owns(grad):
            grad.mul_(scale)  # where it was summed: one tile less in cache
        elif scale != 1.0:
            grad = torch.mul(grad, scale, out=self._scaled[: stop - start])
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
