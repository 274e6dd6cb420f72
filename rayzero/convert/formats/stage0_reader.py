"""Reads DeepSpeed's folders of stage 0: one file with the model, and a torch optimizer whose states have numbers.

[Note: whose] Nothing in the file says which name a number has, unless the optimizer was made of named parameters. Where
there are fp32 masters, DeepSpeed has rounded each to the model's own value: the parameter is the one with these bits.
If several have them, their masters may differ, and nobody can tell them apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
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
from rayzero.convert.formats.deepspeed_reader import load_model_states
from rayzero.convert.formats.model_states import ModelStates, as_dict
from rayzero.convert.formats.pickles import require_dense
from rayzero.errors import CheckpointError, UnsupportedError

_INSTEAD = (
    "make the optimizer of named_parameters(), or save with ZeRO stage 1; the model's own values are "
    "torch.load(FILE)['module']"
)

_NAMES = ("params", "param_names")  # of a group, beside its options

Key = tuple[tuple[int, ...], torch.dtype, bytes]  # shape, dtype and hash of a tensor


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
