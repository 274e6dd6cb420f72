"""Folders that DeepSpeed itself wrote, and what its engine held when it wrote them.

``folders.tar.xz`` beside this file has one small folder for each of ``CASES``, and for some a universal checkpoint that
``ds_to_universal`` made of it. ``unpack`` gives them to tests, which need no DeepSpeed. They are written again by

    pip install --no-deps deepspeed==0.19.8 hjson ninja py-cpuinfo einops nvidia-ml-py
    python -m tests.convert.formats.real_deepspeed

on the CPU, with gloo. What a folder must hold is asked of the live engine by DeepSpeed's own functions, not computed
from files.
"""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

ARCHIVE = Path(__file__).with_name("folders.tar.xz")
TAG = "step"  # the folder that DeepSpeed writes into
MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS = 6  # fp16 skips the first few


@dataclass(frozen=True)
class Case:
    """How a folder is written."""

    stage: int
    world: int = 2
    dtype: str = "bf16"
    frozen: bool = True  # some parameters do not require gradients
    loose: bool = False  # a parameter gets gradients, and no optimizer has it
    empty: bool = False  # a parameter without elements; DeepSpeed cannot gather one in stage 3
    base_tied: bool = False  # a frozen parameter has two names
    universal: bool = False  # ds_to_universal makes another folder of it
    excluded: bool = False  # exclude_frozen_parameters
    amsgrad: bool = False
    extra: bool = False  # a module has an extra state, which is no tensor
    named: bool = False  # the optimizer was made of named parameters
    client: bool = False  # a scheduler's state and values of the loop are saved, too
    zero: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "zero0-fp32": Case(0, dtype="fp32", loose=True, empty=True),
    "zero0-fp32-named": Case(0, dtype="fp32", named=True),
    "zero0-bf16": Case(0, loose=True),
    "zero0-fp16": Case(0, dtype="fp16", client=True),
    "zero2-client": Case(2, world=1, client=True),
    "zero1": Case(1, loose=True, empty=True, universal=True),
    "zero1-fp32-alone": Case(1, world=1, dtype="fp32"),
    "zero1-amsgrad": Case(1, world=1, amsgrad=True),
    "zero1-excluded": Case(1, world=1, excluded=True),
    "zero1-excluded-tied": Case(1, world=1, base_tied=True, excluded=True),
    "zero1-bf16-optimizer": Case(1, config={"data_types": {"grad_accum_dtype": "fp32"}}),
    "zero2": Case(2, loose=True, empty=True, universal=True),
    "zero2-fp16": Case(2, dtype="fp16"),
    "zero2-round-robin": Case(2, universal=True, zero={"round_robin_gradients": True}),
    "zero2-offload": Case(2, world=1, zero={"offload_optimizer": {"device": "cpu"}}),
    "zero2-excluded": Case(2, world=1, excluded=True),
    "zero2-extra": Case(2, world=1, extra=True),
    "zero3": Case(3, base_tied=True, universal=True, zero={"sub_group_size": 20}),
    "zero3-fp32-alone": Case(3, world=1, dtype="fp32", universal=True),
    "zero3-offload": Case(3, zero={"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    "zero3-loose": Case(3, loose=True, universal=True),
    "zero3-excluded": Case(3, excluded=True),
    "zero3-excluded-tied": Case(3, base_tied=True, excluded=True),
}


class Ranged(nn.Linear):
    """A layer that has parameters and a buffer."""

    def __init__(self) -> None:
        super().__init__(5, 9)
        self.register_buffer("range", torch.randn(2))


class Counting(nn.Linear):
    """A layer with an extra state in its state dict."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Nothing is kept of it."""


class Small(nn.Module):
    """Tied, frozen and ungrouped parameters, a module with two names, sizes that no number of ranks divides, buffers of
    three kinds."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.up = Ranged()
        self.twin = self.up
        self.scale = nn.Parameter(torch.randn(1))
        self.down = (Counting if case.extra else nn.Linear)(9, 5, bias=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        if case.frozen:
            self.base = nn.Linear(5, 5).requires_grad_(False)
        if case.base_tied:
            self.again = self.base
        if case.loose:
            self.loose = nn.Parameter(torch.randn(5))
        if case.empty:
            self.empty = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("count", torch.tensor((1 << 40) + 1))  # fp32 would round it
        self.register_buffer("scratch", torch.randn(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        if hasattr(self, "base"):
            hidden = hidden + self.base(hidden)
        if hasattr(self, "loose"):
            hidden = hidden * self.loose
        return self.head(self.down(self.up(hidden).relu()) * self.scale)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups: matrices, and the rest with another rate and no decay. Frozen, empty and loose parameters
    are in none."""
    named = [(name, param) for name, param in model.named_parameters() if name not in ("loose", "empty")]
    trained = [param for _, param in named if param.requires_grad]
    return [
        {"params": [param for param in trained if param.dim() == 2], "weight_decay": 0.1},
        {"params": [param for param in trained if param.dim() != 2], "weight_decay": 0.0, "lr": 2e-3},
    ]


# ---- reading ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What a folder must hold."""

    values: Mapping[tuple[str, str], Tensor]  # (parameter or buffer, "weight" or a state)
    frozen: Sequence[str]
    loose: Sequence[str]
    buffers: Sequence[str]
    tied: Mapping[str, str]
    groups: Sequence[Mapping[str, Any]]
    updates: int

    def without(self, names: Sequence[str]) -> Held:
        """The same without parameters or states of these names."""
        values = {key: tensor for key, tensor in self.values.items() if not set(names) & set(key)}
        return replace(self, values=values, frozen=[name for name in self.frozen if name not in names])


def unpack(into: Path) -> Path:
    """The archive's folders below ``into``."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(into, filter="data")
    return into


def held_in(folder: Path) -> Held:
    """What ``folder``, one case's, must hold."""
    tensors = load_file(folder / "held.safetensors")
    said = json.loads((folder / "held.json").read_text())
    values = {(name, kind): tensor for key, tensor in tensors.items() for kind, _, name in [key.partition("/")]}
    return Held(values=values, **said)


# ---- writing ----------------------------------------------------------------------------------------------------


def write(cases: Mapping[str, Case], into: Path) -> None:
    """Write each case's folder below ``into``, with DeepSpeed."""
    for world in sorted({case.world for case in cases.values()}):
        chosen = {name: case for name, case in cases.items() if case.world == world}
        torch.multiprocessing.spawn(_write_all, (world, chosen, into, _free_port()), nprocs=world)
    for name, case in cases.items():
        if case.universal:
            _write_universal(into / name / TAG, into / f"{name}-universal")
            for held in (into / name).glob("held.*"):
                (into / f"{name}-universal" / held.name).write_bytes(held.read_bytes())


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _write_all(rank: int, world: int, cases: Mapping[str, Case], into: Path, port: int) -> None:
    os.environ |= {
        "DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "LOCAL_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # torch can, slowly
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    for name, case in cases.items():
        _write_case(case, into / name)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _write_case(case: Case, folder: Path) -> None:
    import deepspeed

    torch.manual_seed(1)
    model = Small(case)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": case.stage, **case.zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **case.config,
    }
    if case.dtype != "fp32":
        config[case.dtype] = {"enabled": True}
    names = {param: name for name, param in model.named_parameters()}
    groups = groups_of(model)
    if case.named:
        groups = [{**group, "params": [(names[param], param) for param in group["params"]]} for group in groups]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), amsgrad=case.amsgrad)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0) if case.client else None
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=scheduler)
    for _ in range(STEPS):
        engine.backward(engine(torch.randint(0, 7, (2, 4))).float().square().mean())
        engine.step()
    loop = {"epoch": 2, "sampler": {"seed": 5}} if case.client else {}
    engine.save_checkpoint(folder, tag=TAG, client_state=loop, exclude_frozen_parameters=case.excluded)
    tensors, said = _held(engine, case)
    if torch.distributed.get_rank() == 0:
        for script in folder.glob("*.py"):  # DeepSpeed puts its tools beside a checkpoint
            script.unlink()
        save_file(tensors, folder / "held.safetensors")
        (folder / "held.json").write_text(json.dumps(said))


def _held(engine: Any, case: Case) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Asks the engine for every value. All ranks call it."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    model = engine.module
    if 0 < case.stage < 3:  # DeepSpeed 0.19.8 links states after the first group's first step, when the second has none
        optimizer = engine.optimizer
        if "round_robin_gradients" in case.zero:  # and it links by another order than that of the partitions
            optimizer.bit16_groups = optimizer.round_robin_bit16_groups
            optimizer._link_all_hp_params()
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    grouped = [[p for p in group["params"]] for group in groups_of(model)]
    trained = {id(param) for group in grouped for param in group}
    names = {id(param): name for name, param in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    updates = STEPS - engine.skipped_steps
    for name, param in model.named_parameters():
        if id(param) in trained and case.stage == 0:
            inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
            (master,) = (
                mine
                for params, group in zip(grouped, inner.param_groups, strict=True)
                for own, mine in zip(params, group["params"], strict=True)
                if own is param
            )
            assert torch.equal(master.to(param.dtype), param)
            tensors[f"weight/{name}"] = master.detach().clone()
            updates = int(inner.state[master]["step"])  # one more in 16 bits: DeepSpeed steps once to make states
            tensors |= {f"{kind}/{name}": inner.state[master][kind].clone() for kind in MOMENTS}
        elif id(param) in trained:
            tensors[f"weight/{name}"] = master = safe_get_full_fp32_param(param).clone()
            assert case.stage == 3 or torch.equal(master.to(param.dtype), param)
            for kind in (*MOMENTS, "max_exp_avg_sq")[: 3 if case.amsgrad else 2]:
                tensors[f"{kind}/{name}"] = safe_get_full_optimizer_state(param, kind).clone()
        else:
            with GatheredParameters([param], enabled=case.stage == 3):
                tensors[f"weight/{name}"] = param.detach().clone()
    held_buffers = dict(model.named_buffers(remove_duplicate=False))
    buffers = [name for name in model.state_dict() if name in held_buffers]
    tensors |= {f"weight/{name}": held_buffers[name].clone() for name in buffers}
    every = model.named_parameters(remove_duplicate=False)
    said = {
        "frozen": [name for name, param in model.named_parameters() if not param.requires_grad],
        "loose": [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in trained],
        "buffers": buffers,
        "tied": {name: names[id(param)] for name, param in every if names[id(param)] != name},
        "groups": [
            {"params": [names[id(p)] for p in params], "lr": lr, "weight_decay": decay, "betas": [0.9, 0.98]}
            for params, lr, decay in zip(grouped, (1e-3, 2e-3), (0.1, 0.0), strict=True)
        ],
        "updates": updates,
    }
    return tensors, said


def _write_universal(source: Path, folder: Path) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.checkpoint.ds_to_universal import main

    main(
        SimpleNamespace(
            input_folder=str(source), output_folder=str(folder / TAG), num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip


def _entries(root: Path) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Every file below ``root``, with nothing in it of who wrote it and when."""
    for path in sorted(root.rglob("*")):
        if path.is_file():
            entry = tarfile.TarInfo(path.relative_to(root).as_posix())
            entry.size = path.stat().st_size
            yield entry, path.read_bytes()


def main() -> int:
    """Write the archive. Arguments: names of cases to write alone, into folders below the current one."""
    chosen = {name: CASES[name] for name in sys.argv[1:]}
    if chosen:
        write(chosen, Path.cwd())
        return 0
    with tempfile.TemporaryDirectory() as folder:
        write(CASES, Path(folder))
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            for entry, data in _entries(Path(folder)):
                archive.addfile(entry, io.BytesIO(data))
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
