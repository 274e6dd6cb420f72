"""Trains a few steps on a device, for tools that watch it and for what the device itself measures: see gpu_campaign.py.

    python -m lab gpu_one_step                 # on the CUDA device: prints what units waited for
    TORCH_CUDA_SANITIZER=1 python -m lab gpu_one_step --layers 2    # torch finds accesses that nothing orders
    compute-sanitizer python -m lab gpu_one_step --layers 2
    python -m lab gpu_one_step --simulate      # on the simulated device, with its own check of orders

The budget holds a few layers, so that parameters come and go and gradients leave while others are computed.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext

import torch
from torch import nn

import rayzero
from rayzero import ZeroConfig
from tests.support.simulated_lane import SimulatedLane, device_behind

AHEAD = 2  # layers


def main() -> None:
    """Train, and print the last steps' figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--simulate", action="store_true")
    args = parser.parse_args()
    device = torch.device("cpu" if args.simulate else "cuda")
    lane = SimulatedLane(1) if args.simulate else None
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(args.width, args.width), nn.GELU()) for _ in range(args.layers)]
    layer_bytes = 4 * args.width * (args.width + 1)
    config = ZeroConfig(
        gpu_param_memory_budget=(2 + AHEAD) * (layer_bytes + 512), prefetch_buffer_size=AHEAD, shard_bytes="256KiB"
    )
    model = nn.Sequential(*layers).to(device)
    with nullcontext() if lane is None else device_behind(lane):
        model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), config)
    x = torch.randn(args.rows, args.width, device=device)
    with nullcontext() if lane is None else lane.watching():
        for step in range(args.steps):
            if step == args.steps // 2:
                rayzero.stats(model, reset=True)
            model(x).square().mean().backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
    found = rayzero.stats(model)
    print(
        json.dumps(
            {
                "seconds_a_step": found.steps.total / max(1, found.steps.count),
                "late": found.prefetch.late,
                "in_time": found.prefetch.hits,
                "stood_for_copies_s": found.waits["fetch"].total,
                "stood_for_updates_s": found.waits["optimizer"].total,
                "to_device_bytes_per_s": found.to_device.copies.bandwidth,
            }
        )
    )
