"""Reads the folders of DeepSpeed's ZeRO stages 1, 2 and 3: one file of masters and moments for each rank.

``*_optim_states.pt`` hold a rank's flat partitions, ``*_model_states.pt`` names, shapes, buffers and what is frozen.
Files are mapped, not read, and loaded without running anything from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayzero.checkpoint.files.tensor_reader import is_shape
from rayzero.checkpoint.formats.content import WEIGHT, Content, Group, Param, WeightDecl, plain_option
from rayzero.checkpoint.formats.pickles import load_torch_file, require_dense
from rayzero.checkpoint.formats.zero_layout import Segment, Shapes, stage3_segments, stage12_segments
from rayzero.errors import CheckpointError, RayZeroError, UnsupportedError
from rayzero.layout.model_layout import dtype_name

_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def has_zero_files(names: Sequence[str]) -> bool:
    """Whether a folder with files of these names is one of ZeRO's."""
    return any(_OPTIM.fullmatch(name) for name in names)


class ZeroReader:
    """An open folder of a ZeRO stage: ``TAG/`` below the folder that ``save_checkpoint`` was given."""

    def __init__(self, folder: Path, *, states: bool = True) -> None:
        """states: False leaves moments out. Raises CheckpointError if files are missing or do not fit each other,
        UnsupportedError for tensor or pipeline parallelism and for what only code could load."""
        self._folder = folder
        names = sorted(path.name for path in folder.iterdir())
        self._optim = [load_torch_file(folder / name) for name in _by_rank(folder, names, _OPTIM, "optim_states")]
        self._model = [load_torch_file(folder / name) for name in _by_rank(folder, names, _MODEL, "model_states")]
        try:
            self._check_parallelism(names)
            self._shards = [_dict(_dict(each)["optimizer_state_dict"]) for each in self._optim]
            self._flats, self._segments, shapes = self._place()
            self._inner = [self._base_optimizer(shard) for shard in self._shards]
            self.content = self._content(shapes, states)
        except RayZeroError as exc:
            raise type(exc)(f"{folder}: {exc}" if str(folder) not in str(exc) else str(exc)) from exc

    def __str__(self) -> str:
        return str(self._folder)

    # ---- what goes where

    def _check_parallelism(self, names: Sequence[str]) -> None:
        if any(name.startswith("layer_") for name in names):
            raise UnsupportedError("it was saved with pipeline parallelism; make a universal checkpoint of it")
        world = len(self._optim)
        count = _dict(self._optim[0])["optimizer_state_dict"].get("partition_count", world)
        if set(count if isinstance(count, list | tuple) else [count]) != {world}:
            raise CheckpointError(
                f"it has {world} *_optim_states.pt, but its partition count is {count}; all of them must be there"
            )
        for each in self._optim:
            groups = _dict(each)["optimizer_state_dict"].get("ds_zero_partition_groups") or []
            if any(_dict(group).get("partition_count", world) != world for group in groups):
                raise UnsupportedError("it was saved with expert parallelism; make a universal checkpoint of it")

    def _place(self) -> tuple[list[list[Tensor]], dict[str, list[Segment]], list[Shapes]]:
        """The masters' partitions [rank][group], where each parameter is in them, and the shapes by group."""
        stage3 = "fp32_flat_groups" in self._shards[0]
        key = "fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"
        flats = [[_flat(tensor) for tensor in shard[key]] for shard in self._shards]
        shapes = [_shapes(group) for group in _dict(self._model[0])["param_shapes"]]
        if {len(flat) for flat in flats} != {len(shapes)}:
            raise CheckpointError(f"its ranks have {[len(f) for f in flats]} groups, its param_shapes {len(shapes)}")
        if sum(map(len, shapes)) != len({name for group in shapes for name in group}):
            raise CheckpointError("a parameter is in two groups of its param_shapes")
        sizes = [[len(tensor) for tensor in flat] for flat in flats]
        if stage3:
            return flats, stage3_segments(shapes, sizes), shapes
        return flats, stage12_segments(shapes, sizes, self._shards[0].get("param_alignment_paddings")), shapes

    def _base_optimizer(self, shard: Mapping[str, Any]) -> dict[str, Any]:
        inner = shard.get("optimizer_state_dict", shard.get("base_optimizer_state"))
        if not isinstance(inner, dict) or not isinstance(inner.get("state"), dict):
            raise UnsupportedError(
                "its optimizer states are not by group (elastic_checkpoint); convert the weights alone (--weights-only)"
            )
        return inner

    # ---- what it holds

    def _content(self, shapes: Sequence[Shapes], states: bool) -> Content:
        model = _dict(self._model[0])
        step = step_count(model.get("global_steps", 0), "global_steps")
        params = {
            name: Param(
                decl=WeightDecl(shape, dtype_name(self._flats[0][group].dtype)),
                states=self._kinds(group, name) if states else (),
                updates=self._updates(group, step) if states else 0,
            )
            for group, of_group in enumerate(shapes)
            for name, shape in of_group.items()
        }
        frozen = _shapes(model.get("frozen_param_shapes") or {})
        params |= {name: Param(decl=self._frozen(name, shape), trained=False) for name, shape in frozen.items()}
        self._buffers = buffers_of(model)
        tied = {
            alias: name
            for alias, name in _dict(model.get("shared_params") or {}).items()
            if name in params and alias not in params
        }
        return Content(
            params=params,
            buffers={n: WeightDecl(tuple(t.shape), dtype_name(t.dtype)) for n, t in self._buffers.items()},
            tied=tied,
            groups=self._groups(shapes) if states else (),
            step=step if states else 0,
        )

    def _kinds(self, group: int, name: str) -> tuple[str, ...]:
        """The states of a group's parameters. Raises CheckpointError if a rank's part of one is too short."""
        of_group = self._inner[0]["state"].get(group, {})
        kinds = sorted(k for k, value in of_group.items() if isinstance(value, Tensor) and value.dim() == 1)
        for segment in self._segments[name]:
            for kind in kinds:
                held = _flat(_dict(self._inner[segment.rank]["state"][group])[kind])
                if len(held) < segment.stop:
                    raise CheckpointError(
                        f"rank {segment.rank} has {len(held):,} elements of {kind!r} of group {group}, but {name!r} "
                        f"ends at {segment.stop:,}: a shard is cut short or of another checkpoint"
                    )
        return tuple(kinds)

    def _updates(self, group: int, step: int) -> int:
        """A group's step count: in its states, else in its parameter group, else the engine's."""
        inner = self._inner[0]
        found = inner["state"].get(group, {}).get("step")
        if found is None:
            found = next((g.get("step") for g in inner["param_groups"] if group in g["params"]), None)
        return step if found is None else step_count(found, "step")

    def _groups(self, shapes: Sequence[Shapes]) -> tuple[Group, ...]:
        return tuple(
            Group(
                params=tuple(name for index in group["params"] for name in shapes[index]),
                options={k: plain_option(v) for k, v in group.items() if k not in ("params", "step")},
            )
            for group in self._inner[0]["param_groups"]
        )

    def _frozen(self, name: str, shape: tuple[int, ...]) -> WeightDecl:
        pieces = self._frozen_pieces(name)
        if sum(map(len, pieces)) < math.prod(shape):
            raise CheckpointError(
                f"the frozen parameter {name!r} has {sum(map(len, pieces)):,} elements, but its shape {shape}; "
                "a *_model_states.pt is missing or of another checkpoint"
            )
        return WeightDecl(shape, dtype_name(pieces[0].dtype))

    def _frozen_pieces(self, name: str) -> list[Tensor]:
        """By rank in stage 3; whole, once, in the others."""
        stage3 = "fp32_flat_groups" in self._shards[0]
        files = self._model if stage3 else self._model[:1]
        return [require_dense(_dict(each)["frozen_param_fragments"][name], name).reshape(-1) for each in files]

    # ---- values

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """See ``Reader.read``. Copies nothing but a range that is in several files."""
        if name in self._buffers:
            return self._buffers[name].detach().reshape(-1)[start:stop]
        if not self.content.params[name].trained:
            return _range(self._frozen_pieces(name), start, stop)
        pieces = [self._piece(segment, kind) for segment in self._segments[name]]
        values = _range(pieces, start, stop)
        return values if kind == WEIGHT else values.float()

    def _piece(self, segment: Segment, kind: str) -> Tensor:
        if kind == WEIGHT:
            flat = self._flats[segment.rank][segment.group]
        else:
            flat = self._inner[segment.rank]["state"][segment.group][kind].detach()
        return flat[segment.start : segment.stop]

    def close(self) -> None:
        """See ``Reader.close``."""
        self._optim, self._model, self._flats, self._inner, self._shards = [], [], [], [], []
        self._buffers = {}


def buffers_of(model: Mapping[str, Any]) -> dict[str, Tensor]:
    """The persistent buffers in a file of model states. Raises CheckpointError or KeyError if one is missing."""
    names = model.get("buffer_names") or []
    if not isinstance(names, list):
        raise TypeError(f"buffer_names is {type(names).__name__}")
    return {name: require_dense(_dict(model["module"])[name], name) for name in names}


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


def _range(pieces: Sequence[Tensor], start: int, stop: int) -> Tensor:
    """Elements of the concatenation of 1D tensors; a view if they are in one."""
    parts = []
    begin = 0
    for piece in pieces:
        low, high = max(start, begin), min(stop, begin + len(piece))
        if low < high:
            parts.append(piece[low - begin : high - begin])
        begin += len(piece)
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device="cpu")


def _flat(value: Any) -> Tensor:
    """A partition. Raises CheckpointError for anything else."""
    if not isinstance(value, Tensor) or value.dtype not in _FLOATS:
        raise CheckpointError(f"a partition is {type(value).__name__}, not a floating-point tensor (on NVMe?)")
    return require_dense(value, "a partition").reshape(-1)


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} where an object belongs")
    return value


def _shapes(group: Any) -> Shapes:
    shapes = {}
    for name, shape in _dict(group).items():
        if not isinstance(name, str) or not is_shape(list(shape)):
            raise ValueError(f"{name!r} has the shape {str(shape)[:80]}")
        shapes[name] = tuple(shape)
    return shapes


def step_count(value: Any, name: str) -> int:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 1 << 53:
        raise ValueError(f"{name} is {str(value)[:80]}")
    if number != int(number):
        raise ValueError(f"{name} is {number}")
    return int(number)
