"""Tensors compared bit by bit: what tells whether two ranks wrote the same values."""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # bytes of an element -> a dtype that compares bits


def digest_of(values: Tensor) -> str:
    """Equal for equal bytes. ``values``: host memory, contiguous."""
    content: Any = values.detach().reshape(-1).view(torch.uint8).numpy()
    return str(xxhash.xxh3_128_hexdigest(content))


def same_bits(ours: Tensor, theirs: Tensor) -> Tensor:
    """Per element (of two tensors of one dtype) whether its bits are the same: NaNs may be equal, 0.0 is not -0.0."""
    bits = _BITS[ours.itemsize]
    return ours.view(bits) == theirs.view(bits)
