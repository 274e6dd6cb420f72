"""Reads units' exact values from the owners, and replaces them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rayzero.engine.units.param_unit import ParamUnit
from rayzero.engine.units.unit_cache import UnitCache
from rayzero.modes import outside_modes
from rayzero.protocol.bits import same_bits
from rayzero.protocol.messages import COMPUTE, MASTER
from rayzero.protocol.store import ParameterStore


class UnitValues:
    """The owners' values of units, with what this rank has written. Knows masters, optimizer states and the caller's
    values; not modules, gradients or steps."""

    def __init__(self, store: ParameterStore, cache: UnitCache) -> None:
        self._store, self._cache = store, cache

    @outside_modes
    def masters(self, unit: ParamUnit) -> Tensor:
        """A unit's exact values with what this rank has written: 1D, unit.numel elements, host memory; fp32, or the
        unit's dtype if it is frozen and that dtype holds the values exactly. Waits for no other rank."""
        written = self._cache.writes.values(unit)
        if not unit.layout.has_master:
            return self._cache.fetch_flat(unit, COMPUTE) if written is None else written.clone()
        flat = self._cache.fetch_flat(unit, MASTER)
        if written is None:
            return flat
        return torch.where(same_bits(written, self._cache.fetch_flat(unit, COMPUTE)), flat, written.float())

    @outside_modes
    def write(self, unit: ParamUnit, kind: str, values: Tensor) -> None:
        """Replace what the owners have of ``kind`` (an optimizer state) by ``values`` (1D, unit.numel elements, fp32).
        Every rank calls it with equal values."""
        self._store.write(unit.index, self._cache.version, kind, values).result()

    @outside_modes
    def load(self, unit: ParamUnit, values: Mapping[int, Tensor]) -> None:
        """Replace parameters by the caller's tensors (slot -> tensor of the parameter's shape, any floating dtype).
        Every rank calls it with equal values, once earlier writes have gone to the owners."""
        flat = self.masters(unit)
        with torch.no_grad():
            for i, value in values.items():
                slot = unit.layout.slots[i]
                flat[slot.start : slot.stop].view(slot.shape).copy_(value)
        self._cache.overwrite(unit, MASTER if unit.layout.has_master else COMPUTE, flat)
        unit.count_writes(list(values))
        unit.settle_writes()
