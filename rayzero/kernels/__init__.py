"""Update kernels: several implementations of Adam over tiles, the choice among them, and support for other torch
optimizer classes."""

from __future__ import annotations

import functools
import logging

from rayzero.errors import ConfigError
from rayzero.kernels import native
from rayzero.kernels.kernel import (
    ADAMS,
    AdamMemory,
    AdamOptions,
    Kernel,
    Segment,
    adam_states,
    check_moments,
    segments_of,
)
from rayzero.kernels.moments import CODED
from rayzero.kernels.native import NativeAdder, NativeKernel, NativeSquareSum
from rayzero.kernels.rank_sum import RankSum, SquareSum
from rayzero.kernels.torch_kernel import TorchKernel

__all__ = [
    "ADAMS",
    "KERNELS",
    "AdamMemory",
    "AdamOptions",
    "Kernel",
    "Segment",
    "Squares",
    "adam_states",
    "check_moments",
    "choose_adder",
    "choose_kernel",
    "choose_squares",
    "segments_of",
    "splits_masters",
]

KERNELS = ("auto", "native", "torch")

Squares = NativeSquareSum | SquareSum

_TILE = 1 << 15  # elements that torch adds at once: 128 KiB of fp32, so that they stay in the core's cache

_log = logging.getLogger(__name__)


def choose_kernel(name: str) -> Kernel:
    """Create a kernel by name, for use by one thread. "auto" chooses the fastest available one; its ``name`` says
    which. Raises ConfigError for an unknown name, UnsupportedError if "native" was not built."""
    if name == "auto":
        name = _fastest()
    for kind in (NativeKernel, TorchKernel):
        if name == kind.name:
            return kind()
    raise ConfigError(f"kernel is {name!r} but must be one of {', '.join(KERNELS)}")


def splits_masters(kernel: str, moments: str) -> bool:
    """Whether the kernel that this name chooses here keeps masters of bf16 parameters split (split_master.py).
    ``moments``: how they are kept."""
    chosen = kernel == NativeKernel.name or (kernel == "auto" and native.why_not() is None)
    return chosen and moments not in CODED


def choose_adder() -> NativeAdder | RankSum:
    """The fastest way here to add gradients of ranks, for use by one thread. Bits are the same."""
    return NativeAdder() if native.why_not() is None else RankSum(_TILE)


def choose_squares(kernel: str) -> Squares:
    """The implementation that goes with an update kernel: C for the C kernel. The two add in different orders and give
    different bits."""
    return NativeSquareSum() if kernel == NativeKernel.name else SquareSum()


@functools.cache  # so that the reason is logged once
def _fastest() -> str:
    reason = native.why_not()
    if reason is None:
        return NativeKernel.name
    _log.warning("using the torch kernel for updates instead of the native one: %s", reason)
    return TorchKernel.name
