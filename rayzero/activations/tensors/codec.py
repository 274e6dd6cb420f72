"""How bytes are written into a host buffer: as they are, or rounded.

* none: every dtype as it is, exact.
* bf16: float32 and float64 to 1/2 and 1/4 of their bytes; error of a normal value x at most 2**-8 * abs(x) (rounded to
  nearest even); above 3.4e38 it becomes inf.
* int8: float16, bfloat16 and float32 to one byte a value and 4 bytes a block of 256; error at most m / 254 plus the
  dtype's own rounding, where m is the largest abs in the value's block.

All other dtypes travel as they are. A block of int8 with inf or nan comes back as nan throughout: it stays loud."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

BLOCK = 256  # values that share one int8 scale


class Codec(Protocol):
    """Turns device bytes into host bytes and back; all tensors are 1D uint8 on one device."""

    def encoded_bytes(self, nbytes: int, dtype: torch.dtype) -> int:
        """Host bytes for ``nbytes`` device bytes of ``dtype``."""
        ...

    def encode(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """The host form of ``source``; may be ``source`` itself."""
        ...

    def decode(self, encoded: Tensor, dtype: torch.dtype, target: Tensor) -> None:
        """Write into ``target`` what ``encoded`` stands for."""
        ...


class Raw:
    """Bytes as they are."""

    def encoded_bytes(self, nbytes: int, dtype: torch.dtype) -> int:
        """The same."""
        return nbytes

    def encode(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """``source`` itself: nothing is copied."""
        return source

    def decode(self, encoded: Tensor, dtype: torch.dtype, target: Tensor) -> None:
        """One copy, from page-locked memory without waiting for it."""
        target.copy_(encoded, non_blocking=True)


class Bf16:
    """float32 and float64 as bfloat16."""

    def encoded_bytes(self, nbytes: int, dtype: torch.dtype) -> int:
        """2 bytes a value."""
        return nbytes // dtype.itemsize * 2

    def encode(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounded to nearest even."""
        return source.view(dtype).to(torch.bfloat16).view(torch.uint8)

    def decode(self, encoded: Tensor, dtype: torch.dtype, target: Tensor) -> None:
        """Exact from bfloat16."""
        target.view(dtype).copy_(encoded.view(torch.bfloat16))


class Int8:
    """Floats as int8 with one float32 scale a block: first all values, padded to whole blocks' scales after them."""

    def encoded_bytes(self, nbytes: int, dtype: torch.dtype) -> int:
        """1 byte a value, 4 bytes a block; the values are padded to whole blocks."""
        blocks = -(-(nbytes // dtype.itemsize) // BLOCK)
        return blocks * (BLOCK + 4)

    def encode(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """Symmetric: scale = largest abs / 127."""
        values = source.view(dtype).float()
        blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
        scale = blocks.abs().amax(dim=1, keepdim=True) / 127.0
        ratio = (blocks / scale).round_().clamp_(-127, 127)
        quantised = ratio.nan_to_num_(nan=0.0).to(torch.int8)
        return torch.cat([quantised.view(torch.uint8).flatten(), scale.flatten().view(torch.uint8)])

    def decode(self, encoded: Tensor, dtype: torch.dtype, target: Tensor) -> None:
        """values * scale."""
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
    """The codec that setting ``name`` means for values of ``dtype``."""
    codec, dtypes = _ROUNDED[name]
    return codec if dtype in dtypes else _RAW
