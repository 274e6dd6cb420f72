"""Gradients that stay where autograd has left them: a tensor a parameter, instead of one tensor a unit.

[Note: scattered gradients] Owners in a rank's own process read them there. Nothing is copied, and they take memory only
until their update, as plain PyTorch's do until ``zero_grad``: owners hold them, the rank does not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from rayzero.layout.model_layout import SlotSlice, UnitLayout


class ScatteredUnit:
    """One push's gradients of a unit.

    Knows parameters' tensors; not shards' owners, or how long it is needed."""

    def __init__(self, unit: UnitLayout, grads: Sequence[Tensor | None]) -> None:
        """``grads``: by slot, contiguous, the unit's dtype, host memory; None: no gradient. Nobody writes to them any
        more. The unit has no padding."""
        self.dtype = unit.dtype
        self.flats = [None if grad is None else grad.detach().flatten() for grad in grads]  # views

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(flat.nbytes for flat in self.flats if flat is not None)

    def shard(self, slices: Sequence[SlotSlice]) -> ScatteredShard:
        """The part that lies in a shard of these slices."""
        return ScatteredShard(self, slices)

    def copy_to(self, memory: Tensor, unit: UnitLayout) -> None:
        """Fill the parameters' ranges of ``memory`` (1D, unit.numel elements); absent ones keep their bytes."""
        for slot, flat in zip(unit.slots, self.flats, strict=True):
            if flat is not None:
                memory[slot.start : slot.stop].copy_(flat)


class ScatteredShard:
    """One rank's gradients of a shard: read as a 1D tensor of the shard's elements, but within one parameter at a
    time."""

    def __init__(self, unit: ScatteredUnit, slices: Sequence[SlotSlice]) -> None:
        self._unit = unit  # keeps the tensors
        self._slices = [part for part in slices if part.numel]
        self._starts = [part.start for part in self._slices]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every element."""
        return self._unit.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def __getitem__(self, elements: slice) -> Tensor:
        """The elements ``[start, stop)``, a view. They lie in one parameter that has a gradient."""
        part = self._slices[bisect_right(self._starts, elements.start) - 1]
        flat = self._unit.flats[part.slot]
        assert flat is not None, part
        assert elements.stop <= part.stop, (elements, part)
        first = part.param_start - part.start
        return flat[first + elements.start : first + elements.stop]


Gradient = Tensor | ScatteredShard  # of one rank and shard
