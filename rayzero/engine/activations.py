"""Activation offload of a prepared model: weights are handles, other saved tensors go to host memory."""

from __future__ import annotations

from torch import nn

from rayzero.activations.offload import ActivationOffload
from rayzero.activations.policy import OffloadPolicy
from rayzero.config import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.engine.engine import Engine
from rayzero.telemetry.recorder import Recorder


def offload_activations(
    model: nn.Module, engine: Engine, config: ZeroConfig, context: RankContext, recorder: Recorder
) -> ActivationOffload | None:
    """Install ``config.offload_activations``; None without. Ends with the context.

    [Note: on top of each other] Both put saved-tensor hooks on the stack, in any order. What comes to the group's hooks
    is first shown to the engine, what comes to the engine's and is no weight goes to those below. Call this before the
    engine puts its hooks on modules: of one module the group's then opens after the unit and closes before it."""
    if not config.offload_activations:
        return None
    offload = ActivationOffload(
        model,
        policy_of(config, context.rank, poison=engine.poison),
        offload_modules=config.offload_activations,
        recorder=recorder,
        weights=None if engine.resident else engine.saved,
    )
    context.on_close(lambda _: offload.close())
    return offload


def policy_of(config: ZeroConfig, rank: int, *, poison: bool) -> OffloadPolicy:
    """A config's settings as the offload has them. ``poison``: fill host buffers with NaN before use and after."""
    return OffloadPolicy(
        min_bytes=config.activation_min_bytes,
        fraction=config.activation_fraction,
        device_budget_bytes=config.activation_device_budget,
        host_cap_bytes=config.activation_host_budget,
        rank=rank,
        poison=poison,
    )
