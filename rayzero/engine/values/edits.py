"""What the user has written into parameters of this rank, until the owners have it.

[Note: writes] A rank's own copy is what it computes with and reads: writing, reading what was written, and evaluating
with it are local, and nobody waits. The owners get the values with the next call that every rank takes part in anyway
(clip, step, save_checkpoint), in unit order (unit_cache.py). What counts is then the content: a unit whose bits are the
published ones again was not written.

A write moves the version counter of a Parameter, also through ``detach()`` and, outside forward, ``.data``. One through
a numpy alias does not: a unit whose bytes somebody outside forward got hold of is compared with a digest of what they
were. A unit that has to go down takes its written content to host memory, and gets it back when it comes up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayzero.engine.units.param_unit import ParamUnit, UnitState
from rayzero.protocol.bits import digest_of


class WrittenUnits:
    """Units whose content is this rank's own.

    Knows contents; not why units come or go, nor the owners."""

    def __init__(self) -> None:
        self._written: set[int] = set()  # units that are up, with the user's content
        self._aside: dict[int, Tensor] = {}  # of units that are not: 1D, host. freed by: put_back, settle
        self._lent: dict[int, str] = {}  # units whose bytes somebody held outside forward -> digest of that time

    def lend(self, unit: ParamUnit) -> None:
        """An operation outside forward has ended: where its result shares the unit's memory, note what is there. (CUDA
        memory has no numpy aliases.)"""
        if unit.index in self._lent or unit.state is not UnitState.UNSHARDED or not unit.pinned_slots():
            return
        if not self.has(unit) and _flat(unit).device.type == "cpu":
            self._lent[unit.index] = digest_of(_flat(unit))

    def mark(self, unit: ParamUnit) -> None:
        """The unit, which is up, may have been written to in any way."""
        self._written.add(unit.index)

    def has(self, unit: ParamUnit) -> bool:
        """Whether the unit's content may be the user's."""
        index = unit.index
        if unit.state is not UnitState.UNSHARDED or index in self._written:
            return index in self._written or index in self._aside
        if unit.was_written() or (index in self._lent and digest_of(_flat(unit)) != self._lent[index]):
            self._written.add(index)
        return index in self._written

    def values(self, unit: ParamUnit) -> Tensor | None:
        """The content of a unit that was written to: 1D, unit.numel elements, host memory; None for others."""
        if not self.has(unit):
            return None
        aside = self._aside.get(unit.index)
        return aside if aside is not None else _flat(unit).cpu()

    def set_aside(self, unit: ParamUnit) -> None:
        """The unit goes down: keep what was written."""
        if self.has(unit):
            with torch.inference_mode(False):
                self._aside[unit.index] = _flat(unit).to("cpu", copy=True)
        self._written.discard(unit.index)
        self._lent.pop(unit.index, None)

    def put_back(self, unit: ParamUnit) -> None:
        """The unit is up: what was written comes over the published content."""
        aside = self._aside.pop(unit.index, None)
        if aside is not None:
            _flat(unit).copy_(aside)
            self._written.add(unit.index)

    def settle(self, unit: ParamUnit) -> None:
        """The unit's content is the published one."""
        self._written.discard(unit.index)
        self._aside.pop(unit.index, None)
        unit.settle_writes()
        if self._lent.pop(unit.index, None) is not None:
            self.lend(unit)


def _flat(unit: ParamUnit) -> Tensor:
    assert unit.buffer is not None
    return unit.buffer.flat
