"""Whole units' values beside those that compute: exact ones read from the owners, others put in their place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rayzero.engine.units.param_unit import ParamUnit
from rayzero.engine.units.unit_cache import UnitCache
from rayzero.protocol.bits import same_bits
from rayzero.protocol.messages import COMPUTE, MASTER
from rayzero.protocol.store import ParameterStore


class UnitValues:
    """What the owners have of a unit, with what this rank has written.

    Knows masters, optimizer states and the caller's values; not modules, gradients or steps, nor who asks."""

    def __init__(self, store: ParameterStore, cache: UnitCache) -> None:
        self._store, self._cache = store, cache

    def masters(self, unit: ParamUnit) -> Tensor:
        """A unit's exact values with what this rank has written: 1D, unit.numel elements, host memory; fp32, or the
        unit's dtype where it is frozen and that dtype holds it exactly. Asks no other rank."""
        written = self._cache.writes.values(unit)
        if not unit.layout.has_master:
            return self._cache.fetch_flat(unit, COMPUTE) if written is None else written.clone()
        flat = self._cache.fetch_flat(unit, MASTER)
        if written is None:
            return flat
        return torch.where(same_bits(written, self._cache.fetch_flat(unit, COMPUTE)), flat, written.float())

    def write(self, unit: ParamUnit, kind: str, values: Tensor) -> None:
        """Put ``values`` (1D, unit.numel elements, fp32) in place of what the owners have of ``kind``, which is no
        parameter. Every rank calls it with the same."""
        self._store.write(unit.index, self._cache.version, kind, values).result()

    def load(self, unit: ParamUnit, values: Mapping[int, Tensor]) -> None:
        """Put a caller's tensors, by slot, in place of parameters; every rank calls it with the same, after what was
        written has gone to the owners."""
        flat = self.masters(unit)
        with torch.no_grad():
            for i, value in values.items():
                slot = unit.layout.slots[i]
                flat[slot.start : slot.stop].view(slot.shape).copy_(value)
        self._cache.overwrite(unit, MASTER if unit.layout.has_master else COMPUTE, flat)
        unit.count_writes(list(values))
        unit.settle_writes()
