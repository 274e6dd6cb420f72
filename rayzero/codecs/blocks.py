"""Floats as small integers with a scale for each block of 256 neighbours.

Blocks are stored one after the other, each with its scales in front: the encoding of whole blocks is a piece of the
tensor's encoding. The last block is filled up with zeros. A block with inf or nan comes back as nan throughout, so that
a run that diverged cannot hide it."""

from __future__ import annotations

import torch
from torch import Tensor

from rayzero.codecs.base import FLOATS32

BLOCK = 256  # values that share a scale
_GROUPS = 8  # of a block, with a scale of 8 bits each, in 4 bits
_SLACK = 1 + 2.0**-18  # for the roundings of scales in fp32
_SCALE = 4  # bytes of a float32


class _Blocks:
    """What both have: whole blocks of values on one side, bytes in rows on the other."""

    lossy = True
    _row: int  # bytes of an encoded block

    def takes(self, dtype: torch.dtype) -> bool:
        """float16, bfloat16 and float32."""
        return dtype in FLOATS32

    def most_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The rows of all blocks, the last one whole."""
        return -(-numel // BLOCK) * self._row

    def _rows(self, encoded: Tensor, values: Tensor) -> Tensor:
        return encoded.view(_blocks_of(values), self._row)


class Int8(_Blocks):
    """1 byte a value, 4 bytes a block (1.016 bytes a value).

    A block's scale is its largest magnitude m / 127; a value is the nearest multiple of it. Error: at most m / 254 and
    the rounding to the values' dtype. The rule is the symmetric one of Dettmers et al. (LLM.int8(), 2022), by block."""

    name = "int8"
    _row = _SCALE + BLOCK

    def encode(self, values: Tensor) -> Tensor:
        """One row a block: float32 scale, 256 x int8."""
        if not values.numel():
            return values.view(torch.uint8)
        blocks = _padded(values)
        scale = blocks.abs().amax(dim=1, keepdim=True) / 127.0
        codes = (blocks / scale).round_().clamp_(-127, 127).nan_to_num_(nan=0.0).to(torch.int8)
        return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], dim=1).flatten()

    def decode(self, encoded: Tensor, values: Tensor) -> None:
        """Codes times scale, rounded to the values' dtype."""
        rows = self._rows(encoded, values)
        scale = rows[:, :_SCALE].contiguous().view(torch.float32)
        _put(rows[:, _SCALE:].view(torch.int8).float() * scale, values)

    def error_bound(self, values: Tensor) -> Tensor:
        """m / 254 for the block's largest magnitude m, and half a step of the dtype."""
        blocks = _padded(values).double()
        most = blocks.abs().amax(dim=1, keepdim=True)
        return _with_rounding(most / 254 * _SLACK + 2.0**-142, most, values)


class FourBits(_Blocks):
    """4 bits a value and two levels of scales: 140 bytes a block (0.547 bytes a value).

    A block has a float32 unit, its largest magnitude m / 1,785; each group of 32 values has a scale of 8 bits times the
    unit, just large enough that 7 times it reaches the group's largest magnitude g. A value is the nearest of -7 to 7
    times its group's scale. Error: at most (g + m / 255) / 14 and the rounding to the values' dtype. Scales of scales:
    QLoRA's double quantization (Dettmers et al., 2023)."""

    name = "quantization"
    _row = _SCALE + _GROUPS + BLOCK // 2

    def encode(self, values: Tensor) -> Tensor:
        """One row a block: float32 unit, 8 x uint8 scales, 128 bytes with an even-numbered value in the low half."""
        if not values.numel():
            return values.view(torch.uint8)
        groups = _padded(values).view(_blocks_of(values), _GROUPS, BLOCK // _GROUPS)
        largest = groups.abs().amax(dim=2)
        most = largest.amax(dim=1, keepdim=True)
        unit = most / 1785.0
        scales = (largest / most * 255.0).ceil_().nan_to_num_(nan=0.0).clamp_(max=255.0)
        step = (scales * unit).unsqueeze(2)
        codes = (groups / step).round_().clamp_(-7, 7).nan_to_num_(nan=0.0).to(torch.int8)
        codes = codes.view(len(groups), BLOCK // 2, 2)
        pairs = (codes[:, :, 0] & 15) | (codes[:, :, 1] << 4)
        return torch.cat([unit.view(torch.uint8), scales.to(torch.uint8), pairs.view(torch.uint8)], dim=1).flatten()

    def decode(self, encoded: Tensor, values: Tensor) -> None:
        """Codes times scale times unit, rounded to the values' dtype."""
        rows = self._rows(encoded, values)
        unit = rows[:, :_SCALE].contiguous().view(torch.float32)
        step = rows[:, _SCALE : _SCALE + _GROUPS].float() * unit
        pairs = rows[:, _SCALE + _GROUPS :].contiguous().view(torch.int8)
        codes = torch.stack([(pairs << 4) >> 4, pairs >> 4], dim=2).float()  # shifts keep the sign
        _put(codes.view(len(rows), _GROUPS, BLOCK // _GROUPS) * step.unsqueeze(2), values)

    def error_bound(self, values: Tensor) -> Tensor:
        """(g + m / 255) / 14 for the largest magnitudes g of the group and m of the block, and half a step of the
        dtype."""
        groups = _padded(values).double().view(_blocks_of(values), _GROUPS, BLOCK // _GROUPS)
        largest = groups.abs().amax(dim=2, keepdim=True)
        most = largest.amax(dim=1, keepdim=True)
        bound = (largest + most / 255) / 14 * _SLACK + 2.0**-137
        return _with_rounding(bound.expand_as(groups).reshape(len(groups), BLOCK), most[:, 0], values)


def _blocks_of(values: Tensor) -> int:
    return -(-values.numel() // BLOCK)


def _padded(values: Tensor) -> Tensor:
    """float32, a row a block."""
    missing = -values.numel() % BLOCK
    wide = values.float()
    return (torch.constant_pad_nd(wide, (0, missing)) if missing else wide).view(_blocks_of(values), BLOCK)


def _put(blocks: Tensor, values: Tensor) -> None:
    values.copy_(blocks.reshape(-1)[: values.numel()])


def _with_rounding(bound: Tensor, most: Tensor, values: Tensor) -> Tensor:
    """``bound`` (a row a block, or one a block) and half a step of the dtype at the decoded value; nan where the
    block's largest magnitude ``most`` is inf or nan."""
    bound = bound.where(most.isfinite(), torch.nan).expand(len(most), BLOCK).reshape(-1)[: values.numel()]
    found = torch.finfo(values.dtype)
    return bound + ((values.double().abs() + bound) * (found.eps / 2)).clamp_min(found.tiny * found.eps / 2)
