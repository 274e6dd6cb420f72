"""Adam over tiles: the kernels and their choice; and what any other torch optimizer class does."""

from __future__ import annotations

import functools
import logging

from rayzero.errors import ConfigError
from rayzero.kernels import native
from rayzero.kernels.base import AdamMemory, AdamOptions, Kernel, Segment, segments_of
from rayzero.kernels.native import NativeKernel
from rayzero.kernels.reference import ReferenceKernel
from rayzero.kernels.torch_kernel import TorchKernel

__all__ = ["KERNELS", "AdamMemory", "AdamOptions", "Kernel", "Segment", "choose_kernel", "segments_of"]

KERNELS = ("auto", "native", "torch", "reference")

_log = logging.getLogger(__name__)


def choose_kernel(name: str) -> Kernel:
    """A kernel by name; "auto" takes the fastest there is here. Its ``name`` says which. Each call makes a new
    one, for one thread. Raises ConfigError on an unknown name, UnsupportedError where "native" was not built."""
    if name == "auto":
        name = _fastest()
    if name == NativeKernel.name:
        return NativeKernel()
    if name == TorchKernel.name:
        return TorchKernel()
    if name == ReferenceKernel.name:
        return ReferenceKernel()
    raise ConfigError(f"kernel is {name!r} but must be one of {', '.join(KERNELS)}")


@functools.cache  # so that the reason is said once
def _fastest() -> str:
    reason = native.why_not()
    if reason is None:
        return NativeKernel.name
    _log.warning("the torch kernel computes updates, not the native one: %s", reason)
    return TorchKernel.name
