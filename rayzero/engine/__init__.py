"""The rank's side of training: units are unsharded before use and resharded after it, and gradients leave as they
complete."""

from __future__ import annotations

from rayzero.engine.checkpoint import begin_checkpoint, save_checkpoint
from rayzero.engine.context import OpenCheckpoint, RankContext, get_context, report, running_in, track
from rayzero.engine.full_values import full_parameters, full_state_dict
from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
from rayzero.engine.prepare import engine_of, prepare

__all__ = [
    "OpenCheckpoint",
    "RankContext",
    "ZeroOptimizer",
    "begin_checkpoint",
    "engine_of",
    "full_parameters",
    "full_state_dict",
    "get_context",
    "prepare",
    "report",
    "running_in",
    "save_checkpoint",
    "track",
]
