"""Sums gradients across ranks in fp32: in rank order inside fixed groups of 8 consecutive ranks, then group by group.
Sums squares of these sums, with bits that depend only on the gradients.

[Note: groups of 8] Up to 8 ranks this is plain rank order. The rank's number decides its group, not which ranks are
present. So the first ranks of a group can be added on their host, before they travel, without changing a bit: the
owner goes on from that sum with the others. Later ranks of a group cannot, because fp32 addition is not associative.

[Note: fixed leaves] A slice is cut, from its own start, into leaves of 65,536 elements and a leaf into rows of 256.
Squares are fp64. A row is one reduction, a leaf one reduction of its rows, and leaves are added in order. The cuts do
not depend on torch's threads, on tiles, on the number of owners, or on when gradients arrive.

[Note: over the link] A copy between host and device that changes the dtype converts on the side that it comes from: 16
bits from the host would cross as 32. So what crosses keeps its dtype, and the device converts it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby, takewhile

import torch
from torch import Tensor

from rayzero.protocol.gradient_sum import Gradient, KeptTotal
from rayzero.protocol.messages import Clamp

GROUP = 8  # consecutive ranks
ROW = 256  # elements
LEAF = ROW * ROW  # elements
_SQUARED = 8 * LEAF  # elements squared at once; any multiple of LEAF gives the same bits

Range = tuple[int, int]  # start, stop: elements of a shard


def summed_with(rank: int, here: Collection[int]) -> tuple[int, ...]:
    """The ranks, ascending, that can be added with ``rank`` on a host that has the ranks ``here``: its group's first
    ranks, without a gap. Empty if ``rank`` is none of them, or they are one rank alone. See [Note: groups of 8]."""
    first = rank // GROUP * GROUP
    found = tuple(takewhile(lambda each: each in here, range(first, first + GROUP)))
    return found if len(found) > 1 and rank in found else ()


class RankSum:
    """Sums tiles of several ranks' gradients in its own scratch memory. One per thread."""

    def __init__(self, tile: int, device: torch.device | None = None) -> None:
        """``tile``: the most elements that one call may sum. ``device``: where it sums; None is the host."""
        self._total, self._group, self._wide = (
            torch.zeros(tile, device=device or "cpu", dtype=torch.float32) for _ in range(3)
        )
        self._came: dict[torch.dtype, Tensor] = {}  # for parts from elsewhere. [Note: over the link]

    def sum(self, gradients: Sequence[Gradient], ranks: Sequence[int], start: int, stop: int) -> Tensor:
        """The 1D fp32 sum of ``gradients[r][start:stop]`` over ``ranks`` (ascending, not empty). Gradients are 1D with
        the shard's elements, of any float dtype.

        The result may be the only rank's own memory, so do not write to it. It is valid until the next call."""
        if len(ranks) == 1:
            only = gradients[ranks[0]][start:stop]
            return only if self._ready(only) else self._widen(self._total[: stop - start], only)
        total, group = self._total[: stop - start], self._group[: stop - start]
        for index, (_, members) in enumerate(groupby(ranks, key=lambda rank: rank // GROUP)):
            parts = [gradients[rank][start:stop] for rank in members]
            if index == 0:
                self._sum_group(total, parts)
            else:
                self._sum_group(group, parts)
                total.add_(group)
        return total

    def sum_group(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        """Sum at most ``GROUP`` ranks, in their order, into ``out``. ``parts``: 1D, of any float dtype, not empty.
        ``out``: as many elements, fp32, memory of the caller."""
        for start in range(0, out.numel(), self._wide.numel()):
            stop = min(start + self._wide.numel(), out.numel())
            self._sum_group(out[start:stop], [part[start:stop] for part in parts])

    def add_round(
        self,
        total: Tensor,
        gradients: Sequence[Gradient],
        ranks: Sequence[int],
        ranges: Sequence[tuple[int, int]],
        kept: KeptTotal | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        """Sum ``gradients[r]`` (1D, the shard's elements) over ``ranks`` (ascending, not empty) in the ranges ``[start,
        stop)``, and add that to ``total`` (1D fp32 on the host, the shard's elements). ``fresh``: nothing is there yet.
        ``kept``: takes what the total is before it changes; ranges then ascend, also from call to call."""
        for start, stop in ranges:
            for at in range(start, stop, self._total.numel()):
                end = min(at + self._total.numel(), stop)
                summed, there = self.sum(gradients, ranks, at, end), total[at:end]
                if kept is not None:
                    kept.keep(total, end)
                there.copy_(summed) if fresh else there.add_(summed)

    def owns(self, summed: Tensor) -> bool:
        """Whether ``summed`` is in scratch memory, and so may be written to until the next call."""
        return summed.data_ptr() == self._total.data_ptr()

    def _sum_group(self, out: Tensor, parts: list[Tensor]) -> None:
        self._widen(out, parts[0])
        for part in parts[1:]:
            if not self._ready(part):
                part = self._widen(self._wide[: part.numel()], part)  # add_ of mixed dtypes would allocate
            out.add_(part)

    def _widen(self, out: Tensor, part: Tensor) -> Tensor:
        """Copy a part into ``out``, which is fp32 and where the sum is. Page-locked memory is read until the device has
        come to it."""
        if not self._is_here(part) and part.dtype is not torch.float32:
            if part.dtype not in self._came:
                self._came[part.dtype] = torch.empty_like(self._total, dtype=part.dtype)
            part = self._came[part.dtype][: part.numel()].copy_(part, non_blocking=True)
        return out.copy_(part, non_blocking=True)

    def _ready(self, part: Tensor) -> bool:
        """Whether a part is fp32 and on the device of the sum."""
        return part.dtype is torch.float32 and self._is_here(part)

    def _is_here(self, part: Tensor) -> bool:
        return part.device == self._total.device


class SquareSum:
    """Sums squares of gradients added over ranks, in its own scratch memory: one instance per thread."""

    def __init__(self, tile: int = _SQUARED) -> None:
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
        """For each ``[start, stop)`` of ``ranges``: add ``gradients[r]`` (1D, the shard's elements) over ``ranks`` (not
        empty), apply ``clamp`` as the update does if it is given, and sum the squares in fp64. Without a clamp the
        result is inf or NaN if a summed gradient is. ``alone``: nobody waits for it, so it should take little
        processor time rather than end soon; the bits are the same. ``sums``: where the sums over ranks, before the
        clamp, are written in the same pass: 1D fp32, the shard's elements; may be one of several gradients itself.

        ``alone`` makes no difference here: torch has one number of threads for all calls."""
        found = []
        for start, stop in ranges:
            found.append(0.0)
            for at in range(start, stop, self._tile):
                end = min(at + self._tile, stop)
                values = self._ranks.sum(gradients, ranks, at, end)
                if sums is not None:
                    sums[at:end].copy_(values)
                for leaf in self._leaf_sums(values if clamp is None else _clamped(values, clamp)):
                    found[-1] += leaf
        return found

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
