"""Activation offload: saved-for-backward tensors wait in host memory. Importing this has no effect."""

from __future__ import annotations

from rayzero.activations.cost import Choice, CostPlan, GroupCost
from rayzero.activations.group import OffloadPolicy
from rayzero.activations.host_pool import HostPool, PoolStatus
from rayzero.activations.ledger import GroupTotals, RankSummary
from rayzero.activations.offload import ActivationOffload, GroupScope
from rayzero.lanes import CudaLane, ThreadLane

__all__ = [
    "ActivationOffload",
    "Choice",
    "CostPlan",
    "CudaLane",
    "GroupCost",
    "GroupScope",
    "GroupTotals",
    "HostPool",
    "OffloadPolicy",
    "PoolStatus",
    "RankSummary",
    "ThreadLane",
]
