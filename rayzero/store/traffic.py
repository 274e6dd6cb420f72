"""Records a store's metrics: bytes that travelled, links that broke, what runs, and a rank's gradient memory."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import torch

from rayzero.codecs import RAW, Codec
from rayzero.layout.model_layout import dtype_name
from rayzero.telemetry.names import (
    BUILD_INFO,
    LINK_DOWN_SECONDS,
    LINK_RECONNECTS,
    MEMORY_BYTES,
    TRANSFER_BYTES,
    TRANSFER_RAW_BYTES,
)
from rayzero.telemetry.recorder import Reading, Recorder


def count_bytes(
    recorder: Recorder,
    direction: str,
    transport: str,
    numel: int,
    dtype: torch.dtype,
    *,
    codec: Codec = RAW,
    size: int | None = None,
) -> None:
    """Count ``numel`` elements of ``dtype`` that have travelled as ``codec`` encodes them. ``size``: the bytes that
    took, where it is not exactly ``codec.most_bytes``."""
    size = codec.most_bytes(numel, dtype) if size is None else size
    sent_as = dtype_name(dtype) if codec is RAW else _SENT_AS.get(codec.name, codec.name)
    recorder.add(TRANSFER_BYTES, size, direction=direction, transport=transport, dtype=sent_as)
    recorder.add(TRANSFER_RAW_BYTES, numel * dtype.itemsize, direction=direction)


_SENT_AS = {"fp16": dtype_name(torch.float16), "bf16": dtype_name(torch.bfloat16), "int8": dtype_name(torch.int8)}


def count_reconnect(recorder: Recorder, peer: str, down_s: float) -> None:
    """Count a link that is open again. ``peer``: what is at its other end; see ``names.LINK_RECONNECTS``."""
    recorder.add(LINK_RECONNECTS, peer=peer)
    recorder.add(LINK_DOWN_SECONDS, down_s, peer=peer)


def tell_build(recorder: Recorder, kernel: str, transport: str) -> None:
    """Record what runs, once a rank has attached."""
    try:
        version = metadata.version("rayzero")
    except metadata.PackageNotFoundError:  # run from its sources
        version = "source"
    recorder.set(BUILD_INFO, 1, version=version, torch=torch.__version__, kernel=kernel, transport=transport)


def watch_gradients(recorder: Recorder, held_bytes: Callable[[], int], tier: str) -> Callable[[], None]:
    """Report a rank's gradient memory until the returned function is called. ``held_bytes``: its size now; ``tier``:
    see ``names.MEMORY_BYTES``."""
    return recorder.watch(lambda: [Reading(MEMORY_BYTES, held_bytes(), {"kind": "grad", "tier": tier})])
