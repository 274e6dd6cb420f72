"""Masters of bf16 parameters in 2 bytes: what rounding left out of the parameter, and where that goes.

A parameter is its master rounded to nearest even; [Note: split masters] in native/adam.c says how both make the master
again, bit by bit. Only the native kernel updates it so. (Source of remainders in place of masters: Transformer Engine's
FusedAdam, ``store_param_remainders``; it publishes another rounding, so that no sign is needed.)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rayzero.kernels.moments import PlainMoment

_HALF_WAY = 0x8000  # the only remainder beyond int16


@dataclass(frozen=True, slots=True, eq=False)
class SplitMaster:
    """A shard's fp32 masters, split into its published parameters and 16 bits more. Each tensor is 1D."""

    remainders: Tensor  # int16
    params: Tensor  # bf16: what is published
    squares: Tensor  # fp32: exp_avg_sq, whose signs say which remainder is 0x8000

    def read(self, start: int, stop: int) -> Tensor:
        """A copy of elements start..stop as fp32, 1D."""
        bits = self.params[start:stop].view(torch.int16).int() << 16
        bits += self.remainders[start:stop]
        bits += self.squares[start:stop].signbit().int() << 16
        return bits.view(torch.float32)

    def write(self, start: int, stop: int, values: Tensor) -> None:
        """Replace elements start..stop by ``values`` (1D fp32), and round what is published."""
        params, squares = self.params[start:stop], self.squares[start:stop]
        params.copy_(values)
        rest = values.view(torch.int32) - (params.view(torch.int16).int() << 16)
        self.remainders[start:stop].copy_(rest)
        squares.abs_()
        squares.copy_(torch.where(rest == _HALF_WAY, -squares, squares))


@dataclass(frozen=True, slots=True, eq=False)
class SignedSquares(PlainMoment):
    """exp_avg_sq of a shard with split masters, to which its signs belong."""

    coded: ClassVar[bool] = True

    def read(self, start: int, stop: int) -> Tensor:
        """A copy of elements start..stop, 1D fp32, without the masters' signs."""
        return self.values[start:stop].abs()

    def write(self, start: int, stop: int, values: Tensor) -> None:
        """Replace elements start..stop by ``values`` (1D fp32); masters stay what they are."""
        mine = self.values[start:stop]
        mine.copy_(torch.copysign(values, mine))
