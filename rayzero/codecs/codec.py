"""The codec protocol: how values are stored in fewer bytes than they have."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

FLOATS16 = frozenset({torch.float16, torch.bfloat16})
FLOATS32 = FLOATS16 | {torch.float32}


class Codec(Protocol):
    """Encodes the values of one tensor as bytes and back.

    All tensors are 1D, contiguous and on one device; encoded ones are uint8. The bytes depend on the values alone: not
    on threads, the processor's vectors or the device. A codec has no state and may be used by several threads."""

    name: str
    lossy: bool  # whether a decoded value may differ from the one encoded
    mixes: bool  # whether it may differ because of its neighbours: do not encode what is not initialised beside it

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether it encodes values of ``dtype``; others are stored as they are (``codec_for``)."""
        ...

    def most_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The most bytes that ``numel`` values can take; exactly that many unless the codec is lossless."""
        ...

    def encode(self, values: Tensor) -> Tensor:
        """The stored form of ``values``, on their device; may share their memory."""
        ...

    def decode(self, encoded: Tensor, values: Tensor) -> None:
        """Fill ``values`` (the shape and dtype that were encoded) from ``encoded``.

        Raises StoreError where the bytes cannot be those of so many values."""
        ...

    def error_bound(self, values: Tensor) -> Tensor:
        """For each of ``values``, by how much its decoded value may differ: float64, on their device.

        Infinite where the value may come back as inf, and nan where it comes back as nan."""
        ...


class Raw:
    """Values as they are."""

    name = "none"
    lossy = mixes = False

    def takes(self, dtype: torch.dtype) -> bool:
        """Every dtype."""
        return True

    def most_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The values' own bytes."""
        return numel * dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        """The memory of ``values`` itself: nothing is copied."""
        return values.view(torch.uint8)

    def decode(self, encoded: Tensor, values: Tensor) -> None:
        """One copy; from page-locked memory the caller does not wait for it."""
        values.view(torch.uint8).copy_(encoded, non_blocking=True)

    def error_bound(self, values: Tensor) -> Tensor:
        """Zero."""
        return torch.zeros_like(values, dtype=torch.float64)


RAW = Raw()
