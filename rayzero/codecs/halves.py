"""32-bit and 64-bit floats rounded to 16 bits, to the nearest, ties to even."""

from __future__ import annotations

import torch
from torch import Tensor

_WIDE = frozenset({torch.float32, torch.float64})


class Halves:
    """2 bytes a value.

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
