"""Small runs that tests simulate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rayzero.config import ZeroConfig
from rayzero.layout.model_layout import ModelLayout, lay_out_unit
from rayzero.simulation.cluster import Run
from rayzero.simulation.machines import Costs, Machine, Options
from rayzero.simulation.ranks import Compute

FREE = Costs(
    unit_s=0.0,
    aside_s=0.0,
    step_s=0.0,
    shard_s=0.0,
    message_s=0.0,
    latency_s=0.0,
    fetch_stream=1e9,
    push_stream=1e9,
    rank_fetch_byte_s=0.0,
    rank_push_byte_s=0.0,
    owner_fetch_byte_s=0.0,
    owner_push_byte_s=0.0,
    loop_fetch_byte_s=0.0,
    loop_push_byte_s=0.0,
)
HOST = Machine(
    cores=100.0,
    memory=1e15,
    network=1e9,
    adam_core=1e9,
    norm_core=1e9,
    sum_core=1e9,
    host_sum_core=1e9,
    copy_core=1e9,
    owner_threads=1,
)
BYTE = dict.fromkeys((f"{who}_{way}_byte_s" for who in ("rank", "owner") for way in ("fetch", "push")), 2e-10)
SHM, GRPC = Options(transport="shm"), Options(transport="grpc")
NUMEL = 1 << 16  # elements of a unit; norms of fewer than 2^20 are summed at the collect


def layout_of(numels: list[int], dtype: torch.dtype = torch.float32, shard: int = 1 << 14) -> ModelLayout:
    units = [lay_out_unit(i, f"u{i}", dtype, True, [(f"u{i}.w", (numel,))]) for i, numel in enumerate(numels)]
    return ModelLayout(units=tuple(units), shard_numel=shard)


def run_of(units: int = 2, **changes: Any) -> Run:
    layout = changes.pop("layout", None) or layout_of([NUMEL] * units)
    count = len(layout.units)
    plain = Run(
        layout=layout,
        root=frozenset(),
        zero=ZeroConfig(prefetch_buffer_size=1),
        compute=Compute(forward=(0.0,) * count, backward=(0.0,) * count),
        rank_hosts=(0,),
        owner_hosts=(0,),
        machine=HOST,
        costs=FREE,
        options=SHM,
    )
    return replace(plain, **changes)
