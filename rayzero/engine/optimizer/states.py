"""Reads the optimizer's state from the owners, and writes it to them, in torch's own format.

To find out what state a class keeps, we step it once on a small parameter (kernels/optimizer_class.py). Tensors of the
parameter's shape are flat vectors of the same name at the owners; a number fills its parameter's range there. ``step``
is the owners' own count of a parameter's updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.engine import Engine
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.kernels import ADAMS
from rayzero.kernels.optimizer_class import OptimizerMaker, State, is_scalar, on_cpu, scalar_like, state_template
from rayzero.kernels.optimizer_trial import refuse_vectors, require_owned
from rayzero.modes import outside_modes
from rayzero.protocol.messages import STEP, Hyper


class StateFormat:
    """What an optimizer class keeps for the parameters of each group.

    Knows names and kinds of values; not owners or units."""

    def __init__(self, make: OptimizerMaker, hyper: Sequence[Hyper]) -> None:
        """``hyper``: each group's options."""
        self._make = make
        self._initial = [state_template(make, on_cpu(options), stepped=False) for options in hyper]
        self._stepped = [state_template(make, on_cpu(options)) for options in hyper]

    def of(self, group: int, steps: int) -> State:
        """A template of the state of a parameter that was updated ``steps`` times."""
        return self._stepped[group] if steps else self._initial[group]

    def kinds(self, groups: Sequence[int]) -> list[str]:
        """Names of the states that the owners keep, without the step count."""
        return sorted({name for group in groups for name in self._stepped[group]} - {STEP})

    def check(self, name: str, group: int, state: Mapping[str, Any], shape: tuple[int, ...]) -> None:
        """Raise ConfigError, naming the parameter, if a state is not of this class and options, or has another
        shape."""
        if sorted(state) not in (sorted(self._initial[group]), sorted(self._stepped[group])):
            raise ConfigError(
                f"the optimizer state of {name!r} has {sorted(state)}, but {self._make.cls.__name__} with this group's "
                f"options keeps {sorted(self._stepped[group])}; load a state of the same class and options"
            )
        for kind, value in state.items():
            if not is_scalar(self._stepped[group][kind]) and tuple(value.shape) != shape:
                raise ConfigError(
                    f"{kind} of {name!r} has shape {tuple(value.shape)} in the optimizer state, but the parameter "
                    f"has shape {shape}"
                )


@outside_modes
def read_states(engine: Engine, form: StateFormat) -> dict[nn.Parameter, State]:
    """The states of all parameters that have one: complete fp32 CPU tensors in the parameters' shapes. Waits for the
    last step's update, but for no other rank."""
    found: dict[nn.Parameter, State] = {}
    for unit, groups in _trained(engine):
        counts = engine.cache.fetch_flat(unit, STEP)
        states = {slot: form.of(group, _steps(counts, unit, slot)) for slot, group in groups.items()}
        kinds = {kind for state in states.values() for kind in state} - {STEP}
        flats = {STEP: counts} | {kind: engine.cache.fetch_flat(unit, kind) for kind in sorted(kinds)}
        for slot, like in states.items():
            if like:
                found[unit.params[slot]] = {k: _piece(flats[k], unit, slot, value) for k, value in like.items()}
    return found


@outside_modes
def check_states(engine: Engine, form: StateFormat, states: Mapping[int, State]) -> None:
    """Check, before anything is changed, that ``states`` (by id of the Parameter) fit the engine's parameters.

    Raises ConfigError (see ``StateFormat.check``), and UnsupportedError for a parameter that no group trains."""
    for unit in engine.units:
        groups = engine.trained.groups_of(unit.index)
        for slot, param in enumerate(unit.params):
            state, layout = states.get(id(param)), unit.layout.slots[slot]
            if state and slot not in groups:
                raise UnsupportedError(
                    f"the optimizer state to load has an entry of {layout.name!r}, which was frozen at "
                    "rayzero.prepare() and has no state here"
                )
            if state:
                form.check(layout.name, groups[slot], state, layout.shape)


@outside_modes
def write_states(engine: Engine, form: StateFormat, states: Mapping[int, State]) -> None:
    """Write the states of all parameters to the owners, unit by unit. A parameter that ``states`` (by id of the
    Parameter) lacks becomes one that was never updated. Every rank calls it with equal ``states``."""
    for unit, groups in _trained(engine):
        mine = {slot: states.get(id(unit.params[slot]), {}) for slot in groups}
        engine.values.write(unit, STEP, _filled(unit, {slot: _step_count(state) for slot, state in mine.items()}))
        for kind in form.kinds(list(groups.values())):
            values = {slot: state[kind] for slot, state in mine.items() if kind in state}
            engine.values.write(unit, kind, _filled(unit, values))


def check_group(
    make: OptimizerMaker, prepared: Sequence[Hyper], added: Hyper, group: Mapping[str, Any], engine: Engine
) -> None:
    """Raise UnsupportedError if a group added after prepare keeps states that the owners have no memory for, or the
    class cannot run there with its options (``added``) and parameters (of ``group``)."""
    known = {name for group in range(len(prepared)) for name in StateFormat(make, prepared).of(group, 1)}
    new = sorted(set(StateFormat(make, [added]).of(0, 1)) - known)
    if new:
        raise UnsupportedError(
            f"a parameter group added after rayzero.prepare() keeps {', '.join(new)}, which no group at prepare() "
            f"did; use the same options (amsgrad, momentum, ...) or add the group before"
        )
    if make.cls not in ADAMS:
        verdict = require_owned(make, added, whole=engine.layout.whole_parameters)
        refuse_vectors(make, [group], [verdict], {id(p): name for name, p in engine.model.named_parameters()})


# ---- small parts ------------------------------------------------------------------------------------------------


def _trained(engine: Engine) -> Iterator[tuple[ParamUnit, dict[int, int]]]:
    """Each unit that has slots which an optimizer trains, with slot -> group."""
    for unit in engine.units:
        if unit.index in engine.trained.of_unit:
            yield unit, engine.trained.groups_of(unit.index)


def _steps(counts: Tensor, unit: ParamUnit, slot: int) -> int:
    layout = unit.layout.slots[slot]
    return int(counts[layout.start]) if layout.numel else 0  # a parameter without elements has no count of updates


def _piece(flat: Tensor, unit: ParamUnit, slot: int, like: Any) -> Any:
    layout = unit.layout.slots[slot]
    if is_scalar(like):
        return scalar_like(like, float(flat[layout.start]))
    return flat[layout.start : layout.stop].view(layout.shape).clone()


def _step_count(state: State) -> float:
    """The number of updates; 1 for any number if the class does not count them."""
    return float(state.get(STEP, 1)) if state else 0.0


def _filled(unit: ParamUnit, values: Mapping[int, Any]) -> Tensor:
    """A unit's flat vector (1D, fp32) with a tensor or a number in each slot's range, and zero between them."""
    flat = torch.zeros(unit.layout.numel, dtype=torch.float32, device="cpu")
    for slot, value in values.items():
        layout = unit.layout.slots[slot]
        flat[layout.start : layout.stop].view(layout.shape).copy_(
            torch.as_tensor(value, dtype=torch.float32, device="cpu")
        )
    return flat
