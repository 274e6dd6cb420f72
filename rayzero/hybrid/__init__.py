"""A torch optimizer that updates some or all of its parameters in host memory while the device computes."""

from __future__ import annotations

from rayzero.hybrid.optimizer import HybridDeviceOptimizer
from rayzero.hybrid.placement import Placement

__all__ = ["HybridDeviceOptimizer", "Placement"]
