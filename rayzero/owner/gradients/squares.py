"""Sums of squares whose bits depend only on the gradients.

[Note: fixed leaves] A slice is cut, from its own start, into leaves of 65,536 elements and a leaf into rows of 256.
Squares are fp64. A row is one reduction, a leaf one reduction of its rows, and leaves are added in order. The cuts do
not depend on torch's threads, on tiles, on the number of owners, or on when gradients arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rayzero.kernels.native import NativeKernel, NativeSquareSum, Range
from rayzero.kernels.rank_sum import RankSum
from rayzero.protocol.messages import Clamp
from rayzero.protocol.scattered import Gradient

ROW = 256  # elements
LEAF = ROW * ROW  # elements
_TILE = 8 * LEAF  # elements squared at once; any multiple of LEAF gives the same bits


class Squares(Protocol):
    """Sums squares. One instance belongs to one thread."""

    def parts(
        self,
        gradients: Sequence[Gradient],
        ranks: Sequence[int],
        ranges: Sequence[Range],
        clamp: Clamp | None = None,
        *,
        alone: bool = False,
        sums: Tensor | None = None,
    ) -> list[float]:
        """For each ``[start, stop)`` of ``ranges``: add ``gradients[r]`` (1D, the shard's elements) over ``ranks`` (not
        empty), apply ``clamp`` as the update does if it is given, and sum the squares in fp64. Without a clamp the
        result is inf or NaN if a summed gradient is. ``alone``: nobody waits for it, so it should take little
        processor time rather than end soon; the bits are the same. ``sums``: where the sums over ranks, before the
        clamp, are written in the same pass: 1D fp32, the shard's elements; may be one of several gradients itself."""
        ...


def choose_squares(kernel: str) -> Squares:
    """The implementation that goes with an update kernel: C for the C kernel. The two add in different orders and give
    different bits."""
    return NativeSquareSum() if kernel == NativeKernel.name else SquareSum()


class SquareSum:
    """Sums squares of gradients added over ranks, in its own scratch memory: one instance per thread."""

    def __init__(self, tile: int = _TILE) -> None:
        """``tile``: elements per pass, a multiple of ``LEAF``."""
        assert tile % LEAF == 0, tile
        self._tile = tile
        self._ranks = RankSum(tile)
        self._squares = torch.zeros(tile, dtype=torch.float64, device="cpu")
        self._rows = torch.zeros(tile // ROW, dtype=torch.float64, device="cpu")
        self._leaves = torch.zeros(tile // LEAF, dtype=torch.float64, device="cpu")

    @torch.no_grad()
    def parts(
        self,
        gradients: Sequence[Gradient],
        ranks: Sequence[int],
        ranges: Sequence[Range],
        clamp: Clamp | None = None,
        *,
        alone: bool = False,
        sums: Tensor | None = None,
    ) -> list[float]:
        """See ``Squares.parts``. ``alone`` makes no difference here: torch has one number of threads for all calls."""
        return [self._part(gradients, ranks, start, stop, clamp, sums) for start, stop in ranges]

    def _part(
        self,
        gradients: Sequence[Gradient],
        ranks: Sequence[int],
        start: int,
        stop: int,
        clamp: Clamp | None,
        sums: Tensor | None,
    ) -> float:
        total = 0.0
        for at in range(start, stop, self._tile):
            end = min(at + self._tile, stop)
            values = self._ranks.sum(gradients, ranks, at, end)
            if sums is not None:
                sums[at:end].copy_(values)
            for leaf in self._leaf_sums(values if clamp is None else _clamped(values, clamp)):
                total += leaf
        return total

    def _leaf_sums(self, values: Tensor) -> list[float]:
        count = values.numel()
        rows, leaves = -(-count // ROW), -(-count // LEAF)
        self._squares[:count].copy_(values)
        self._squares[count : rows * ROW].zero_()
        squares = self._squares[: rows * ROW]
        torch.mul(squares, squares, out=squares)
        torch.sum(squares.view(rows, ROW), dim=1, out=self._rows[:rows])
        self._rows[rows : leaves * ROW].zero_()
        torch.sum(self._rows[: leaves * ROW].view(leaves, ROW), dim=1, out=self._leaves[:leaves])
        return [float(leaf) for leaf in self._leaves[:leaves].tolist()]


def _clamped(values: Tensor, clamp: Clamp) -> Tensor:
    return values.mul(clamp.scale).clamp_(-clamp.limit, clamp.limit)
