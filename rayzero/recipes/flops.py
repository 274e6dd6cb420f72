"""How fast a rank computes, in operations of its model. Counted and measured, or not told: nothing is guessed."""

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
"""FLOP/s of dense 16-bit matrix products by the maker's data sheet, by the name that the driver gives the device."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """The most the device can do, in FLOP/s; None where it is not known: no MFU is told then.

    fp32 has none: which of its two speeds applies is for the user's matmul precision to say."""
    return _PEAKS.get(device_name) if precision in _HALF else None


class FlopRate:
    """Tells a rank's model FLOP/s, and the share that is of its device's peak where that is known."""

    def __init__(self, recorder: Recorder, step_flops: int | None, device: torch.device, precision: str) -> None:
        """``step_flops``: of one step of this rank; None where they could not be counted: nothing is told then."""
        self._recorder = recorder
        self._step_flops = step_flops
        self._peak = peak_flops(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None

    def tell(self, step_seconds: float) -> None:
        """A step took so long, waits included."""
        if not self._step_flops:
            return
        rate = self._step_flops / step_seconds
        self._recorder.set(MODEL_FLOPS, rate)
        if self._peak is not None:
            self._recorder.set(MFU_RATIO, rate / self._peak)
