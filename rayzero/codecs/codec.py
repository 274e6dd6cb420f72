"""The codec protocol: how values are stored in fewer bytes than they have. The simplest codecs: values as they are, and
wide floats rounded to 16 bits."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

FLOATS16 = frozenset({torch.float16, torch.bfloat16})
FLOATS32 = FLOATS16 | {torch.float32}
_WIDE = frozenset({torch.float32, torch.float64})


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


class Halves:
    """32-bit and 64-bit floats rounded to 16 bits, to the nearest, ties to even: 2 bytes a value.

    ``fp16``: relative error at most 2**-11 for magnitudes from 2**-14 on, absolute error 2**-25 below; from 65,520 on
    a value becomes inf. ``bf16``: 2**-8 from 2**-126 on, 2**-134 below; from 3.396e38 on inf. inf and nan stay."""

    lossy, mixes = True, False

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def takes(self, dtype: torch.dtype) -> bool:
        """float32 and float64."""
        return dtype in _WIDE

    def most_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """2 bytes a value."""
        return 2 * numel

    def encode(self, values: Tensor) -> Tensor:
        """Rounded to nearest even; float64 by way of float32, as torch converts."""
        return values.to(self._dtype).view(torch.uint8)

    def decode(self, encoded: Tensor, values: Tensor) -> None:
        """Exact from the 16 bits."""
        values.copy_(encoded.view(self._dtype))

    def error_bound(self, values: Tensor) -> Tensor:
        """Half the distance to the next 16-bit float; infinite from half a step above the largest on."""
        found = torch.finfo(self._dtype)
        size = values.double().abs()
        twice = 1 + 2.0**-12 if values.dtype == torch.float64 else 1.0  # rounded twice
        bound = (size * (found.eps / 2)).clamp_min(found.tiny * found.eps / 2) * twice
        return bound.where(size < found.max * (1 + found.eps / 4), torch.inf).where(size.isfinite(), 0.0)
