"""What ``rayzero.prepare`` logs, once, of what the config does to a model's values and optimizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import nn

from rayzero.codecs.record import codec_of
from rayzero.config import CpuCompressionMethod, ZeroConfig
from rayzero.layout.model_layout import ModelLayout, dtype_name, loses_bits
from rayzero.layout.shard_map import device_shards
from rayzero.memory.planner import FP32
from rayzero.quantities import count

log = logging.getLogger("rayzero.engine.prepare")  # the call that the user knows


def tell_plan(layout: ModelLayout, config: ZeroConfig, params: Mapping[str, nn.Parameter]) -> None:
    """Log it. Call it on rank 0. ``params``: the model's, by name."""
    _tell_fraction(layout, config)
    _tell_coded(layout, config)
    _tell_rounded(layout, params)
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


def _tell_rounded(layout: ModelLayout, params: Mapping[str, nn.Parameter]) -> None:
    """Frozen parameters whose fp32 values are lost (``frozen_masters=False``)."""
    exact = [unit for unit in layout.units if not (unit.has_master or unit.opaque or codec_of(unit).lossy)]
    frozen = [(slot, unit) for unit in exact for slot in unit.slots]
    rounded = [(slot, unit) for slot, unit in frozen if loses_bits(params[slot.name].dtype, unit.dtype)]
    if rounded:
        many, numel = len(rounded), sum(slot.numel for slot, _ in rounded)
        log.warning(
            "frozen_masters=False: %d frozen parameter%s (%d elements, %d bytes in fp32) %s rounded to %s, also in "
            "full_state_dict, checkpoints and exports; with frozen_masters=True the owners keep them exactly",
            many,
            "s" if many > 1 else "",
            numel,
            numel * FP32,
            "are" if many > 1 else "is",
            dtype_name(rounded[0][1].dtype),
        )
