"""Reads DeepSpeed's universal checkpoints: a folder for each parameter, with whole tensors in it.

``ds_to_universal`` makes ``zero/NAME/fp32.pt``, ``exp_avg.pt`` and ``exp_avg_sq.pt``. From stages 1 and 2 a file is a
dict with a tensor of the parameter's shape, and ``step.pt`` is beside it; buffers, frozen parameters and other names of
tied ones have folders, too, with values that went through fp32. From stage 3 a file is one flat tensor, and only what
the optimizer trains has a folder. ``zero/optimizer_state.pt`` has the parameter groups. Beside ``zero/`` are the
``*_model_states.pt`` of the ZeRO folder: they have the shapes, and the values of all that is not trained.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from torch import Tensor

from rayzero.convert.formats.content import WEIGHT, Param, Reader, WeightDecl, damaged, require_states, step_count
from rayzero.convert.formats.model_states import ModelStates, as_dict, groups_from, updates_of
from rayzero.convert.formats.pickles import load_torch_file, require_dense
from rayzero.errors import CheckpointError, UnsupportedError

ZERO_FOLDER = "zero"
_MASTER = "fp32"
_WHOLE = re.compile(r"mp_rank_(\d+)_model_states\.pt")  # of stages 1 and 2, one a tensor-parallel rank or stage
_SHARDED = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt")  # of stage 3, one a rank
_GROUPS_FILE = "optimizer_state.pt"
_NOT_STATES = (_MASTER, "step")


class UniversalReader(Reader):
    """An open universal checkpoint. One tensor's file is mapped at a time."""

    def __init__(self, folder: Path, *, states: bool = True) -> None:
        """states: False leaves moments out. Raises CheckpointError if files are missing or damaged, UnsupportedError
        that names parameters whose values or shapes are in no file."""
        super().__init__(folder)
        self._folder = folder
        self._last: tuple[Path, Tensor] | None = None
        self._model, self._groups = self._model_states(states)
        path = folder / ZERO_FOLDER / _GROUPS_FILE
        self._optimizer = as_dict(load_torch_file(path)) if states and path.exists() else {}
        params = {path.name: self._param(path, states) for path in self._parameters()}
        groups = groups_from(self._optimizer.get("param_groups", []), self._groups)
        step = max(param.updates for param in params.values())
        self.content = self._model.content(params | self._model.params, groups, step)
        if self._model.round_robin:
            self._check_values()

    def _model_states(self, states: bool) -> tuple[ModelStates, list[dict[str, tuple[int, ...]]]]:
        """What the files beside ``zero/`` say, and the shapes by flattened group, of all stages of a pipeline."""
        names = sorted(path.name for path in self._folder.iterdir())
        sharded = [name for name in names if _SHARDED.fullmatch(name)]
        whole = [name for name in names if _WHOLE.fullmatch(name)]
        files = [as_dict(load_torch_file(self._folder / name)) for name in sharded or whole]
        found = ModelStates(files or [{}], sharded=bool(sharded), everything=states)
        if len(whole) > 1 and found.params:
            raise UnsupportedError(
                f"its frozen parameters, {next(iter(found.params))!r} among them, are in slices of tensor parallelism, "
                "which nothing in it says how to join"
            )
        groups: list[dict[str, tuple[int, ...]]] = [dict(group) for group in found.groups]
        for file in files[1:] if whole else []:
            for index, group in enumerate(ModelStates([file | {"module": {}}], sharded=False).groups):
                groups[index:] = groups[index:] or [{}]
                groups[index] = dict(group) | groups[index]
        return found, groups

    def _parameters(self) -> list[Path]:
        """The folders of what is trained. Raises CheckpointError if one is missing."""
        zero = self._folder / ZERO_FOLDER
        folders = [path for path in sorted(zero.iterdir()) if path.is_dir()]
        found = [path for path in folders if path.name not in self._model]
        if not found:
            raise CheckpointError(f"{zero} has no folder of a parameter")
        if missing := sorted(self._model.optimized.keys() - {path.name for path in found}):
            raise CheckpointError(f"{zero} has no folder of the parameter {missing[0]!r}, which the optimizer trains")
        return found

    def _param(self, folder: Path, states: bool) -> Param:
        decl = WeightDecl.of(self._tensor(folder, _MASTER))
        kinds = sorted(p.stem for p in folder.glob("*.pt") if p.stem not in _NOT_STATES) if states else []
        for kind in kinds:
            require_states(folder.name, decl, kind, WeightDecl.of(self._tensor(folder, kind)), self)
        return Param(decl=decl, states=tuple(kinds), updates=self._updates(folder) if kinds else 0)

    def _updates(self, folder: Path) -> int:
        path = folder / "step.pt"
        try:
            if path.exists():
                return step_count(load_torch_file(path), "step")
            group = next((i for i, names in enumerate(self._groups) if folder.name in names), None)
            inner = self._optimizer.get("optimizer_state_dict")  # stage 3 copies that of rank 0
            found = updates_of(as_dict(inner), group) if inner is not None and group is not None else None
            if found is None and not self._groups:
                raise UnsupportedError(
                    f"it has moments of {folder.name!r}, but neither step.pt nor a *_model_states.pt says after how "
                    "many steps; convert the weights alone (--weights-only)"
                )
            return self._model.updates if found is None else found
        except ValueError as exc:
            raise damaged(path, exc) from exc

    def _check_values(self) -> None:
        """Raise UnsupportedError if masters are not those of the model's own values: ds_to_universal 0.19.8 takes the
        partitions of round_robin_gradients apart in another order than they were put together in."""
        for name in self._model.optimized:
            low = self._model.rounded(name)
            if low is not None and not low.equal(
                self._tensor(self._folder / ZERO_FOLDER / name, _MASTER).to(low.dtype)
            ):
                raise UnsupportedError(
                    f"the values of {name!r} are not those of the model: ds_to_universal mixes parameters up that were "
                    "trained with round_robin_gradients; convert the ZeRO folder itself"
                )

    def _tensor(self, folder: Path, kind: str) -> Tensor:
        """A parameter's values, in its shape."""
        path = folder / f"{kind}.pt"
        found = load_torch_file(path)
        if isinstance(found, dict):
            return require_dense(found.get("param"), path)
        flat, shape = require_dense(found, path), self._model.optimized.get(folder.name)
        if shape is None:
            raise UnsupportedError(f"{path} is one flat tensor, and no *_model_states.pt says which shape it has")
        if flat.numel() != math.prod(shape):
            raise damaged(path, f"it has {flat.numel():,} elements, and {folder.name!r} the shape {shape}")
        return flat.reshape(shape)

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        if name in self._model:
            return self._model.read(name, start, stop)
        folder, file = self._folder / ZERO_FOLDER / name, _MASTER if kind == WEIGHT else kind
        if self._last is None or self._last[0] != folder / file:
            self._last = folder / file, self._tensor(folder, file).reshape(-1)
        values = self._last[1][start:stop]
        return values if kind == WEIGHT else values.float()
