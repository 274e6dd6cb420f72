"""Activation offload: saved-for-backward tensors wait in host memory. Importing this has no effect."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayzero.activations.cost import Choice, CostPlan, GroupCost, Link
    from rayzero.activations.host_pool import HostPool, PoolStatus
    from rayzero.activations.ledger import GroupTotals, RankSummary
    from rayzero.activations.offload import ActivationOffload, GroupScope
    from rayzero.activations.policy import OffloadPolicy
    from rayzero.lanes import CudaLane, ThreadLane

_HOME = {
    "ActivationOffload": "rayzero.activations.offload",
    "Choice": "rayzero.activations.cost",
    "CostPlan": "rayzero.activations.cost",
    "CudaLane": "rayzero.lanes",
    "GroupCost": "rayzero.activations.cost",
    "GroupScope": "rayzero.activations.offload",
    "GroupTotals": "rayzero.activations.ledger",
    "HostPool": "rayzero.activations.host_pool",
    "Link": "rayzero.activations.cost",
    "OffloadPolicy": "rayzero.activations.policy",
    "PoolStatus": "rayzero.activations.host_pool",
    "RankSummary": "rayzero.activations.ledger",
    "ThreadLane": "rayzero.lanes",
}

__all__ = [
    "ActivationOffload",
    "Choice",
    "CostPlan",
    "CudaLane",
    "GroupCost",
    "GroupScope",
    "GroupTotals",
    "HostPool",
    "Link",
    "OffloadPolicy",
    "PoolStatus",
    "RankSummary",
    "ThreadLane",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
