"""Small runs that tests simulate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lab.simulation.cluster import Run
from lab.simulation.machines import Costs, Machine, Measured, Moving, MovingCosts, Options, Stream
from lab.simulation.ranks import Compute
from rayzero.config import ZeroConfig
from rayzero.layout.model_layout import ModelLayout, lay_out_unit


def moving(speed: float = 1e9, byte_s: float = 0.0) -> dict[Moving, MovingCosts]:
    """Streams that are all alike."""
    stream = Stream(speed=speed, rank_byte_s=byte_s, owner_byte_s=byte_s)
    both = MovingCosts(fetch=stream, push=stream)
    return {"plain": both, "encrypted": both}


FREE = Costs(
    unit_s=0.0,
    aside_s=0.0,
    step_s=0.0,
    shard_s=0.0,
    message_s=0.0,
    latency_s=0.0,
    moving=moving(),
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
FAST = replace(FREE, moving=moving(1e13))
MEASURED = Measured(  # a machine that does more than plans describe
    machine=Machine(
        cores=64,
        memory=1.0,
        adam_core=1e10,
        norm_core=1e10,
        sum_core=1e10,
        host_sum_core=1e10,
        copy_core=1e10,
        owner_threads=32,
    ),
    costs={"shm": replace(FAST, latency_s=1e-5), "grpc": replace(FAST, latency_s=1e-3)},
    part_s=0.0,
)
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
