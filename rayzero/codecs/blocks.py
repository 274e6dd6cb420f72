"""Floats as small integers with a scale for each block of 256 neighbours.

Blocks are stored one after the other, each with its scales in front: the encoding of whole blocks is a piece of the
tensor's encoding. The last block is filled up with zeros. A block with inf or nan comes back as nan throughout, so that
a run that diverged cannot hide it."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from rayzero.codecs.codec import FLOATS32
from rayzero.errors import StoreError
from rayzero.kernels.native import NativeBlocks, load

BLOCK = 256  # values that share a scale
_GROUPS = 8  # of a block, with a scale of 8 bits each, in 4 bits
_SCALE = 4  # bytes of a float32


class _Blocks(ABC):
    """What both have: whole blocks of values on one side, bytes in rows on the other."""

    lossy = mixes = True
    name: str
    _row: int  # bytes of an encoded block
    _bits: int  # of a code

    def encode(self, values: Tensor) -> Tensor:
        """One row a block: its scales, then its codes."""
        rows = torch.empty(self.most_bytes(values.numel(), values.dtype), dtype=torch.uint8, device=values.device)
        native = _native(self._bits) if values.is_cpu else None
        if native is not None:
            native.encode(values, rows)
        elif values.numel():
            self._encode(_padded(values), rows.view(-1, self._row))
        return rows

    def decode(self, encoded: Tensor, values: Tensor) -> None:
        """Codes times scales, rounded to the values' dtype. Raises StoreError for a wrong number of bytes."""
        if encoded.numel() != self.most_bytes(values.numel(), values.dtype):
            raise StoreError(f"{encoded.numel():,} bytes are no {self.name} encoding of {values.numel():,} values")
        native = _native(self._bits) if values.is_cpu else None
        if native is not None:
            native.decode(encoded, values)
        elif values.numel():
            values.copy_(self._decode(encoded.view(-1, self._row)).reshape(-1)[: values.numel()])

    @abstractmethod
    def _encode(self, blocks: Tensor, rows: Tensor) -> None:
        """The same in torch, for devices and where there is no compiler. ``blocks``: fp32."""

    @abstractmethod
    def _decode(self, rows: Tensor) -> Tensor:
        """Blocks in fp32."""

    def takes(self, dtype: torch.dtype) -> bool:
        """float16, bfloat16 and float32."""
        return dtype in FLOATS32

    def most_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The rows of all blocks, the last one whole."""
        return -(-numel // BLOCK) * self._row


class Int8(_Blocks):
    """1 byte a value, 4 bytes a block (1.016 bytes a value).

    A block's scale is its largest magnitude m / 127; a value is the nearest multiple of it. Error: at most m / 254 and
    the rounding to the values' dtype. The rule is the symmetric one of Dettmers et al. (LLM.int8(), 2022), by block."""

    name = "int8"
    _bits = 8
    _row = _SCALE + BLOCK  # float32 scale, 256 x int8

    def _encode(self, blocks: Tensor, rows: Tensor) -> None:
        scale = _largest(blocks).unsqueeze(1) / 127.0
        codes = (blocks / scale).nan_to_num_(nan=0.0).round_().clamp_(-127, 127).to(torch.int8)
        rows[:, :_SCALE] = scale.view(torch.uint8)
        rows[:, _SCALE:] = codes.view(torch.uint8)

    def _decode(self, rows: Tensor) -> Tensor:
        scale = rows[:, :_SCALE].contiguous().view(torch.float32)
        return rows[:, _SCALE:].view(torch.int8).float() * scale


class FourBits(_Blocks):
    """4 bits a value and two levels of scales: 140 bytes a block (0.547 bytes a value).

    A block has a float32 unit, its largest magnitude m / 1,785; each group of 32 values has a scale of 8 bits times the
    unit, just large enough that 7 times it reaches the group's largest magnitude g. A value is the nearest of -7 to 7
    times its group's scale. Error: at most (g + m / 255) / 14 and the rounding to the values' dtype. Scales of scales:
    QLoRA's double quantization (Dettmers et al., 2023)."""

    name = "quantization"
    _bits = 4
    _row = _SCALE + _GROUPS + BLOCK // 2  # float32 unit, 8 x uint8 scales, then codes: even values in the low halves

    def _encode(self, blocks: Tensor, rows: Tensor) -> None:
        groups = blocks.view(-1, _GROUPS, BLOCK // _GROUPS)
        largest = _largest(groups)
        most = _largest(largest).unsqueeze(1)
        unit = most / 1785.0
        scales = (largest / most * 255.0).ceil_().nan_to_num_(nan=0.0).clamp_(max=255.0)
        step = (scales * unit).unsqueeze(2)
        codes = (groups / step).nan_to_num_(nan=0.0).round_().clamp_(-7, 7).to(torch.int8).view(-1, BLOCK // 2, 2)
        pairs = (codes[:, :, 0] & 15) | (codes[:, :, 1] << 4)
        rows[:, :_SCALE] = unit.view(torch.uint8)
        rows[:, _SCALE : _SCALE + _GROUPS] = scales.to(torch.uint8)
        rows[:, _SCALE + _GROUPS :] = pairs.view(torch.uint8)

    def _decode(self, rows: Tensor) -> Tensor:
        unit = rows[:, :_SCALE].contiguous().view(torch.float32)
        step = rows[:, _SCALE : _SCALE + _GROUPS].float() * unit
        pairs = rows[:, _SCALE + _GROUPS :].contiguous().view(torch.int8)
        codes = torch.stack([(pairs << 4) >> 4, pairs >> 4], dim=2).float()  # shifts keep the sign
        return codes.view(-1, _GROUPS, BLOCK // _GROUPS) * step.unsqueeze(2)


@functools.cache
def _native(bits: int) -> NativeBlocks | None:
    library = load()
    return None if isinstance(library, str) else NativeBlocks(library, bits)


def _padded(values: Tensor) -> Tensor:
    """float32, a row a block."""
    missing = -values.numel() % BLOCK
    wide = values.float()
    return (torch.constant_pad_nd(wide, (0, missing)) if missing else wide).view(-1, BLOCK)


def _largest(values: Tensor) -> Tensor:
    """Largest magnitudes along the last dimension; every nan is the same one."""
    found = values.abs().amax(dim=-1)
    return found.where(~found.isnan(), torch.nan)
