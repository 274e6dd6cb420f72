"""Weights from an iterator of (name, tensor) in any order: gathered into units, each of which is sent once complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor, nn

from rayzero.checkpoint.files.tensor_file import tensor_digest
from rayzero.convert.fit import Wanted, misfits
from rayzero.convert.weights import WeightDecl, Weights, declare_weight
from rayzero.engine.start.opaque import require_own_bytes
from rayzero.engine.units.partition import UnitPlan
from rayzero.errors import CheckpointError
from rayzero.layout.model_layout import UnitLayout

Load = Callable[[int, Tensor], Future[None]]


def unit_vector(unit: UnitLayout) -> Tensor:
    """Zeros for a unit's initial values, as ``ParameterStore.load`` takes them."""
    return torch.zeros(unit.numel, dtype=unit.initial_dtype, device="cpu")


def require_fit(source: object, model: nn.Module, problems: Sequence[str]) -> None:
    """Raise CheckpointError if there are problems."""
    if problems:
        raise CheckpointError(f"{source} does not fit this {type(model).__name__}: {'; '.join(problems)}")


def take_stream(
    weights: Weights, model: nn.Module, plan: UnitPlan, wanted: Sequence[Wanted], load: Load | None
) -> dict[str, Tensor]:
    """Read the stream to its end, loading units; returns the values of buffers. ``load``: None if only buffers are
    used.

    Raises CheckpointError as soon as a tensor does not fit, and at the end if some are missing."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    by_name = {name: one for one in wanted for name in one.names}
    gathered = _Gathered(plan.layout.units, load)
    buffers: dict[str, Tensor] = {}
    seen: dict[str, WeightDecl] = {}
    digests: dict[str, str] = {}  # of tied ones
    for name, tensor in weights.stream(model, wanted):
        one = by_name.get(name)
        decl = declare_weight(name, tensor)
        problems = misfits([one] if one else [], {name: decl}, strict=weights.strict)
        if name in seen:
            problems.append(f"{name!r} comes twice")
        seen[name] = decl
        if one is not None and len(one.names) > 1 and not problems:
            first, digest = one.names[0], tensor_digest(tensor)
            if digests.setdefault(first, digest) != digest:
                problems.append(f"the names of {first!r}, which is tied in the model, have different values")
        require_fit("the stream of weights", model, problems)
        if one is not None:
            first = next(alias for alias in one.names if alias in tensors)
            held = tensors[first]
            if isinstance(held, nn.Parameter):
                require_own_bytes("the stream of weights", first, held, tensor)
                gathered.take(first, tensor)
            else:
                buffers[first] = tensor.detach().clone()
    lacking = [
        f"it lacks {one.names[0]!r}, which is on the meta device" for one in wanted if _is_lacking(one, seen, tensors)
    ]
    require_fit("the stream of weights", model, misfits(wanted, seen, strict=weights.strict) or lacking)
    gathered.take_rest(tensors)
    return buffers


def _is_lacking(one: Wanted, seen: dict[str, WeightDecl], tensors: dict[str, Tensor]) -> bool:
    return not any(name in seen for name in one.names) and any(tensors[n].is_meta for n in one.names if n in tensors)


class _Gathered:
    """Units of which some parameters have come. Knows a parameter only by its first name in the layout."""

    def __init__(self, units: Sequence[UnitLayout], load: Load | None) -> None:
        self._load = load
        self._place = {slot.name: (unit, slot) for unit in units for slot in unit.slots}
        self._awaited = {unit.index: {slot.name for slot in unit.slots} for unit in units}
        self._flats: dict[int, Tensor] = {}  # freed by: the unit's last parameter

    def take(self, name: str, value: Tensor) -> None:
        """Take one parameter's values. A repeat (another name of a tied parameter) changes nothing."""
        unit, slot = self._place[name]
        awaited = self._awaited[unit.index]
        if self._load is None or name not in awaited:
            return
        if unit.index not in self._flats:
            self._flats[unit.index] = unit_vector(unit)
        self._flats[unit.index][slot.start : slot.stop].view(slot.shape).copy_(value.detach())
        awaited.remove(name)
        if not awaited:
            self._load(unit.index, self._flats.pop(unit.index)).result()

    def take_rest(self, tensors: dict[str, Tensor]) -> None:
        """Fill parameters that did not come with the model's own values."""
        for names in self._awaited.values():
            for name in list(names):
                self.take(name, tensors[name])
