"""Activation offload: saved-for-backward tensors wait in host memory. Importing this has no effect."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayzero.activations.copy_lane import ThreadLane
    from rayzero.activations.cuda_lane import CudaLane
    from rayzero.activations.ledger import GroupTotals
    from rayzero.activations.offload import ActivationOffload
    from rayzero.activations.policy import OffloadPolicy
    from rayzero.activations.schedule.cost import Choice, CostPlan, GroupCost, Link
    from rayzero.activations.scope import GroupScope
    from rayzero.activations.summary import RankSummary
    from rayzero.activations.tensors.host_pool import HostPool, PoolStatus

_HOME = {
    "ActivationOffload": "offload",
    "Choice": "cost",
    "CostPlan": "cost",
    "CudaLane": "cuda_lane",
    "GroupCost": "cost",
    "GroupScope": "scope",
    "GroupTotals": "ledger",
    "HostPool": "host_pool",
    "Link": "cost",
    "OffloadPolicy": "policy",
    "PoolStatus": "host_pool",
    "RankSummary": "summary",
    "ThreadLane": "copy_lane",
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
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
