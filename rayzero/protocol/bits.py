"""Compares tensors bit by bit, to tell whether two ranks wrote the same values."""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from torch import Tensor

_BITS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # of an element -> a dtype that compares bits


def digest_of(values: Tensor) -> str:
    """A digest that is equal for equal bytes. ``values``: any shape and dtype, contiguous, host memory."""
    content: Any = values.detach().reshape(-1).view(torch.uint8).numpy()
    return str(xxhash.xxh3_128_hexdigest(content))


def same_bits(ours: Tensor, theirs: Tensor) -> Tensor:
    """Whether each element has the same bits, as a bool tensor of their shape: NaNs may be equal, 0.0 is not -0.0. Both
    tensors have one shape and one dtype of 1, 2, 4 or 8 bytes."""
    bits = _BITS[ours.itemsize]
    return ours.view(bits) == theirs.view(bits)
