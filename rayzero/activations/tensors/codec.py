"""Writes bytes into a host buffer, as they are or rounded.

* none: keeps every dtype exactly.
* bf16: shrinks float32 and float64 to 1/2 and 1/4 of their bytes. The error of a normal value x is at most
  2**-8 * abs(x) (rounded to nearest even); above 3.4e38 it becomes inf.
* int8: shrinks float16, bfloat16 and float32 to one byte a value and 4 bytes a block of 256 values. The error is at
  most m / 254 plus the dtype's own rounding, where m is the largest absolute value in the block.

All other dtypes travel as they are. An int8 block with an inf or nan comes back as nan throughout, so that the error
is not hidden."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

BLOCK = 256  # values that share one int8 scale


class Codec(Protocol):
    """Turns device bytes into host bytes and back. All tensors are 1D uint8, and those of one call on one device."""

    def encoded_bytes(self, nbytes: int, dtype: torch.dtype) -> int:
        """Host bytes for ``nbytes`` device bytes of ``dtype``."""
        ...

    def encode(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """The host form of ``source``, whose values have ``dtype``; may be ``source`` itself."""
        ...

    def decode(self, encoded: Tensor, dtype: torch.dtype, target: Tensor) -> None:
        """Write the values in ``encoded`` into ``target``, as ``dtype``."""
        ...


class Raw:
    """Leaves bytes as they are."""

    def encoded_bytes(self, nbytes: int, dtype: torch.dtype) -> int:
        """``nbytes``."""
        return nbytes

    def encode(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """``source`` itself: nothing is copied."""
        return source

    def decode(self, encoded: Tensor, dtype: torch.dtype, target: Tensor) -> None:
        """One copy, which does not block if ``encoded`` is page-locked."""
        target.copy_(encoded, non_blocking=True)


class Bf16:
    """Rounds float32 and float64 to bfloat16."""

    def encoded_bytes(self, nbytes: int, dtype: torch.dtype) -> int:
        """2 bytes a value."""
        return nbytes // dtype.itemsize * 2

    def encode(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounds to nearest even."""
        return source.view(dtype).to(torch.bfloat16).view(torch.uint8)

    def decode(self, encoded: Tensor, dtype: torch.dtype, target: Tensor) -> None:
        """Widens bfloat16, which is exact."""
        target.view(dtype).copy_(encoded.view(torch.bfloat16))


class Int8:
    """Rounds floats to int8 with one float32 scale per block: first all values, padded to whole blocks, then all
    scales."""

    def encoded_bytes(self, nbytes: int, dtype: torch.dtype) -> int:
        """1 byte a value and 4 bytes a block; the values are padded to whole blocks."""
        blocks = -(-(nbytes // dtype.itemsize) // BLOCK)
        return blocks * (BLOCK + 4)

    def encode(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounds symmetrically: scale = largest absolute value / 127."""
        values = source.view(dtype).float()
        blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
        scale = blocks.abs().amax(dim=1, keepdim=True) / 127.0
        ratio = (blocks / scale).round_().clamp_(-127, 127)
        quantised = ratio.nan_to_num_(nan=0.0).to(torch.int8)
        return torch.cat([quantised.view(torch.uint8).flatten(), scale.flatten().view(torch.uint8)])

    def decode(self, encoded: Tensor, dtype: torch.dtype, target: Tensor) -> None:
        """Multiplies each value by its block's scale."""
        blocks = encoded.numel() // (BLOCK + 4)
        quantised = encoded[: blocks * BLOCK].view(torch.int8).view(blocks, BLOCK)
        scale = encoded[blocks * BLOCK :].view(torch.float32).view(blocks, 1)
        values = target.view(dtype)
        values.copy_((quantised.float() * scale).flatten()[: values.numel()])


_RAW = Raw()
_ROUNDED: dict[str, tuple[Codec, frozenset[torch.dtype]]] = {
    "none": (_RAW, frozenset()),
    "bf16": (Bf16(), frozenset({torch.float32, torch.float64})),
    "int8": (Int8(), frozenset({torch.float16, torch.bfloat16, torch.float32})),
}


def codec_for(name: str, dtype: torch.dtype) -> Codec:
    """The codec for values of ``dtype`` under the setting ``name``."""
    codec, dtypes = _ROUNDED[name]
    return codec if dtype in dtypes else _RAW
