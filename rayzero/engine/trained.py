"""Knows which parameters an optimizer trains, and in which of its groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from rayzero.engine.units.param_unit import ParamUnit
from rayzero.errors import UnsupportedError

Added = dict[int, list[int]]  # unit -> slots


class TrainedSlots:
    """Each slot's parameter group, unit by unit.

    Knows places and groups; not gradients or values."""

    def __init__(self, units: Sequence[ParamUnit], groups: Iterable[Sequence[int]]) -> None:
        """``groups``: [unit][slot] -> parameter group; < 0: no optimizer trains it."""
        self._units = units
        self._groups = [list(its) for its in groups]
        self.of_unit: dict[int, list[int]] = {}  # unit -> its trained slots, for units that have some
        for unit in units:
            self._note(unit.index)

    def groups_of(self, unit: int) -> dict[int, int]:
        """A unit's trained slots, each with its group."""
        return {slot: group for slot, group in enumerate(self._groups[unit]) if group >= 0}

    def find(self, params: Sequence[nn.Parameter]) -> Added:
        """The slots of parameters that were in no group, in unit order.

        Raises UnsupportedError for a parameter that is not in the model, was frozen at prepare, or is frozen now."""
        places = {id(param): (unit, slot) for unit in self._units for slot, param in enumerate(unit.params)}
        found: Added = {}
        for i, param in enumerate(params):
            if id(param) not in places:
                raise UnsupportedError(
                    f"parameter {i} of the added group (shape {tuple(param.shape)}) is not in the model"
                )
            unit, slot = places[id(param)]
            if not unit.layout.trainable or not param.requires_grad:
                raise UnsupportedError(
                    f"parameter {unit.layout.slots[slot].name!r} of the added group is frozen; a parameter that is "
                    f"trained later must have requires_grad=True at rayzero.prepare() and when its group is added"
                )
            found.setdefault(unit.index, []).append(slot)
        return dict(sorted(found.items()))

    def with_added(self, unit: ParamUnit, slots: Sequence[int], group: int) -> Tensor:
        """Each element's group once ``group`` has these slots: 1D, unit.numel elements, fp32, the form that owners
        take."""
        flat = torch.full((unit.layout.numel,), -1.0, dtype=torch.float32, device="cpu")
        for slot, its in {**self.groups_of(unit.index), **dict.fromkeys(slots, group)}.items():
            place = unit.layout.slots[slot]
            flat[place.start : place.stop] = its
        return flat

    def add(self, unit: int, slots: Sequence[int], group: int) -> None:
        """``group`` has these slots from now on."""
        for slot in slots:
            self._groups[unit][slot] = group
        self._note(unit)

    def _note(self, unit: int) -> None:
        slots = list(self.groups_of(unit))
        if slots:
            self.of_unit[unit] = slots
