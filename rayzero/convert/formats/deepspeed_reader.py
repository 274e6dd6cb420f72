"""Reads the folders of DeepSpeed's ZeRO stages 1, 2 and 3: one file of masters and moments for each rank.

``*_optim_states.pt`` hold a rank's flat partitions, ``*_model_states.pt`` names, shapes, buffers and what is frozen.
Files are mapped, not read, and loaded without running anything from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayzero.convert.formats.content import WEIGHT, Content, Param, WeightDecl
from rayzero.convert.formats.model_states import ModelStates, as_dict, groups_from, range_of, updates_of
from rayzero.convert.formats.pickles import load_torch_file, require_dense
from rayzero.convert.formats.zero_layout import Segment, Shapes, stage3_segments, stage12_segments
from rayzero.errors import CheckpointError, RayZeroError, UnsupportedError
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
    names = sorted(path.name for path in folder.iterdir())
    if any(name.startswith("layer_") for name in names):
        raise UnsupportedError(
            f"{folder} was saved with pipeline parallelism, or with experts in files of their own; make a universal "
            "checkpoint of it"
        )
    return [load_torch_file(folder / name) for name in _by_rank(folder, names, _MODEL, "model_states")]


class ZeroReader:
    """An open folder of a ZeRO stage: ``TAG/`` below the folder that ``save_checkpoint`` was given."""

    def __init__(self, folder: Path, *, states: bool = True) -> None:
        """states: False leaves moments out. Raises CheckpointError if files are missing or do not fit each other,
        UnsupportedError for tensor or pipeline parallelism and for what only code could load."""
        self._folder = folder
        names = sorted(path.name for path in folder.iterdir())
        self._optim = [load_torch_file(folder / name) for name in _by_rank(folder, names, _OPTIM, "optim_states")]
        model = load_model_states(folder)
        try:
            self._check_parallelism()
            self._shards = [as_dict(as_dict(each)["optimizer_state_dict"]) for each in self._optim]
            stage3 = "fp32_flat_groups" in self._shards[0]
            self._model = ModelStates(model, sharded=stage3, everything=states)
            self._flats, self._segments = self._place(self._model.groups, stage3)
            self._inner = [self._base_optimizer(shard) for shard in self._shards] if states else []
            self.content = self._content(states)
        except RayZeroError as exc:
            raise type(exc)(f"{folder}: {exc}" if str(folder) not in str(exc) else str(exc)) from exc

    def __str__(self) -> str:
        return str(self._folder)

    # ---- what goes where

    def _check_parallelism(self) -> None:
        world = len(self._optim)
        count = as_dict(self._optim[0])["optimizer_state_dict"].get("partition_count", world)
        if set(count if isinstance(count, list | tuple) else [count]) != {world}:
            raise CheckpointError(
                f"it has {world} *_optim_states.pt, but its partition count is {count}; all of them must be there"
            )
        for each in self._optim:
            groups = as_dict(each)["optimizer_state_dict"].get("ds_zero_partition_groups") or []
            if any(as_dict(group).get("partition_count", world) != world for group in groups):
                raise UnsupportedError("it was saved with expert parallelism; make a universal checkpoint of it")

    def _place(self, groups: Sequence[Shapes], stage3: bool) -> tuple[list[list[Tensor]], dict[str, list[Segment]]]:
        """The masters' partitions [rank][group], and where each parameter is in them."""
        key = "fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"
        flats = [[_flat(tensor) for tensor in shard[key]] for shard in self._shards]
        if {len(flat) for flat in flats} != {len(groups)}:
            raise CheckpointError(f"its ranks have {[len(f) for f in flats]} groups, its param_shapes {len(groups)}")
        sizes = [[len(tensor) for tensor in flat] for flat in flats]
        if stage3:
            return flats, stage3_segments(groups, sizes)
        return flats, stage12_segments(groups, sizes, self._shards[0].get("param_alignment_paddings"))

    def _base_optimizer(self, shard: Mapping[str, Any]) -> dict[str, Any]:
        inner = shard.get("optimizer_state_dict", shard.get("base_optimizer_state"))
        if not isinstance(inner, dict) or not isinstance(inner.get("state"), dict):
            raise UnsupportedError(
                "its optimizer states are not by group (elastic_checkpoint); convert the weights alone (--weights-only)"
            )
        return inner

    # ---- what it holds

    def _content(self, states: bool) -> Content:
        groups, model = self._model.groups, self._model
        params = {
            name: Param(
                decl=WeightDecl(shape, dtype_name(self._flats[0][group].dtype)),
                states=self._kinds(group, name) if states else (),
                updates=self._updates(group) if states else 0,
            )
            for group, of_group in enumerate(groups)
            for name, shape in of_group.items()
        }
        return Content(
            params=params | model.params,
            buffers=model.buffers,
            tied=model.tied,
            groups=groups_from(self._inner[0]["param_groups"], groups) if states else (),
            step=model.steps if states else 0,
            left_out=model.left_out,
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

    # ---- values

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """See ``Reader.read``. Copies nothing but a range that is in several files."""
        if name in self._model:
            return self._model.read(name, start, stop)
        pieces = [self._piece(segment, kind) for segment in self._segments[name]]
        values = range_of(pieces, start, stop)
        return values if kind == WEIGHT else values.float()

    def _piece(self, segment: Segment, kind: str) -> Tensor:
        if kind == WEIGHT:
            flat = self._flats[segment.rank][segment.group]
        else:
            flat = self._inner[segment.rank]["state"][segment.group][kind].detach()
        return flat[segment.start : segment.stop]

    def close(self) -> None:
        """See ``Reader.close``."""
        self._optim, self._flats, self._inner, self._shards = [], [], [], []
        self._model.close()


def _by_rank(folder: Path, names: Sequence[str], form: re.Pattern[str], what: str) -> list[str]:
    """The files of one form in the order of their ranks. Raises CheckpointError if one is missing, UnsupportedError if
    they are of several tensor-parallel ranks."""
    found: dict[int, str] = {}
    for name in names:
        match = form.fullmatch(name)
        if match is None:
            continue
        if int(match[2]):
            raise UnsupportedError(
                f"{folder} was saved with tensor parallelism ({name}); make a universal checkpoint of it"
            )
        found[int(match[1] or 0)] = name
    missing = sorted(set(range(max(found, default=0) + 1)) - set(found))
    if missing:
        raise CheckpointError(f"{folder} has no *_{what}.pt of rank {missing[0]}; all ranks' files must be there")
    return [found[rank] for rank in sorted(found)]


def _flat(value: Any) -> Tensor:
    """A partition. Raises CheckpointError for anything else."""
    if not isinstance(value, Tensor) or value.dtype not in _FLOATS:
        raise CheckpointError(f"a partition is {type(value).__name__}, not a floating-point tensor (on NVMe?)")
    return require_dense(value, "a partition").reshape(-1)
