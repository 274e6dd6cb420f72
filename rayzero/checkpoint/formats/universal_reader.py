"""Reads DeepSpeed's universal checkpoints: a folder for each parameter, with whole tensors in it.

``zero/NAME/fp32.pt``, ``exp_avg.pt``, ``exp_avg_sq.pt`` and, for stages 1 and 2, ``step.pt``. Other files beside
``zero/`` have the engine's step count, buffers, and other names of tied parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from rayzero.checkpoint.formats.content import (
    WEIGHT,
    Content,
    Param,
    WeightDecl,
    damaged,
    require_states,
)
from rayzero.checkpoint.formats.deepspeed_reader import buffers_of, step_count
from rayzero.checkpoint.formats.pickles import load_torch_file, require_dense
from rayzero.errors import CheckpointError, UnsupportedError
from rayzero.layout.model_layout import dtype_name

ZERO_FOLDER = "zero"
_MASTER = "fp32"
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_NOT_STATES = (_MASTER, "step")


class UniversalReader:
    """An open universal checkpoint. One tensor's file is mapped at a time."""

    def __init__(self, folder: Path, *, states: bool = True) -> None:
        """states: False leaves moments out. Raises CheckpointError if files are missing or damaged."""
        self._folder = folder
        self._last: tuple[Path, Tensor] | None = None
        self._model = self._model_states()
        params = {path.name: self._param(path, states) for path in self._parameters()}
        self._buffers = buffers_of(self._model)
        shared = self._model.get("shared_params") or {}
        self.content = Content(
            params=params,
            buffers={n: WeightDecl(tuple(t.shape), dtype_name(t.dtype)) for n, t in self._buffers.items()},
            tied={alias: name for alias, name in shared.items() if name in params and alias not in params},
            step=max((param.updates for param in params.values()), default=0),
        )

    def __str__(self) -> str:
        return str(self._folder)

    def _model_states(self) -> dict[str, Any]:
        for name in _MODEL_FILES:
            if (self._folder / name).exists():
                found = load_torch_file(self._folder / name)
                if not isinstance(found, dict):
                    raise damaged(self._folder / name, f"it holds a {type(found).__name__}")
                return found
        return {}

    def _parameters(self) -> list[Path]:
        zero = self._folder / ZERO_FOLDER
        found = [path for path in sorted(zero.iterdir()) if path.is_dir()]
        if not found:
            raise CheckpointError(f"{zero} has no folder of a parameter")
        return found

    def _param(self, folder: Path, states: bool) -> Param:
        weight = self._tensor(folder / f"{_MASTER}.pt")
        decl = WeightDecl(tuple(weight.shape), dtype_name(weight.dtype))
        kinds = sorted(p.stem for p in folder.glob("*.pt") if p.stem not in _NOT_STATES) if states else []
        for kind in kinds:
            state = self._tensor(folder / f"{kind}.pt")
            require_states(folder.name, decl, kind, tuple(state.shape), dtype_name(state.dtype), self._folder)
        return Param(decl=decl, states=tuple(kinds), updates=self._updates(folder) if kinds else 0)

    def _updates(self, folder: Path) -> int:
        path = folder / "step.pt"
        found = load_torch_file(path) if path.exists() else self._model.get("global_steps")
        if found is None:
            raise UnsupportedError(
                f"{self._folder} has moments of {folder.name!r}, but neither step.pt nor {_MODEL_FILES[0]} says after "
                "how many steps; convert the weights alone (--weights-only)"
            )
        try:
            return step_count(found, "step")
        except ValueError as exc:
            raise damaged(path, exc) from exc

    def _tensor(self, path: Path) -> Tensor:
        found = load_torch_file(path)
        return require_dense(found.get("param") if isinstance(found, dict) else found, path)

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """See ``Reader.read``. A view of the mapped file."""
        if name in self._buffers:
            return self._buffers[name].detach().reshape(-1)[start:stop]
        path = self._folder / ZERO_FOLDER / name / f"{_MASTER if kind == WEIGHT else kind}.pt"
        if self._last is None or self._last[0] != path:
            self._last = path, self._tensor(path).reshape(-1)
        values = self._last[1][start:stop]
        return values if kind == WEIGHT else values.float()

    def close(self) -> None:
        """See ``Reader.close``."""
        self._last = None
        self._buffers = {}
