"""Activation offload for a prepared model: autograd saves handles of weights; other saved tensors go to host memory."""

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
    """Install ``config.offload_activations``; returns None if it is not set. The context's end uninstalls it.

    [Note: on top of each other] The offload and the engine both push saved-tensor hooks, in any order. The offload's
    hooks first pass a tensor to the engine; the engine's hooks pass a tensor that is no weight to the hooks below. Call
    this before the engine hooks modules: then a module's offload group opens after its unit and closes before it."""
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
    """The offload policy of a config. ``poison``: fill host buffers with NaN before use and after."""
    return OffloadPolicy(
        min_bytes=config.activation_min_bytes,
        fraction=config.activation_fraction,
        device_budget_bytes=config.activation_device_budget,
        host_cap_bytes=config.activation_host_budget,
        rank=rank,
        poison=poison,
    )
