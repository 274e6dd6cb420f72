"""RayZero checkpoints as a source and as what is made of any other: masters, states, step counts and groups.

A run restores parameters by their names, whatever the number of its owners. So one writer cuts everything into pieces
of the shard grid, and begins an owner's file whenever the last one is full. A source without moments gives those that
Adam has before its first update: zeros, after no update. Ranks' loop states are left out in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayzero.checkpoint.manifest import grid_of, owner_file_name, slots_of
from rayzero.checkpoint.reader import CheckpointReader
from rayzero.checkpoint.state_values import pack, unpack
from rayzero.checkpoint.tensor_file import DeferredTensor
from rayzero.checkpoint.writer import (
    check_target,
    commit_checkpoint,
    discard_staging,
    staging_path,
    write_rank_state,
    write_tensors,
)
from rayzero.convert.formats.content import (
    FLOATS,
    WEIGHT,
    Content,
    OptimizerGroup,
    Param,
    Reader,
    WeightDecl,
    cut_into_files,
    damaged,
)
from rayzero.errors import CheckpointError, UnsupportedError
from rayzero.kernels.optimizer_class import Optimizers, path_of
from rayzero.layout.model_layout import ModelLayout, ParamSlot, UnitLayout, dtype_from_name, dtype_name, lay_out_unit
from rayzero.protocol.messages import CLASS, COMPUTE, MASTER, CheckpointInfo, FileEntry, ModelSpec

ADAMW = "torch.optim.adamw:AdamW"
_ADAMS = (ADAMW, "torch.optim.adam:Adam")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_ADAM_STATES = {*_MOMENTS, "max_exp_avg_sq"}
_SHARD_NUMEL = 1 << 22  # elements of a piece at most: 16 MiB in memory at a time


class RayZeroReader(Reader):
    """An open RayZero checkpoint. Bytes are compared with their hashes when they are first read."""

    def __init__(self, folder: Path | str, *, states: bool = True) -> None:
        """states: False leaves the optimizer's states out. Raises CheckpointError if the checkpoint is damaged."""
        self._reader = CheckpointReader(folder)
        self._reader.hold()
        super().__init__(self._reader.directory)
        self._buffers = self._reader.buffers()
        self._values: dict[str, str] = {}  # parameter -> the kind of its widest values
        params = {slot.name: self._param(unit, slot, states) for unit, slot in slots_of(self._reader.layout)}
        groups, tracked = self._loop_state() if states else ((), ())
        self.content = Content(
            params=params,
            buffers={name: WeightDecl.of(tensor) for name, tensor in self._buffers.items()},
            tied=self._reader.tied(),
            groups=groups,
            step=self._reader.step,
            left_out=tracked,
            optimizer=self._reader.spec.optimizer,
        )

    def _param(self, unit: UnitLayout, slot: ParamSlot, states: bool) -> Param:
        self._values[slot.name] = MASTER if unit.has_master else COMPUTE
        held = set(self._reader.kinds(slot.name)) - {MASTER, COMPUTE}
        return Param(
            decl=WeightDecl(slot.shape, dtype_name(torch.float32 if unit.has_master else unit.dtype)),
            trained=unit.trainable,
            opaque=unit.opaque,
            states=tuple(sorted(held)) if states else (),
            own_shapes=self._reader.own_shapes(slot.name) if states else {},
            updates=self._reader.slot_step(slot.name),
        )

    def _loop_state(self) -> tuple[tuple[OptimizerGroup, ...], tuple[str, ...]]:
        """The groups, and the names given to ``rayzero.track``: their states are for the loop that saved them."""
        what = "parameter groups are"
        try:
            state = unpack(*self._reader.rank_state(0))
            groups = tuple(
                OptimizerGroup.of(group["params"], group["options"], ()) for group in state.get("groups", [])
            )
            what = "tracked states are"
            return groups, tuple(sorted(map(str, state.get("tracked", {}))))
        except (CheckpointError, KeyError, TypeError, AttributeError) as exc:
            raise damaged(self, f"its {what} wrong: {exc!r}") from exc

    def has_master(self, name: str) -> bool:
        """Whether the values under a name are those of a parameter's fp32 master. A buffer's name is the buffer's."""
        return name not in self._buffers and self._values.get(name) == MASTER

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        if name in self._buffers:
            return self._buffers[name].reshape(-1)[start:stop]
        return self._reader.read_slice(name, self._values[name] if kind == WEIGHT else kind, start, stop)


# ---- writing ----------------------------------------------------------------------------------------------------


def write_rayzero(reader: Reader, directory: Path, *, optimizer: str = "", max_bytes: int) -> CheckpointInfo:
    """Write the checkpoint ``directory``, complete or not at all.

    optimizer: import path of the optimizer's class that resumes from it; "": the source's, or AdamW; of several, groups
    name theirs. max_bytes: the
    most bytes of an owner's file. Raises UnsupportedError for what no run could resume, as ``_plan_of`` says."""
    check_target(directory)
    spec, kinds = _plan_of(reader.content, optimizer, directory.name)
    try:
        zeros = sorted(set().union(*kinds.values())) if spec.optimizer in _ADAMS else ()  # what a parameter lacks
        owners, entries = list[FileEntry](), _entries(reader, spec.layout, kinds, zeros)
        for held in cut_into_files(entries, lambda one: one[1].numel * one[1].dtype.itemsize, max_bytes):
            tensors = {name: values for name, values, _ in held}
            content = {name: described for name, _, described in held}
            owners.append(write_tensors(staging_path(directory), owner_file_name(len(owners)), tensors, content))
        rank = _write_rank(reader, directory)
        return commit_checkpoint(
            directory,
            step=reader.content.step,
            spec=spec,
            hyper=spec.hyper,
            slot_steps={name: param.updates for name, param in reader.content.params.items() if param.trained},
            owner_files=owners,
            rank_files=[rank],
        )
    except BaseException:
        discard_staging(directory)
        raise


# ---- decisions --------------------------------------------------------------------------------------------------


def _plan_of(content: Content, optimizer: str, run: str) -> tuple[ModelSpec, Mapping[str, tuple[str, ...]]]:
    """The spec of the checkpoint, and the states that each trained parameter has in it.

    Raises UnsupportedError for weights that neither fp32 nor a frozen unit can hold exactly, and if the optimizer's
    class is not known or its states are not in the source."""
    layout, several = _layout_of(content), any(CLASS in group.options for group in content.groups)
    optimizer = optimizer or (path_of(Optimizers) if several else content.optimizer)
    trained = {name: param.states for name, param in content.params.items() if param.trained}
    kinds = trained if optimizer == path_of(Optimizers) else dict.fromkeys(trained, _kinds_of(content, optimizer))
    group_of = {name: index for index, group in enumerate(content.groups) for name in group.params}
    default = -1 if content.groups else 0
    spec = ModelSpec(
        run=run,
        layout=layout,
        world_size=1,
        optimizer=optimizer or ADAMW,
        hyper=tuple(dict(group.options) for group in content.groups) or ({},),
        group_of=tuple(
            tuple(group_of.get(slot.name, default) if unit.trainable else -1 for slot in unit.slots)
            for unit in layout.units
        ),
    )
    return spec, kinds


def _kinds_of(content: Content, chosen: str) -> tuple[str, ...]:
    """The states of each trained parameter: those that any has in the source; without any, Adam's moments."""
    found = sorted({kind for param in content.params.values() for kind in param.states})
    if found and not chosen and not set(found) <= _ADAM_STATES:
        raise UnsupportedError(
            f"the source has the optimizer states {', '.join(found)} and does not say which optimizer they are of; "
            "name its class, such as --optimizer torch.optim.sgd:SGD"
        )
    if not found and chosen not in ("", *_ADAMS):
        raise UnsupportedError(
            f"the source has no states for optimizer {chosen!r}, and only Adam's and AdamW's begin as zeros; start "
            "from the weights instead (prepare(weights=...), init_from)"
        )
    return tuple(found) or _MOMENTS


def _layout_of(content: Content) -> ModelLayout:
    """A unit for what is trained, and one for each dtype of what is frozen, opaque parameters apart."""
    units: dict[tuple[bool, bool, str], list[tuple[str, tuple[int, ...]]]] = {}
    for name, param in content.params.items():
        if not param.opaque and param.decl.dtype not in FLOATS:
            raise UnsupportedError(
                f"parameter {name!r} is {param.decl.dtype}, and a RayZero checkpoint holds {', '.join(FLOATS)}; "
                "convert the source first"
            )
        key = (True, False, "float32") if param.trained else (False, param.opaque, param.decl.dtype)
        units.setdefault(key, []).append((name, param.decl.shape))
    return ModelLayout(
        units=tuple(
            lay_out_unit(
                i,
                f"{'model' if trained else 'opaque' if opaque else 'frozen'}:{dtype}",
                dtype_from_name(dtype, opaque=opaque),
                trained,
                params,
                opaque=opaque,
            )
            for i, ((trained, opaque, dtype), params) in enumerate(units.items())
        ),
        shard_numel=_SHARD_NUMEL,
    )


# ---- files ------------------------------------------------------------------------------------------------------


_Entry = tuple[str, DeferredTensor, dict[str, Any]]  # name in the file, values, description


def _entries(
    reader: Reader, layout: ModelLayout, kinds: Mapping[str, Sequence[str]], zeros: Sequence[str]
) -> Iterator[_Entry]:
    """A parameter's values of one kind follow each other, because a source may hold them in one place. ``kinds``: by
    parameter. ``zeros``: the states that a parameter without them begins with."""
    for unit in layout.units:
        for slot in unit.slots:
            param = reader.content.params[slot.name]
            wanted = kinds[slot.name] if unit.trainable else ()
            for kind in (WEIGHT, *(each for each in wanted if each in param.states or each in zeros)):
                own = param.own_shapes.get(kind)
                for start, stop in [(0, math.prod(own))] if own else grid_of(layout, unit, slot):
                    yield _entry(reader, unit, slot, param, kind, start, stop)


def _entry(reader: Reader, unit: UnitLayout, slot: ParamSlot, param: Param, kind: str, start: int, stop: int) -> _Entry:
    written = kind if kind != WEIGHT else MASTER if unit.has_master else COMPUTE
    described = {"param": slot.name, "kind": written, "start": start, "stop": stop, "shape": list(slot.shape)}
    if (own := param.own_shapes.get(kind)) == ():  # a number fills the parameter
        make = partial(_filled, reader, slot.name, kind, stop - start)
    elif kind == WEIGHT or kind in param.states:
        described |= {"own_shape": list(own)} if own else {}
        make = partial(lambda *part: reader.read(*part).to(unit.initial_dtype), slot.name, kind, start, stop)
    else:
        make = partial(torch.zeros, stop - start, dtype=torch.float32, device="cpu")
    values = DeferredTensor(numel=stop - start, dtype=unit.initial_dtype, make=make)
    return f"{slot.name}/{written}/{start}", values, described


def _filled(reader: Reader, name: str, kind: str, numel: int) -> Tensor:
    return torch.full((numel,), float(reader.read(name, kind, 0, 1)), dtype=torch.float32, device="cpu")


def _write_rank(reader: Reader, directory: Path) -> FileEntry:
    """What rank 0 would keep: groups and buffers. A converted checkpoint has no generators, and no loop's state."""
    content = reader.content
    groups = [{"params": list(group.params), "options": dict(group.options)} for group in content.groups]
    state, tensors = pack({"loop_state": {}, "tracked": {}, "rng": None, "groups": groups})
    buffers = {
        name: reader.read(name, WEIGHT, 0, math.prod(decl.shape)).view(decl.shape)
        for name, decl in content.buffers.items()
    }
    return write_rank_state(staging_path(directory), 0, state, tensors, buffers=buffers, tied=content.tied)
