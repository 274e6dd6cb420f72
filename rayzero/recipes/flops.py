"""A rank's speed in model FLOP/s, from counted operations and measured time; without a count it is not reported."""

from __future__ import annotations

import torch

from rayzero.telemetry.names import MFU_RATIO, MODEL_FLOPS
from rayzero.telemetry.recorder import Recorder

__all__ = ["FlopRate", "peak_flops"]

_HALF = ("bf16", "fp16")
_PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}
"""Device name, as the driver reports it -> FLOP/s of dense 16-bit matrix products, from the maker's data sheet."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """The device's peak in FLOP/s. None if it is not known; then no MFU is reported.

    fp32 has no entry, because the user's matmul precision decides which of two speeds applies."""
    return _PEAKS.get(device_name) if precision in _HALF else None


class FlopRate:
    """Reports a rank's model FLOP/s, and its share of the device's peak if that is known."""

    def __init__(self, recorder: Recorder, step_flops: int | None, device: torch.device, precision: str) -> None:
        """``step_flops``: of one step of this rank; None if they could not be counted, in which case nothing is
        reported."""
        self._recorder = recorder
        self._step_flops = step_flops
        self._peak = peak_flops(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None

    def tell(self, step_seconds: float) -> None:
        """Report a step that took ``step_seconds``, waits included."""
        if not self._step_flops:
            return
        rate = self._step_flops / step_seconds
        self._recorder.set(MODEL_FLOPS, rate)
        if self._peak is not None:
            self._recorder.set(MFU_RATIO, rate / self._peak)
