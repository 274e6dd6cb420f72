"""RayZero: train PyTorch models whose states do not fit on the GPUs, on a Ray cluster.

The public names, nothing else. Importing has no effect and pulls in neither ray, grpc nor torch: each name is
looked up where it lives when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayzero.cluster.driver import Result, ZeroTrainer
    from rayzero.cluster.follow_call import follow
    from rayzero.cluster.upkeep.rescaling import scale
    from rayzero.config import RunConfig, ScalingConfig, ZeroConfig
    from rayzero.convert.remote_checkpoints import newest_checkpoint
    from rayzero.convert.weights import Weights
    from rayzero.engine.checkpoint import begin_checkpoint, save_checkpoint
    from rayzero.engine.context import RankContext, get_context, mean_over_ranks, report, track
    from rayzero.engine.full_values import full_parameters, full_state_dict, release
    from rayzero.engine.manager import OffloadManager
    from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
    from rayzero.engine.prepare import prepare
    from rayzero.engine.start.unit_init import empty_parameters
    from rayzero.engine.stats import count_tokens, stats
    from rayzero.errors import RayZeroError
    from rayzero.hybrid import HybridDeviceOptimizer
    from rayzero.telemetry.stats import Stats

__version__ = "0.1.0"

__all__ = [
    "HybridDeviceOptimizer",
    "OffloadManager",
    "RankContext",
    "RayZeroError",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "Stats",
    "Weights",
    "ZeroConfig",
    "ZeroOptimizer",
    "ZeroTrainer",
    "begin_checkpoint",
    "count_tokens",
    "empty_parameters",
    "follow",
    "full_parameters",
    "full_state_dict",
    "get_context",
    "mean_over_ranks",
    "newest_checkpoint",
    "prepare",
    "release",
    "report",
    "save_checkpoint",
    "scale",
    "stats",
    "track",
]

_HOMES = {
    "HybridDeviceOptimizer": "rayzero.hybrid",
    "OffloadManager": "rayzero.engine.manager",
    "RankContext": "rayzero.engine.context",
    "RayZeroError": "rayzero.errors",
    "Result": "rayzero.cluster.driver",
    "RunConfig": "rayzero.config",
    "ScalingConfig": "rayzero.config",
    "Stats": "rayzero.telemetry.stats",
    "Weights": "rayzero.convert.weights",
    "ZeroConfig": "rayzero.config",
    "ZeroOptimizer": "rayzero.engine.optimizer.zero_optimizer",
    "ZeroTrainer": "rayzero.cluster.driver",
    "count_tokens": "rayzero.engine.stats",
    "empty_parameters": "rayzero.engine.start.unit_init",
    "follow": "rayzero.cluster.follow_call",
    "full_parameters": "rayzero.engine.full_values",
    "full_state_dict": "rayzero.engine.full_values",
    "get_context": "rayzero.engine.context",
    "mean_over_ranks": "rayzero.engine.context",
    "newest_checkpoint": "rayzero.convert.remote_checkpoints",
    "prepare": "rayzero.engine.prepare",
    "release": "rayzero.engine.full_values",
    "report": "rayzero.engine.context",
    "begin_checkpoint": "rayzero.engine.checkpoint",
    "save_checkpoint": "rayzero.engine.checkpoint",
    "scale": "rayzero.cluster.upkeep.rescaling",
    "stats": "rayzero.engine.stats",
    "track": "rayzero.engine.context",
}


def __getattr__(name: str) -> Any:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'rayzero' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
