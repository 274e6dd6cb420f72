"""Reads the folders of DeepSpeed's ZeRO stages 1, 2 and 3: one file of masters and moments for each rank.

``*_optim_states.pt`` hold a rank's flat partitions, ``*_model_states.pt`` names, shapes, buffers and what is frozen.
Files are mapped, not read, and loaded without running anything from them.

[Note: partitions] A *group* is what DeepSpeed flattens together: an optimizer's parameter group in stages 1 and 2, a
sub-group of one in stage 3. Rank r of W keeps one partition of each group. The layouts are those that DeepSpeed's own
``zero_to_fp32.py`` reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayzero.convert.formats.content import WEIGHT, Param, Reader, WeightDecl
from rayzero.convert.formats.model_states import (
    ModelStates,
    Shapes,
    as_dict,
    groups_from,
    overlaps,
    range_of,
    updates_of,
)
from rayzero.convert.formats.pickles import load_torch_file, require_dense
from rayzero.errors import CheckpointError, UnsupportedError
from rayzero.layout.model_layout import dtype_name

_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def has_zero_files(names: Sequence[str]) -> bool:
    """Whether a folder with files of these names is one of ZeRO's."""
    return any(_OPTIM.fullmatch(name) for name in names)


def has_model_files(names: Sequence[str]) -> bool:
    """Whether a folder with files of these names has a model of DeepSpeed's; in stage 0 it has nothing else."""
    return any(_MODEL.fullmatch(name) for name in names)


def load_model_states(folder: Path) -> list[Any]:
    """What each rank's ``*_model_states.pt`` holds. Raises CheckpointError if one is missing or damaged,
    UnsupportedError for tensor or pipeline parallelism."""
    if any(path.name.startswith("layer_") for path in folder.iterdir()):
        raise UnsupportedError(
            f"{folder} was saved with pipeline parallelism, or with experts in files of their own; make a universal "
            "checkpoint of it"
        )
    return _by_rank(folder, _MODEL, "model_states")


class ZeroReader(Reader):
    """An open folder of a ZeRO stage: ``TAG/`` below the folder that ``save_checkpoint`` was given."""

    def __init__(self, folder: Path, *, states: bool = True) -> None:
        """states: False leaves moments out. Raises CheckpointError if files are missing or do not fit each other,
        UnsupportedError for tensor or pipeline parallelism and for what only code could load."""
        super().__init__(folder)
        optim = _by_rank(folder, _OPTIM, "optim_states")
        files = load_model_states(folder)
        shards = [as_dict(as_dict(each)["optimizer_state_dict"]) for each in optim]
        _check_parallelism(shards)
        stage3 = "fp32_flat_groups" in shards[0]
        self._model = model = ModelStates(files, sharded=stage3, everything=states)
        self._place_masters(shards, stage3)
        self._inner = [_base_optimizer(shard) for shard in shards] if states else []
        params = {
            name: Param(
                decl=WeightDecl(shape, dtype_name(self._flats[0][group].dtype)),
                states=self._kinds(group, name) if states else (),
                updates=self._updates(group) if states else 0,
            )
            for group, of_group in enumerate(model.groups)
            for name, shape in of_group.items()
        }
        named = groups_from(self._inner[0]["param_groups"], model.groups) if states else ()
        self.content = model.content(params | model.params, named, model.steps if states else 0)

    def _place_masters(self, shards: Sequence[Mapping[str, Any]], stage3: bool) -> None:
        """Find the masters' partitions [rank][group], and where each parameter is in them."""
        groups = self._model.groups
        key = "fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"
        self._flats = [[_flat(tensor) for tensor in shard[key]] for shard in shards]
        if {len(flat) for flat in self._flats} != {len(groups)}:
            held = [len(flat) for flat in self._flats]
            raise CheckpointError(f"its ranks have {held} groups, its param_shapes {len(groups)}")
        sizes = [[len(tensor) for tensor in flat] for flat in self._flats]
        self._segments: dict[str, list[PartitionSegment]] = (
            stage3_segments(groups, sizes)
            if stage3
            else stage12_segments(groups, sizes, shards[0].get("param_alignment_paddings"))
        )

    def _kinds(self, group: int, name: str) -> tuple[str, ...]:
        """The states of a group's parameters. Raises CheckpointError if a rank's part of one is too short,
        UnsupportedError if one has no element for each of the group."""
        given = self._inner[0]["state"].get(group, {})
        kinds = sorted(kind for kind, value in given.items() if kind != "step" and value is not None)
        for kind in kinds:
            if not isinstance(given[kind], Tensor) or given[kind].dim() != 1 or given[kind].dtype not in _FLOATS:
                raise UnsupportedError(
                    f"the optimizer state {kind!r} of group {group} is no flat floating-point tensor; only "
                    "element-wise states can be converted: convert the weights alone (--weights-only)"
                )
        for segment in self._segments[name]:
            for kind in kinds:
                held = _flat(as_dict(self._inner[segment.rank]["state"][group])[kind])
                if len(held) < segment.stop:
                    raise CheckpointError(
                        f"rank {segment.rank} has {len(held):,} elements of {kind!r} of group {group}, but {name!r} "
                        f"ends at {segment.stop:,}: a shard is cut short or of another checkpoint"
                    )
        return tuple(kinds)

    def _updates(self, group: int) -> int:
        found = updates_of(self._inner[0], group)
        return self._model.updates if found is None else found

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:  # copies only a range of several files
        if name in self._model:
            return self._model.read(name, start, stop)
        values = range_of([self._piece(segment, kind) for segment in self._segments[name]], start, stop)
        return values if kind == WEIGHT else values.float()

    def _piece(self, segment: PartitionSegment, kind: str) -> Tensor:
        if kind == WEIGHT:
            flat = self._flats[segment.rank][segment.group]
        else:
            flat = self._inner[segment.rank]["state"][segment.group][kind].detach()
        return flat[segment.start : segment.stop]


def _check_parallelism(shards: Sequence[Mapping[str, Any]]) -> None:
    world = len(shards)
    count = shards[0].get("partition_count", world)
    if set(count if isinstance(count, list | tuple) else [count]) != {world}:
        raise CheckpointError(
            f"it has {world} *_optim_states.pt, but its partition count is {count}; all of them must be there"
        )
    groups = [group for shard in shards for group in shard.get("ds_zero_partition_groups") or []]
    if any(as_dict(group).get("partition_count", world) != world for group in groups):
        raise UnsupportedError("it was saved with expert parallelism; make a universal checkpoint of it")


def _base_optimizer(shard: Mapping[str, Any]) -> dict[str, Any]:
    inner = shard.get("optimizer_state_dict", shard.get("base_optimizer_state"))
    if not isinstance(inner, dict) or not isinstance(inner.get("state"), dict):
        raise UnsupportedError(
            "its optimizer states are not by group (elastic_checkpoint); convert the weights alone (--weights-only)"
        )
    return inner


def _by_rank(folder: Path, form: re.Pattern[str], what: str) -> list[Any]:
    """What the files of one form hold, in the order of their ranks. Raises CheckpointError if one is missing or
    damaged, UnsupportedError if they are of several tensor-parallel ranks."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = form.fullmatch(path.name)
        if match is None:
            continue
        if int(match[2]):
            raise UnsupportedError(
                f"{folder} was saved with tensor parallelism ({path.name}); make a universal checkpoint of it"
            )
        found[int(match[1] or 0)] = path
    if missing := sorted(set(range(max(found, default=0) + 1)) - set(found)):
        raise CheckpointError(f"{folder} has no *_{what}.pt of rank {missing[0]}; all ranks' files must be there")
    return [load_torch_file(found[rank]) for rank in sorted(found)]


def _flat(value: Any) -> Tensor:
    """A partition. Raises CheckpointError for anything else."""
    if not isinstance(value, Tensor) or value.dtype not in _FLOATS:
        raise CheckpointError(f"a partition is {type(value).__name__}, not a floating-point tensor (on NVMe?)")
    return require_dense(value, "a partition").reshape(-1)


# ---- where elements are. [Note: partitions] ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartitionSegment:
    """Elements of one parameter, in C order, in one rank's partition of a group."""

    rank: int
    group: int
    start: int  # elements from the partition's start
    stop: int


def stage3_segments(groups: Sequence[Shapes], sizes: Sequence[Sequence[int]]) -> dict[str, list[PartitionSegment]]:
    """Stage 3: each rank has ceil(numel / W) elements of every parameter, the last ones partly padding; a partition
    holds these pieces of all parameters of its group, one after another.

    sizes: [rank][group] elements of the partitions. Raises CheckpointError if they do not fit the shapes."""
    world = len(sizes)
    found: dict[str, list[PartitionSegment]] = {}
    for group, shapes in enumerate(groups):
        offset = 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            part = -(-numel // world)
            pieces = ((rank, min(part, numel - rank * part)) for rank in range(world))
            found[name] = [PartitionSegment(rank, group, offset, offset + size) for rank, size in pieces if size > 0]
            offset += part
        for rank in range(world):
            _require(sizes[rank][group] == offset, rank, group, sizes[rank][group], offset)
    return found


def stage12_segments(
    groups: Sequence[Shapes], sizes: Sequence[Sequence[int]], paddings: Sequence[Sequence[int]] | None = None
) -> dict[str, list[PartitionSegment]]:
    """Stages 1 and 2: a group is one flat vector, padded at its end to a multiple of 2 W elements and cut into W equal
    partitions. Masters are kept without that padding, so the last partitions may be shorter or empty.

    sizes: [rank][group] elements of the partitions. paddings: [group][parameter] elements behind each parameter, where
    DeepSpeed aligns parameters. Raises CheckpointError if the sizes do not fit the shapes."""
    world = len(sizes)
    found: dict[str, list[PartitionSegment]] = {}
    for group, shapes in enumerate(groups):
        held = [sizes[rank][group] for rank in range(world)]
        behind = paddings[group] if paddings is not None else [0] * len(shapes)
        if len(behind) != len(shapes):
            raise CheckpointError(f"group {group} has {len(shapes)} parameters and {len(behind)} paddings")
        offset = 0
        for (name, shape), padding in zip(shapes.items(), behind, strict=True):
            numel = math.prod(shape)
            parts = overlaps(held, offset, offset + numel)
            found[name] = [PartitionSegment(rank, group, start, stop) for rank, start, stop in parts]
            offset += numel + padding
        align = 2 * world
        _require(-(-offset // align) == -(-sum(held) // align) and sum(held) >= offset, None, group, sum(held), offset)
    return found


def _require(fits: bool, rank: int | None, group: int, got: int, needed: int) -> None:
    if not fits:
        whose = "the ranks have" if rank is None else f"rank {rank} has"
        raise CheckpointError(
            f"{whose} {got:,} elements of group {group}, but its parameters need {needed:,}: shards are missing, cut "
            "short, or of another checkpoint"
        )
