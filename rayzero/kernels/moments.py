"""Adam's moments in 8 or 16 bits: what an owner keeps between two updates.

Of each block of 64 neighbours the mean and the *root* of the mean square are kept relative to the largest magnitude in
the block, which is their scale, in fp32. The root's range is half as wide as that of the mean square.

* ``bf16``: bfloat16, rounded to nearest even: 2 bytes and 4 / 64 of a scale for each moment.
* ``int8``: floats of 8 bits that count down from 1.0: code c is the float whose upper bits are those of 1.0 less
  (largest code - c); half a step is rounded up. A mean has a sign, 4 bits of exponent and 3 of mantissa, and below
  2**-15.9 of the scale it is zero. A root has 4 bits of each and no zero: an update divides by it, so what is smaller
  than 2**-15.9 of the scale is rounded up to that. 1 byte and 4 / 64 of a scale for each moment: with its master the
  optimizer keeps 6.1 bytes a parameter instead of 12.

A change of one step that is smaller than half a code is lost, as with every code that rounds to nearest; a change of
the whole block is not, since the scale follows it exactly. With beta2 = 0.999 this lets roots follow gradients that
shrink (tests/kernels/test_moments.py). The largest value of a block is kept exactly, so decoding and encoding again
changes no bit, and a checkpoint in fp32 resumes as if nothing had happened. An update uses the moments before they are
encoded.

A mean square beyond fp32 (a gradient above about 1e20) is infinite, as in plain PyTorch, and its weight stands still
from then on: in ``bf16`` that weight alone, in ``int8``, which has no code for infinity, its whole block.

Sources: block-wise quantization of optimizer states with a dynamic (floating) code, Dettmers et al., "8-bit Optimizers
via Block-wise Quantization" (2022; bitsandbytes); torchao's low-bit optimizers keep blocks of 256 in the same way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

BLOCK = 64  # elements that share a scale: no parameter shares a block with another (layout's ALIGN)
_SCALE_BYTES = 4
CODED = {"bf16": torch.bfloat16, "int8": torch.uint8}  # how moments may be kept besides fp32, and the codes' dtype

_ONE = 0x3F800000  # the bits of 1.0
_MEAN_SHIFT, _MEAN_TOP = 20, 127  # bits of a float below a code's last; the code of 1.0
_ROOT_SHIFT, _ROOT_TOP = 19, 255
_LEAST_SCALE = 0x03800000  # the bits of 2**-120: a block without a larger magnitude is zero
_ROOT_LIMIT = 0x5F800000  # the bits of 2**64, above every root of a finite mean square
_SIGN = -(1 << 31)


def moment_bytes(moments: str) -> float:
    """Bytes an element that one moment takes, its share of a scale included."""
    return CODED[moments].itemsize + _SCALE_BYTES / BLOCK if moments in CODED else 4.0


def packed_bytes(moments: str, numel: int) -> int:
    """Bytes of ``numel`` values that begin a block, packed: the scales, then the codes, of whole blocks."""
    blocks = -(-numel // BLOCK)
    return blocks * (_SCALE_BYTES + BLOCK * CODED[moments].itemsize)


def unpack(packed: Tensor, moments: str, start: int, stop: int, *, is_root: bool) -> Tensor:
    """Values ``start`` to ``stop`` of a packed moment (1D uint8): 1D fp32."""
    code = CODED[moments]
    blocks = packed.numel() // (_SCALE_BYTES + BLOCK * code.itemsize)
    scales = packed[: blocks * _SCALE_BYTES].view(torch.float32)
    codes = packed[blocks * _SCALE_BYTES :].view(code)
    first, end = start // BLOCK, -(-stop // BLOCK)
    values = decode(codes[first * BLOCK : end * BLOCK], scales[first:end], is_root=is_root)
    values = values[start - first * BLOCK : stop - first * BLOCK]
    return values.square_() if is_root else values


@dataclass(frozen=True, slots=True, eq=False)
class PlainMoment:
    """A state of a shard in fp32."""

    values: Tensor  # 1D
    coded: ClassVar[bool] = False  # whether ``read`` decodes a copy

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The memory that it takes; the values or codes first."""
        return (self.values,)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.values.nbytes

    def read(self, start: int, stop: int) -> Tensor:
        """Elements start..stop as fp32, 1D: the memory itself or a decoded copy."""
        return self.values[start:stop]

    def write(self, start: int, stop: int, values: Tensor) -> None:
        """Replace elements start..stop by ``values`` (1D fp32)."""
        self.values[start:stop].copy_(values)


@dataclass(frozen=True, slots=True, eq=False)
class CodedMoment:
    """A moment in codes with a scale for each block. Elements that are read or written begin a block."""

    codes: Tensor  # 1D, bfloat16 or uint8
    scales: Tensor  # 1D fp32, at least one for each BLOCK codes
    is_root: bool  # keeps roots of exp_avg_sq, not exp_avg
    coded: ClassVar[bool] = True

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """See ``PlainMoment.tensors``."""
        return self.codes, self.scales

    @property
    def nbytes(self) -> int:
        """See ``PlainMoment.nbytes``."""
        return self.codes.nbytes + self.scales.nbytes

    def read(self, start: int, stop: int) -> Tensor:
        """See ``PlainMoment.read``."""
        values = decode(*self._blocks(start, stop), is_root=self.is_root)
        return (values.square_() if self.is_root else values)[: stop - start]

    def copied(self, start: int, stop: int) -> CodedMoment:
        """A copy on the host of the blocks of elements start..stop, which begins with ``start``."""
        codes, scales = (each.to("cpu", copy=True) for each in self._blocks(start, stop))
        return CodedMoment(codes, scales, self.is_root)

    def packed(self, start: int, stop: int) -> Tensor:
        """Scales and codes of whole blocks from ``start`` on, 1D uint8, for ``unpack``."""
        codes, scales = self._blocks(start, stop)
        return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)]).cpu()

    def write(self, start: int, stop: int, values: Tensor) -> None:
        """See ``PlainMoment.write``. What is left of the last block becomes zero."""
        codes, scales = self._blocks(start, stop)
        whole = torch.constant_pad_nd(values.float(), (0, len(codes) - len(values)))
        encode(whole.sqrt() if self.is_root else whole, codes, scales, is_root=self.is_root)

    def _blocks(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of the whole blocks that have elements start..stop."""
        end = start + -(-(stop - start) // BLOCK) * BLOCK
        return self.codes[start:end], self.scales[start // BLOCK : end // BLOCK]


Moment = PlainMoment | CodedMoment  # a state of a shard, a value for each element, however it is kept


def decode(codes: Tensor, scales: Tensor, *, is_root: bool) -> Tensor:
    """The means, or the roots of mean squares, of whole blocks: 1D fp32, on the codes' device."""
    if codes.dtype == torch.bfloat16:
        relative = codes.float()
    elif is_root:
        relative = ((codes.int() << _ROOT_SHIFT) + (_ONE - (_ROOT_TOP << _ROOT_SHIFT))).view(torch.float32)
    else:
        wide, size = codes.int(), codes.int() & 127
        bits = (size << _MEAN_SHIFT) + (_ONE - (_MEAN_TOP << _MEAN_SHIFT))
        relative = (bits.where(size != 0, 0) | (wide << 24 & _SIGN)).view(torch.float32)
    return (relative.view(-1, BLOCK) * scales.unsqueeze(1)).view(-1)


def encode(values: Tensor, codes: Tensor, scales: Tensor, *, is_root: bool) -> None:
    """Write whole blocks of means, or of roots (1D fp32), as ``codes`` and ``scales``, all on one device."""
    blocks = values.contiguous().view(-1, BLOCK)
    most = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(1)  # magnitudes are ordered as their bits, a NaN above all
    if is_root and codes.dtype == torch.bfloat16:
        most = most.clamp_max(_ROOT_LIMIT)  # an infinite root, or a NaN, is a code of its own
    scales.view(torch.int32).copy_(most.where(most >= _LEAST_SCALE, 0))
    inverse = torch.where(most >= _LEAST_SCALE, 1.0 / scales, 0.0)
    relative = (blocks * inverse.unsqueeze(1)).view(-1)
    if codes.dtype == torch.bfloat16:
        codes.copy_(relative)
        return
    bits = relative.view(torch.int32)
    if is_root:
        codes.copy_(_codes_of(bits, _ROOT_SHIFT, _ROOT_TOP).clamp_min_(1) & 255)
    else:
        size = _codes_of(bits & 0x7FFFFFFF, _MEAN_SHIFT, _MEAN_TOP).clamp_min_(0)
        codes.copy_((size | (bits >> 24 & 128)) & 255)


def _codes_of(bits: Tensor, shift: int, top: int) -> Tensor:
    return (bits + ((1 << (shift - 1)) - (_ONE - (top << shift)))) >> shift
