"""Builds the peers of the step benchmarks, with the same model, clip and AdamW.

``fsdp2`` uses ``fully_shard`` on every block and the root, ``CPUOffloadPolicy``, torch's clip_grad_norm_, and fused
AdamW on the sharded fp32 parameters; bf16 comes from ``MixedPrecisionPolicy(param_dtype=bf16)``, which also reduces in
bf16 (its default, and the fastest).
``deepspeed`` uses ZeRO stage 3 with parameters and optimizer offloaded to the CPU, DeepSpeedCPUAdam in AdamW mode and
DeepSpeed's own clipping; bf16 comes from its ``bf16`` section (fp32 masters).
"""

from __future__ import annotations

import os
from functools import partial

import torch
from torch import Tensor, nn

from lab.bench.contestants import TrainingPlayer, meet, one_process_a_rank
from lab.bench.turns import Entry, Player, Seat
from lab.bench.work import ADAMW, CLIP, Work, loss_of


def peers(work: Work) -> list[Entry]:
    """The entries of both peers. A peer that cannot run here is reported with the reason."""
    return [
        Entry(name="fsdp2", programs=partial(one_process_a_rank, partial(build_fsdp2, work))),
        Entry(name="deepspeed", programs=partial(one_process_a_rank, partial(build_deepspeed, work))),
    ]


def build_fsdp2(work: Work, seat: Seat) -> Player:
    """Build FSDP2 with CPU offload."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(seat.threads)
    meet(seat)
    on_cpu = seat.device == "cpu"
    mesh = init_device_mesh("cpu" if on_cpu else "cuda", (seat.world_size,))
    lower = None if work.precision == "fp32" else work.dtype
    model = work.model()
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=lower, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=not on_cpu),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if not on_cpu:
        model.cos, model.sin = model.cos.to(seat.device), model.sin.to(seat.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return TrainingPlayer(work, seat, step)


def build_deepspeed(work: Work, seat: Seat) -> Player:
    """Build DeepSpeed ZeRO-3 with CPU offload; needs ``deepspeed``, and a C++ compiler and ninja for its extension."""
    on_cpu = seat.device == "cpu"
    os.environ |= {
        "DS_ACCELERATOR": "cpu" if on_cpu else "cuda",
        "RANK": str(seat.rank),
        "LOCAL_RANK": str(seat.rank),
        "WORLD_SIZE": str(seat.world_size),
        "LOCAL_SIZE": str(seat.world_size),
    }
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.set_num_threads(seat.threads)
    meet(seat)
    deepspeed.init_distributed(dist_backend="gloo" if on_cpu else "nccl", auto_mpi_discovery=False)
    model = work.model()
    optimizer = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **ADAMW)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config(work, seat))

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        return loss

    return TrainingPlayer(work, seat, step)


def deepspeed_config(work: Work, seat: Seat) -> dict[str, object]:
    """The config of ZeRO-3 with everything offloaded. Its thresholds for small parameters are DeepSpeed's defaults."""
    pinned = seat.device != "cpu"
    return {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": work.precision == "bf16"},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": pinned},
            "offload_param": {"device": "cpu", "pin_memory": pinned},
        },
        "steps_per_print": 1 << 30,
    }
