"""A torch optimizer whose parameters, a part or all, are updated in host memory, beside the device's work."""

from __future__ import annotations

from rayzero.hybrid.optimizer import HybridDeviceOptimizer
from rayzero.hybrid.placement import Placement

__all__ = ["HybridDeviceOptimizer", "Placement"]
