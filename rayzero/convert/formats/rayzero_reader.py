"""Reads a RayZero checkpoint as a source: masters, states, step counts and groups; not the ranks' loop states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayzero.checkpoint.manifest import slots_of
from rayzero.checkpoint.reader import CheckpointReader
from rayzero.checkpoint.state_values import unpack
from rayzero.convert.formats.content import WEIGHT, Content, Group, Param, WeightDecl, damaged, plain_option
from rayzero.errors import CheckpointError
from rayzero.layout.model_layout import ParamSlot, UnitLayout, dtype_name
from rayzero.protocol.messages import COMPUTE, MASTER


class RayZeroReader:
    """An open RayZero checkpoint. Bytes are compared with their hashes when they are first read."""

    def __init__(self, folder: Path, *, states: bool = True) -> None:
        """states: False leaves the optimizer's states out. Raises CheckpointError if the checkpoint is damaged."""
        self._reader = CheckpointReader(folder)
        self._buffers = self._reader.buffers()
        self._values: dict[str, str] = {}  # parameter -> the kind of its widest values
        params = {slot.name: self._param(unit, slot, states) for unit, slot in slots_of(self._reader.layout)}
        self.content = Content(
            params=params,
            buffers={n: WeightDecl(tuple(t.shape), dtype_name(t.dtype)) for n, t in self._buffers.items()},
            tied=self._reader.tied(),
            groups=self._groups() if states else (),
            step=self._reader.step,
            left_out=self._tracked() if states else (),
            optimizer=self._reader.spec.optimizer,
        )

    def __str__(self) -> str:
        return str(self._reader.directory)

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

    def _groups(self) -> tuple[Group, ...]:
        try:
            groups = unpack(*self._reader.rank_state(0)).get("groups", [])
            return tuple(Group(params=tuple(group["params"]), options=_plain(group["options"])) for group in groups)
        except (CheckpointError, KeyError, TypeError, AttributeError) as exc:
            raise damaged(self._reader.directory, f"its parameter groups are wrong: {exc!r}") from exc

    def _tracked(self) -> tuple[str, ...]:
        """The names that the loop gave to ``rayzero.track``: their states are for the loop that saved them."""
        try:
            return tuple(sorted(map(str, unpack(*self._reader.rank_state(0)).get("tracked", {}))))
        except (CheckpointError, KeyError, TypeError, AttributeError) as exc:
            raise damaged(self._reader.directory, f"its tracked states are wrong: {exc!r}") from exc

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """See ``Reader.read``."""
        if name in self._buffers:
            return self._buffers[name].reshape(-1)[start:stop]
        return self._reader.read_slice(name, self._values[name] if kind == WEIGHT else kind, start, stop)

    def close(self) -> None:
        """See ``Reader.close``."""
        self._reader.close()
        self._buffers = {}


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: plain_option(value) for key, value in options.items()}
