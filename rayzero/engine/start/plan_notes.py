"""What ``rayzero.prepare`` logs, once, of what the config does to a model's values and optimizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import nn

from rayzero.config import CpuCompressionMethod, ZeroConfig
from rayzero.layout.model_layout import ModelLayout, dtype_name
from rayzero.layout.shard_map import device_shards
from rayzero.quantities import count

log = logging.getLogger("rayzero.engine.prepare")  # the call that the user knows


def tell_plan(layout: ModelLayout, config: ZeroConfig, params: Mapping[str, nn.Parameter]) -> None:
    """Log it. Call it on rank 0. ``params``: the model's, by name."""
    _tell_fraction(layout, config)
    _tell_coded(layout, config)
    if config.precision == "fp32":
        _tell_widened(params)


def _tell_widened(params: Mapping[str, nn.Parameter]) -> None:
    """Trained parameters of 16 bits in a run that computes in fp32."""
    narrow = [param for param in params.values() if param.requires_grad and param.dtype in (torch.bfloat16, torch.half)]
    if narrow:
        log.warning(
            "precision='fp32' is the default, and the model is %s: %s (%s elements) compute in float32; "
            "with ZeroConfig(precision=%r) they compute in 16 bits, and owners keep fp32 masters",
            dtype_name(narrow[0].dtype),
            count(len(narrow), "trained parameter"),
            f"{sum(param.numel() for param in narrow):,}",
            "bf16" if narrow[0].dtype is torch.bfloat16 else "fp16",
        )


def _tell_fraction(layout: ModelLayout, config: ZeroConfig) -> None:
    """The share of the optimizer that stays on devices, which is whole shards; a warning if there is none."""
    if config.host_fraction == 1:
        return
    trained = sum(unit.numel for unit in layout.units if unit.trainable)
    if trained == 0:
        return
    kept = sum(layout.shards[index].numel for index in device_shards(layout, config.host_fraction))
    log.log(
        logging.INFO if kept else logging.WARNING,
        "offload_fraction=%g: %.3g of the optimizer stays on the ranks' devices, in whole shards of at most %d bytes%s",
        config.host_fraction,
        kept / trained,
        config.shard_bytes,
        "" if kept else "; lower shard_bytes or offload_fraction",
    )


def _tell_coded(layout: ModelLayout, config: ZeroConfig) -> None:
    """Frozen parameters whose values a lossy ``cpu_compression`` replaces, or one that has no effect."""
    coded = [unit for unit in layout.units if unit.is_coded]
    if coded and config.cpu_compression.is_lossy():
        log.warning(
            "cpu_compression=%r replaces the values of %s (%s elements): full_state_dict, checkpoints and exports have "
            "what it kept; with cpu_compression='lossless' nothing is lost",
            config.cpu_compression.value,
            count(sum(len(unit.slots) for unit in coded), "frozen parameter"),
            f"{sum(slot.numel for unit in coded for slot in unit.slots):,}",
        )
    if not coded and config.cpu_compression is not CpuCompressionMethod.NONE:
        frozen = any(not unit.trainable for unit in layout.units)
        log.warning(
            "cpu_compression=%r has no effect: %s",
            config.cpu_compression.value,
            "it does not make the frozen parameters' dtype smaller" if frozen else "the model has no frozen parameters",
        )
