"""Keeps what the user has written into this rank's parameters until the owners have it.

[Note: writes] A rank computes with its own copy and reads it: writing, reading back and evaluating are local, and
nobody waits. The owners get the values with the next call that every rank makes anyway (clip, step, save_checkpoint),
in unit order (unit_cache.py). Only the content at that call counts: a unit whose bits equal the published ones again
was not written.

A write raises a version counter, the Parameter's or that of ``.data``. A write through a numpy alias does not, so a
unit whose bytes were handed out outside forward is compared with their digest. When a written unit is resharded, its
content is kept in host memory and put back at the next unshard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayzero.engine.step_clock import LoopMoments
from rayzero.engine.units.param_unit import ParamUnit, UnitState
from rayzero.protocol.messages import digest_of


class WrittenUnits:
    """Units whose content differs from the published version on this rank.

    Knows contents; not why units come or go, nor the owners."""

    def __init__(self) -> None:
        self._written: set[int] = set()  # units that are up and hold the user's content
        self._aside: dict[int, Tensor] = {}  # resharded units' content: 1D, host. freed by: put_back, settle
        self.came_back_at = -1  # the open step of a rank that has come back: its former life may have made its writes
        self.loop: LoopMoments | None = None  # decides about each write before it is sent to the owners
        self._lent: dict[int, str] = {}  # units whose bytes were handed out outside forward -> their digest then

    def lend(self, unit: ParamUnit) -> None:
        """An operation outside forward has ended: if its result shares the unit's memory, take a digest of it. (CUDA
        memory has no numpy aliases.)"""
        if unit.index in self._lent or unit.state is not UnitState.UNSHARDED or not unit.pinned_slots():
            return
        if not self.has(unit) and _flat(unit).device.type == "cpu":
            self._lent[unit.index] = digest_of(_flat(unit))

    def mark(self, unit: ParamUnit) -> None:
        """The unit is up and may have been written to in any way."""
        self._written.add(unit.index)

    def has(self, unit: ParamUnit) -> bool:
        """Whether the unit may hold content that the user wrote."""
        index = unit.index
        if unit.state is not UnitState.UNSHARDED or index in self._written:
            return index in self._written or index in self._aside
        if unit.was_written() or (index in self._lent and digest_of(_flat(unit)) != self._lent[index]):
            self._written.add(index)
        return index in self._written

    def values(self, unit: ParamUnit) -> Tensor | None:
        """The content of a unit that was written to: 1D, unit.numel elements, the unit's dtype, host memory; None for
        others."""
        if not self.has(unit):
            return None
        aside = self._aside.get(unit.index)
        return aside if aside is not None else _flat(unit).cpu()

    def set_aside(self, unit: ParamUnit) -> None:
        """The unit is about to be resharded: keep what was written."""
        if self.has(unit):
            with torch.inference_mode(False):
                self._aside[unit.index] = _flat(unit).to("cpu", copy=True)
        self._written.discard(unit.index)
        self._lent.pop(unit.index, None)

    def put_back(self, unit: ParamUnit) -> None:
        """The unit is up: copy what was written over the published content."""
        aside = self._aside.pop(unit.index, None)
        if aside is not None:
            _flat(unit).copy_(aside)
            self._written.add(unit.index)

    def restore(self, index: int, values: Tensor) -> None:
        """A former life of this rank had written ``values`` into a unit, and the owners may not have them."""
        self._aside[index] = values

    def sending(self, unit: ParamUnit, kind: str, values: Tensor) -> bool:
        """A write is about to be sent: see ``LoopMoments``."""
        return self.loop is None or self.loop.sending(unit.index, kind, values)

    def aside(self) -> list[int]:
        """Units whose written content waits in host memory."""
        return list(self._aside)

    def settle(self, unit: ParamUnit) -> None:
        """The unit's content equals the published version: forget its writes."""
        self._written.discard(unit.index)
        self._aside.pop(unit.index, None)
        unit.settle_writes()
        if self._lent.pop(unit.index, None) is not None:
            self.lend(unit)


def _flat(unit: ParamUnit) -> Tensor:
    assert unit.buffer is not None
    return unit.buffer.flat
