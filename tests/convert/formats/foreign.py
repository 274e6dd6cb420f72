"""A small model's states, and folders as other systems write them: DeepSpeed's by the layout of its own tools, DCP's by
torch itself or cut into any grid."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from checkpoint.conftest import require_one_line
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rayzero.convert.conversion import convert
from rayzero.convert.formats import Reader, open_reader
from rayzero.convert.formats.content import WEIGHT
from rayzero.errors import CheckpointError, UnsupportedError

SHAPES = {"embed.weight": (10, 30), "w": (17, 19), "b": (7,), "scale": (1,), "last.weight": (33, 5)}
MOMENTS = ("exp_avg", "exp_avg_sq")
TIED = {"head.weight": "embed.weight"}
UPDATES = 30
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
TWO = [["embed.weight", "b"], ["w", "scale", "last.weight"]]  # the parameters in two groups
Key = tuple[str, str]  # (parameter, kind)


@dataclass
class States:
    """Masters and moments by (parameter, kind), and a buffer."""

    values: dict[Key, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=lambda: {"count": torch.tensor([3, 1 << 40])})

    @classmethod
    def random(cls, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> States:
        generator = torch.Generator().manual_seed(3)
        kinds = (WEIGHT, *MOMENTS)
        return cls({(n, k): torch.randn(shape, generator=generator) for n, shape in shapes.items() for k in kinds})

    def of(self, kind: str) -> dict[str, Tensor]:
        return {name: tensor for (name, of_kind), tensor in self.values.items() if of_kind == kind}


def same(one: Tensor, other: Tensor) -> bool:
    """Equal in shape, dtype and every bit."""
    kind = (one.shape, one.dtype) == (other.shape, other.dtype)
    return kind and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def read_all(path: Path, **options: Any) -> tuple[Reader, dict[Key, Tensor]]:
    """Everything that a source holds, read as writers read it."""
    reader = open_reader(path, **options)
    content = reader.content
    found = {
        (name, kind): torch.cat([torch.empty(0), *reader.parts(name, kind)]).to(torch.float32).view(param.decl.shape)
        for name, param in content.params.items()
        for kind in (WEIGHT, *param.states)
    }
    found |= {
        (name, WEIGHT): reader.read(name, WEIGHT, 0, math.prod(decl.shape)).view(decl.shape)
        for name, decl in content.buffers.items()
    }
    return reader, found


def require_same(found: Mapping[Key, Tensor], states: States, kinds: Sequence[str] = (WEIGHT, *MOMENTS)) -> None:
    """Bit-equal weights, buffers and moments, and nothing else."""
    wanted = {key: value for key, value in states.values.items() if key[1] in kinds}
    wanted |= {(name, WEIGHT): tensor for name, tensor in states.buffers.items()}
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not same(found[key], wanted[key])] == []


def refusal_of(source: Path, to: str = "rayzero", **options: Any) -> str:
    """The line that refuses a conversion, after which nothing new lies beside the source."""
    before = {path: sorted(os.listdir(path)) for path in (source.parent, source) if path.is_dir()}
    with pytest.raises((CheckpointError, UnsupportedError)) as caught:
        convert(source, source.parent / "converted", to=to, **options)
    assert {path: sorted(os.listdir(path)) for path in before} == before
    return require_one_line(caught.value)


# ---- Hugging Face -----------------------------------------------------------------------------------------------


def write_hf(folder: Path, states: States, num_files: int = 1) -> Path:
    folder.mkdir(parents=True)
    tensors = states.of(WEIGHT) | states.buffers
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    placed = {name: f"part-{i % num_files}.safetensors" for i, name in enumerate(tensors)}
    for file in set(placed.values()):
        save_file({name: tensors[name] for name in tensors if placed[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


# ---- DeepSpeed --------------------------------------------------------------------------------------------------


class LossScaler:  # its pickle has the name of DeepSpeed's class, without DeepSpeed
    """DeepSpeed's loss scaler, which each of its optimizer state files holds."""

    def __init__(self) -> None:
        self.cur_scale, self.dtype = 65536.0, torch.float16


LossScaler.__module__, LossScaler.__qualname__ = "deepspeed.runtime.fp16.loss_scaler", "LossScaler"


@contextmanager
def named_as_deepspeeds() -> Iterator[None]:
    """Lets pickle find the loss scaler where DeepSpeed has it."""
    home = LossScaler.__module__
    names = [".".join(home.split(".")[:depth]) for depth in range(1, home.count(".") + 2)]
    for name in names:
        sys.modules[name] = ModuleType(name)
    vars(sys.modules[home])["LossScaler"] = LossScaler
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def write_zero(folder: Path, states: States, stage: int, world: int, groups: Sequence[Sequence[str]]) -> Path:
    """A tag's folder of ZeRO: one optimizer state file a rank, and what holds names and shapes.

    groups: the parameters of each flattened group, in order: an optimizer's groups in stages 1 and 2, sub-groups of
    one optimizer group in stage 3."""
    folder.mkdir(parents=True)
    flats = {kind: [_partitions(states, kind, group, stage, world) for group in groups] for kind in (WEIGHT, *MOMENTS)}
    for rank in range(world):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        with named_as_deepspeeds():
            torch.save({"optimizer_state_dict": _optimizer(flats, rank, stage, world, groups)}, folder / name)
    for rank in range(world if stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save(_model_states(states, groups, stage), folder / name)
    return folder


def _partitions(states: States, kind: str, group: Sequence[str], stage: int, world: int) -> list[Tensor]:
    """Each rank's flat partition of a group."""
    flats = [states.values[name, kind].reshape(-1) for name in group]
    if stage == 3:
        padded = [torch.nn.functional.pad(flat, (0, -len(flat) % world)).view(world, -1) for flat in flats]
        return [torch.cat([rows[rank] for rows in padded]) for rank in range(world)]
    whole = torch.cat(flats)
    whole = torch.nn.functional.pad(whole, (0, -len(whole) % (2 * world)))
    return [part.clone() for part in whole.view(world, -1)]


def _optimizer(flats: Mapping[str, list[list[Tensor]]], rank: int, stage: int, world: int, groups: Any) -> dict:
    numbers = list(range(len(groups)))
    state = {g: {k: flats[k][g][rank] for k in MOMENTS} | {"step": UPDATES} for g in numbers}
    listed = [{**OPTIONS, "params": numbers}] if stage == 3 else [{**OPTIONS, "params": [g]} for g in numbers]
    inner = {"state": state, "param_groups": listed}
    shared = {"loss_scaler": LossScaler(), "overflow": False, "partition_count": world}
    if stage == 3:
        masters = [flats[WEIGHT][g][rank] for g in numbers]
        return {**shared, "zero_stage": 3, "fp32_flat_groups": masters, "optimizer_state_dict": inner}
    masters = [_unpadded(flats[WEIGHT][g][rank], rank, groups[g], world) for g in numbers]
    return {
        **shared, "zero_stage": stage, "single_partition_of_fp32_groups": masters, "base_optimizer_state": inner,
        "partition_count": [world] * len(groups),
    }  # fmt: skip


def _unpadded(flat: Tensor, rank: int, group: Sequence[str], world: int) -> Tensor:
    """DeepSpeed stores the masters of stages 1 and 2 without the padding at the group's end."""
    numel = sum(math.prod(SHAPES[name]) for name in group)
    return flat[: max(0, min(len(flat), numel - rank * len(flat)))].clone()


def _model_states(states: States, groups: Sequence[Sequence[str]], stage: int) -> dict:
    weights = {name: value.bfloat16() for name, value in states.of(WEIGHT).items()}
    if stage == 3:  # ranks have parts
        weights = {name: torch.empty(0, dtype=torch.bfloat16) for name in weights}
    return {
        "module": OrderedDict(weights | {a: weights[n] for a, n in TIED.items() if n in weights} | states.buffers),
        "buffer_names": list(states.buffers),
        "param_shapes": [OrderedDict((name, torch.Size(SHAPES[name])) for name in group) for group in groups],
        "shared_params": TIED,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "global_steps": UPDATES,
        "ds_version": "0.19.8",
    }


# ---- DCP --------------------------------------------------------------------------------------------------------


def write_grid(folder: Path, tensors: Mapping[str, Tensor], cuts: int) -> Path:
    """A DCP folder in which ``cuts`` ranks along each of the first two dimensions have a block of every tensor, as a
    two-dimensional mesh of DTensors would."""
    folder.mkdir(parents=True)
    metadata = Metadata({}, planner_data={}, storage_data={})
    with (folder / "__0_0.distcp").open("wb") as file:
        for name, tensor in tensors.items():
            chunks = []
            for index, box in enumerate(_boxes(tuple(tensor.shape), cuts)):
                offsets = torch.Size(start for start, _ in box)
                part = tensor[tuple(slice(start, stop) for start, stop in box)]
                data = io.BytesIO()
                torch.save(part.clone(), data)
                chunks.append(ChunkStorageMetadata(offsets, part.size()))
                place = _StorageInfo("__0_0.distcp", file.tell(), len(data.getvalue()))
                metadata.storage_data[MetadataIndex(name, offsets, index)] = place
                file.write(data.getvalue())
            metadata.state_dict_metadata[name] = TensorStorageMetadata(
                TensorProperties(dtype=tensor.dtype), tensor.size(), chunks
            )
            metadata.planner_data[name] = (name,)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def _boxes(shape: tuple[int, ...], cuts: int) -> list[tuple[tuple[int, int], ...]]:
    ranges = []
    for axis, size in enumerate(shape):
        step = -(-size // cuts) if axis < 2 else size
        ranges.append([(start, min(start + step, size)) for start in range(0, size, step)])
    return list(product(*ranges))
