"""The optimizer's state in torch's own format: read from the owners, and given to them.

What a class keeps is found out by stepping it once on a small parameter (owner/update/elementwise.py): tensors of the
parameter's shape, which the owners have as flat vectors by the same name, and numbers, which fill their parameter's
range there. ``step`` is the owners' own count of a parameter's updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.engine import Engine
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.kernels.optimizer_class import is_scalar, probe, scalar_like, state_template
from rayzero.protocol.messages import STEP, Hyper

State = dict[str, Any]  # of one parameter: name -> tensor or number

_HOW = {"fused": None, "foreach": None, "capturable": False}  # options that say how a step is computed, not what


class StateFormat:
    """What an optimizer class keeps for the parameters of each group.

    Knows names and kinds of values; not owners or units."""

    def __init__(self, cls: type[torch.optim.Optimizer], hyper: Sequence[Hyper]) -> None:
        """``hyper``: each group's options."""
        self._cls = cls
        plain = [{**options, **{name: how for name, how in _HOW.items() if name in options}} for options in hyper]
        self._initial = [state_template(cls, options, stepped=False) for options in plain]
        self._stepped = [state_template(cls, options) for options in plain]

    def of(self, group: int, steps: int) -> State:
        """An example of the state of a parameter that was updated ``steps`` times."""
        return self._stepped[group] if steps else self._initial[group]

    def kinds(self, groups: Sequence[int]) -> list[str]:
        """Names that the owners keep something for, besides the step count."""
        return sorted({name for group in groups for name in self._stepped[group]} - {STEP})

    def check(self, name: str, group: int, state: Mapping[str, Any], shape: tuple[int, ...]) -> None:
        """Raise ConfigError, naming the parameter, where a state is none of this class and options, or of another
        shape."""
        if sorted(state) not in (sorted(self._initial[group]), sorted(self._stepped[group])):
            raise ConfigError(
                f"the optimizer state of {name!r} has {sorted(state)}, {self._cls.__name__} with this group's options "
                f"keeps {sorted(self._stepped[group])}; load the state of the same class and options"
            )
        for kind, value in state.items():
            if not is_scalar(self._stepped[group][kind]) and tuple(value.shape) != shape:
                raise ConfigError(
                    f"{kind} of {name!r} has shape {tuple(value.shape)} in the optimizer state, the parameter {shape}"
                )


def read_states(engine: Engine, form: StateFormat) -> dict[nn.Parameter, State]:
    """The states of all parameters that have one: complete fp32 tensors on the CPU, true shapes. Waits for the last
    step's update, and for no other rank."""
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


def check_states(engine: Engine, form: StateFormat, states: Mapping[int, State]) -> None:
    """Raise, before anything is changed, where ``states`` (by id of the Parameter) cannot be those of the engine's.

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


def write_states(engine: Engine, form: StateFormat, states: Mapping[int, State]) -> None:
    """Give the owners the states of all parameters; one that ``states`` (by id of the Parameter) has none of was never
    updated. Unit by unit; every rank calls it with the same."""
    for unit, groups in _trained(engine):
        mine = {slot: states.get(id(unit.params[slot]), {}) for slot in groups}
        engine.values.write(unit, STEP, _filled(unit, {slot: _step_count(state) for slot, state in mine.items()}))
        for kind in form.kinds(list(groups.values())):
            values = {slot: state[kind] for slot, state in mine.items() if kind in state}
            engine.values.write(unit, kind, _filled(unit, values))


def check_group(cls: type[torch.optim.Optimizer], prepared: Sequence[Hyper], added: Hyper) -> None:
    """Raise UnsupportedError where a group added after prepare keeps states that the owners have no memory for, or
    where its options make the class mix elements."""
    known = {name for group in range(len(prepared)) for name in StateFormat(cls, prepared).of(group, 1)}
    new = sorted(set(StateFormat(cls, [added]).of(0, 1)) - known)
    if new:
        raise UnsupportedError(
            f"a parameter group added after rayzero.prepare() keeps {', '.join(new)}, which no group at prepare() did; "
            "use the same options (amsgrad, momentum, ...) or add it before"
        )
    if cls not in (torch.optim.Adam, torch.optim.AdamW):
        probe(cls, added)


# ---- small parts ------------------------------------------------------------------------------------------------


def _trained(engine: Engine) -> Iterator[tuple[ParamUnit, dict[int, int]]]:
    """Each unit with slots that an optimizer trains: slot -> group."""
    for unit in engine.units:
        if unit.index in engine.trained.of_unit:
            yield unit, engine.trained.groups_of(unit.index)


def _steps(counts: Tensor, unit: ParamUnit, slot: int) -> int:
    layout = unit.layout.slots[slot]
    return int(counts[layout.start]) if layout.numel else 0  # nobody counts the updates of nothing


def _piece(flat: Tensor, unit: ParamUnit, slot: int, like: Any) -> Any:
    layout = unit.layout.slots[slot]
    if is_scalar(like):
        return scalar_like(like, float(flat[layout.start]))
    return flat[layout.start : layout.stop].view(layout.shape).clone()


def _step_count(state: State) -> float:
    """1 stands for any number where the class does not count."""
    return float(state.get(STEP, 1)) if state else 0.0


def _filled(unit: ParamUnit, values: Mapping[int, Any]) -> Tensor:
    """A unit's flat vector, fp32, with a tensor or a number in each slot's range; zero elsewhere."""
    flat = torch.zeros(unit.layout.numel)
    for slot, value in values.items():
        layout = unit.layout.slots[slot]
        flat[layout.start : layout.stop].view(layout.shape).copy_(torch.as_tensor(value))
    return flat
