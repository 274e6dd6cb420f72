"""Reads a RayZero checkpoint as a source: masters, states, step counts and groups; not the ranks' loop states."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rayzero.checkpoint.manifest import slots_of
from rayzero.checkpoint.reader import CheckpointReader
from rayzero.checkpoint.state_values import unpack
from rayzero.convert.formats.content import WEIGHT, Content, OptimizerGroup, Param, Reader, WeightDecl, damaged
from rayzero.errors import CheckpointError
from rayzero.layout.model_layout import ParamSlot, UnitLayout, dtype_name
from rayzero.protocol.messages import COMPUTE, MASTER


class RayZeroReader(Reader):
    """An open RayZero checkpoint. Bytes are compared with their hashes when they are first read."""

    def __init__(self, folder: Path | str, *, states: bool = True) -> None:
        """states: False leaves the optimizer's states out. Raises CheckpointError if the checkpoint is damaged."""
        self._reader = CheckpointReader(folder)
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
            updates=self._reader.slot_step(slot.name),
        )

    def _loop_state(self) -> tuple[tuple[OptimizerGroup, ...], tuple[str, ...]]:
        """The parameter groups, and the names that the loop gave to ``rayzero.track``: their states are for the loop
        that saved them."""
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
