"""Reads the folders that DeepSpeed's ``save_checkpoint`` makes: of ZeRO stages 1, 2 and 3, with a file of masters and
moments for each rank; of stage 0, with one file, which has the model and a torch optimizer whose states have numbers.

``*_optim_states.pt`` hold a rank's flat partitions, ``*_model_states.pt`` names, shapes, buffers and what is frozen.
Files are mapped, not read, and loaded without running anything from them.

[Note: partitions] A *group* is what DeepSpeed flattens together: an optimizer's parameter group in stages 1 and 2, a
sub-group of one in stage 3. Rank r of W keeps one partition of each group. The layouts are those that DeepSpeed's own
``zero_to_fp32.py`` reads.

[Note: whose] Nothing in the file of stage 0 says which name a number has, unless the optimizer was made of named
parameters. Where there are fp32 masters, DeepSpeed has rounded each to the model's own value: the parameter is the one
with these bits. If several have them, their masters may differ, and nobody can tell them apart.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayzero.convert.formats.content import (
    FLOATS,
    PART,
    WEIGHT,
    Content,
    OptimizerGroup,
    Param,
    Reader,
    WeightDecl,
    listed,
    require_states,
    step_count,
)
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
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INSTEAD = (
    "make the optimizer of named_parameters(), or save with ZeRO stage 1; the model's own values are "
    "torch.load(FILE)['module']"
)
_NAMES = ("params", "param_names")  # of a group, beside its options
Key = tuple[tuple[int, ...], torch.dtype, bytes]  # shape, dtype and hash of a tensor


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
            if not isinstance(given[kind], Tensor) or given[kind].dim() != 1 or given[kind].dtype not in _FLOAT_DTYPES:
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
    if not isinstance(value, Tensor) or value.dtype not in _FLOAT_DTYPES:
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


# ---- stage 0 --------------------------------------------------------------------------------------------------------


class Stage0Reader(Reader):
    """An open folder of stage 0: ``TAG/`` below the folder that ``save_checkpoint`` was given."""

    def __init__(self, folder: Path, *, states: bool = True) -> None:
        """states: False leaves moments out. Raises CheckpointError if the file is damaged or other ranks' files are
        missing, UnsupportedError for parallelism and if nobody can tell whose masters or states there are."""
        super().__init__(folder)
        (file,) = files = load_model_states(folder)
        self._model = ModelStates(files, sharded=False, everything=states)
        self._masters, inner = _parts(as_dict(file), self._model)
        self._values: dict[tuple[str, str], Tensor] = {}  # of what the optimizer trains, by (parameter, kind)
        self.content = self._content(inner, states)

    def _content(self, inner: Mapping[str, Any], states: bool) -> Content:
        params = dict(self._model.params)
        given = [as_dict(group) for group in inner.get("param_groups", [])]
        names = _named(given, params) or self._matched()
        if names is None:
            if states and inner.get("state"):
                raise UnsupportedError(
                    "the optimizer states of stage 0 do not say which parameters they are of; make the optimizer of "
                    "named_parameters(), or convert the weights alone (--weights-only)"
                )
            # nobody can tell which are frozen
            params = {name: replace(param, trained=True) for name, param in params.items()}
            given = []
        for at, (group, own) in enumerate(zip(given, names or [], strict=False)):
            for place, (number, name) in enumerate(zip(group["params"], own, strict=True)):
                master = self._masters[at][place] if self._masters else None
                state = as_dict(inner["state"].get(number, {})) if states else {}
                params[name] = self._trained(name, params[name], master, state)
        groups = tuple(OptimizerGroup.of(own, group, _NAMES) for group, own in zip(given, names or [], strict=False))
        return self._model.content(params, groups if states else (), self._model.steps if states else 0)

    def _trained(self, name: str, param: Param, master: Tensor | None, state: Mapping[str, Any]) -> Param:
        decl = param.decl
        if master is not None:
            if tuple(master.shape) != decl.shape:
                raise CheckpointError(f"the master of {name!r} has shape {tuple(master.shape)}, not {decl.shape}")
            decl = WeightDecl.of(master)
            self._values[name, WEIGHT] = master
        kinds = sorted(kind for kind, value in state.items() if kind != "step" and value is not None)
        for kind in kinds:
            value = require_dense(state[kind], f"{kind} of {name}")
            require_states(name, decl, kind, WeightDecl.of(value), self)
            self._values[name, kind] = value
        updates = step_count(state["step"], "step") if "step" in state else self._model.updates if state else 0
        return Param(decl=decl, states=tuple(kinds), updates=updates)

    def _matched(self) -> list[list[str]] | None:
        """The names of each group's parameters by their masters; None if there are no masters. [Note: whose]

        Raises UnsupportedError that names parameters which cannot be told apart."""
        if not self._masters:
            return None
        held = {n: self._model.value(n) for n, param in self._model.params.items() if param.decl.dtype in FLOATS}
        holders: dict[Key, list[str]] = {}
        for name, value in held.items():
            holders.setdefault(_key(value, value.dtype), []).append(name)
        dtypes = {value.dtype for value in held.values()}
        names = [[self._holder(master, dtypes, holders) for master in masters] for masters in self._masters]
        used = [name for own in names for name in own]
        if len(used) != len(set(used)):
            raise CheckpointError("several of its fp32 masters round to one parameter: they are of different steps")
        return names

    def _holder(self, master: Tensor, dtypes: Iterable[torch.dtype], holders: Mapping[Key, Sequence[str]]) -> str:
        found = [name for dtype in dtypes for name in holders.get(_key(master, dtype), ())]
        if not found:
            raise CheckpointError(
                f"a master of shape {tuple(master.shape)} rounds to no parameter of its module: they are of different "
                "steps"
            )
        if len(found) > 1:
            raise UnsupportedError(
                f"{listed(found)} have equal values, and nothing says which fp32 master is whose; {_INSTEAD}"
            )
        return found[0]

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        value = self._values.get((name, kind))
        if value is None:
            return self._model.read(name, start, stop)
        part = value.reshape(-1)[start:stop]
        return part if kind == WEIGHT else part.float()


def _parts(file: Mapping[str, Any], model: ModelStates) -> tuple[list[list[Tensor]], dict[str, Any]]:
    """The fp32 masters of each group, if there are any, and the state dict of torch's optimizer."""
    saved = file.get("optimizer")
    if saved is None and model.stage == 0:
        return [], {}  # an engine without an optimizer
    if saved is None:
        raise CheckpointError("it has no *_optim_states.pt; all ranks' files must be there")
    optimizer = as_dict(saved)
    if "fp32_groups_flat" in optimizer:
        raise UnsupportedError(
            "its fp32 masters are in one flat vector, and nothing says where each parameter begins; save with ZeRO "
            "stage 1; the model's own values are torch.load(FILE)['module']"
        )
    masters = optimizer.get("fp32_groups", [])
    inner = as_dict(optimizer.get("optimizer_state_dict", optimizer))
    if "param_groups" not in inner or "state" not in inner:
        raise UnsupportedError(
            f"its optimizer has {', '.join(map(repr, sorted(map(str, optimizer))[:8]))}, not the state dict of one of "
            "torch's"
        )
    dense = [[require_dense(master, "a master") for master in group] for group in masters]
    if masters and [len(group) for group in dense] != [len(group["params"]) for group in inner["param_groups"]]:
        raise CheckpointError("its optimizer's groups and its masters do not fit each other")
    return dense, inner


def _named(groups: Sequence[Mapping[str, Any]], params: Mapping[str, Param]) -> list[list[str]] | None:
    """The names that an optimizer was given with its parameters; None if it was given none, or not the model's own."""
    names = [list(group.get("param_names", ())) for group in groups]
    fits = all(len(own) == len(group["params"]) for own, group in zip(names, groups, strict=True))
    every = [name for own in names for name in own]
    return names if groups and fits and len(every) == len(set(every)) and params.keys() >= set(every) else None


def _key(tensor: Tensor, dtype: torch.dtype) -> Key:
    """What two tensors of equal shape and bits agree in, once rounded to ``dtype``."""
    digest = hashlib.sha256()
    flat = tensor.reshape(-1)
    for start in range(0, len(flat), PART):
        digest.update(flat[start : start + PART].to(dtype).contiguous().view(torch.uint8).numpy().data)
    return tuple(tensor.shape), dtype, digest.digest()
