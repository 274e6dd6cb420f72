"""Reads the optimizer's state from the owners, and writes it to them, in torch's own format.

What a class keeps for a parameter's shape, we learn from the class; owners give and take it as kinds, flat vectors of
a unit ([Note: leaves] in kernels/optimizer_states.py). ``step`` is the owners' own count of a parameter's
updates.
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
from rayzero.kernels.optimizer_class import OptimizerMaker, State
from rayzero.kernels.optimizer_states import (
    StateForms,
    described,
    flat_states,
    in_pieces,
    is_scalar,
    kinds_of,
    leaves,
    read_leaf,
    with_leaves,
)
from rayzero.kernels.optimizer_trial import refuse_vectors, require_owned
from rayzero.layout.model_layout import ParamSlot, Shape
from rayzero.modes import outside_modes
from rayzero.protocol.messages import CLASS, STEP, Hyper

_ANY_SHAPE = (8, 8)  # every class takes a matrix


Forms = Sequence[StateForms]  # what the class keeps with the options of each group


@outside_modes
def read_states(engine: Engine, forms: Forms) -> dict[nn.Parameter, State]:
    """The states of all parameters that have one: complete fp32 CPU tensors in the parameters' shapes. Waits for the
    last step's update, but for no other rank."""
    found: dict[nn.Parameter, State] = {}
    for unit, groups in _trained(engine):
        counts = engine.cache.fetch_flat(unit, STEP)
        slots = unit.layout.slots
        states = {
            slot: forms[group].of(slots[slot].shape, stepped=_steps(counts, unit, slot) > 0)
            for slot, group in groups.items()
        }
        kinds = {slot: kinds_of(like, slots[slot].shape) for slot, like in states.items()}
        wanted = {kind for each in kinds.values() for names in each.values() for kind in names} - {STEP}
        flats = {STEP: counts} | {kind: engine.cache.fetch_flat(unit, kind) for kind in sorted(wanted)}
        for slot, like in states.items():
            at, of = slice(slots[slot].start, slots[slot].stop), leaves(like)
            values = {
                name: read_leaf(of[name], [flats[kind][at] for kind in names]) for name, names in kinds[slot].items()
            }
            if like:
                found[unit.params[slot]] = with_leaves(like, values)
    return found


@outside_modes
def check_states(engine: Engine, forms: Forms, states: Mapping[int, State]) -> None:
    """Check, before anything is changed, that ``states`` (by id of the Parameter) fit the engine's parameters.

    Raises ConfigError, naming the parameter, if a state is not of its group's class and options, or has another shape,
    and UnsupportedError for a parameter that no group trains."""
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
                _check_state(layout.name, forms[groups[slot]], state, layout.shape)


def _check_state(name: str, forms: StateForms, state: State, shape: Shape) -> None:
    given, ours = leaves(state), leaves(forms.of(shape))
    if sorted(given) not in (sorted(leaves(forms.of(shape, stepped=False))), sorted(ours)):
        raise ConfigError(
            f"the optimizer state of {name!r} has {sorted(given)}, but {forms.make.cls.__name__} with this group's "
            f"options keeps {sorted(ours)}; load a state of the same class and options"
        )
    for kind, value in given.items():
        if not is_scalar(ours[kind]) and value.shape != ours[kind].shape:
            raise ConfigError(
                f"{kind} of {name!r} has shape {tuple(value.shape)} in the optimizer state, but must have "
                f"{tuple(ours[kind].shape)}, as the parameter has shape {shape}"
            )


@outside_modes
def write_states(engine: Engine, forms: Forms, states: Mapping[int, State]) -> None:
    """Write the states of all parameters to the owners, unit by unit. A parameter that ``states`` (by id of the
    Parameter) lacks becomes one that was never updated. Every rank calls it with equal ``states``."""
    for unit, groups in _trained(engine):
        mine = {slot: states.get(id(unit.params[slot]), {}) for slot in groups}
        engine.values.write(unit, STEP, _filled(unit, {slot: _step_count(state) for slot, state in mine.items()}))
        values = {slot: _flat_kinds(state, unit.layout.slots[slot]) for slot, state in mine.items()}
        slots = unit.layout.slots
        kept = [kinds_of(forms[group].of(slots[slot].shape), slots[slot].shape) for slot, group in groups.items()]
        for kind in sorted({kind for each in kept for kinds in each.values() for kind in kinds} - {STEP}):
            given = {slot: kinds[kind] for slot, kinds in values.items() if kind in kinds}
            engine.values.write(unit, kind, _filled(unit, given))


def check_group(
    make: OptimizerMaker, prepared: Sequence[Hyper], added: Hyper, group: Mapping[str, Any], engine: Engine
) -> int:
    """The group at prepare() (``prepared``: their options) that keeps the same as one added later, else the first that
    keeps more. Raises UnsupportedError if there is none, so that the owners have no memory for it, or the class cannot
    run there with its options (``added``) and parameters (of ``group``)."""
    if make.cls not in ADAMS:
        verdict = require_owned(make, added, whole=engine.layout.whole_parameters)
        refuse_vectors(make, [group], [verdict], {id(p): name for name, p in engine.model.named_parameters()})
    ours = described(StateForms(make, added).of(_ANY_SHAPE))
    known = [described(StateForms(make, options).of(_ANY_SHAPE)) for options in prepared]
    of_class = [at for at, options in enumerate(prepared) if options.get(CLASS) == added.get(CLASS)]
    if alike := [at for at in of_class if known[at] == ours] or [at for at in of_class if not ours.keys() - known[at]]:
        return alike[0]
    new = sorted(ours.keys() - {name for theirs in known for name in theirs}) or sorted(ours)
    raise UnsupportedError(
        f"a parameter group added after rayzero.prepare() keeps {', '.join(new)}, which no group at prepare() did; use "
        "the same options (amsgrad, momentum, ...) or add the group before"
    )


def switched(then: Hyper, now: Hyper) -> list[str]:
    """The options that are none, zero or False in one and not in the other, with which a class may keep other
    states."""
    return [name for name, value in now.items() if bool(value) != bool(then.get(name))]


def refuse_new_states(make: OptimizerMaker, group: int, then: Hyper, now: Hyper) -> None:
    """Raise UnsupportedError if the class keeps with options ``now`` what it did not with those at prepare (``then``):
    the owners have no memory for it. Raises ConfigError if it cannot step with them.

    Constructors are stricter than steps, so ``now`` is set in an instance that was made with ``then``, as owners do."""
    changed = ", ".join(f"{name}={now[name]!r} (was {then.get(name)!r})" for name in switched(then, now))
    kept = leaves(StateForms(make, then).of(_ANY_SHAPE)).keys()
    try:
        keeps = leaves(StateForms(make, now, made_with=then).of(_ANY_SHAPE)).keys()
    except Exception as error:  # a foreign class may raise anything
        raise ConfigError(
            f"parameter group {group} has {changed} since rayzero.prepare(), with which {make.cls.__name__} cannot "
            f"step: {type(error).__name__}: {error}"
        ) from error
    if new := sorted(keeps - kept):
        raise UnsupportedError(
            f"parameter group {group} has {changed} since rayzero.prepare(), with which the optimizer keeps "
            f"{', '.join(new)}: owners have no memory for that; set it before prepare()"
        )


# ---- small parts ------------------------------------------------------------------------------------------------


def _trained(engine: Engine) -> Iterator[tuple[ParamUnit, dict[int, int]]]:
    """Each unit that has slots which an optimizer trains, with slot -> group."""
    for unit in engine.units:
        if unit.index in engine.trained.of_unit:
            yield unit, engine.trained.groups_of(unit.index)


def _steps(counts: Tensor, unit: ParamUnit, slot: int) -> int:
    layout = unit.layout.slots[slot]
    return int(counts[layout.start]) if layout.numel else 0  # a parameter without elements has no count of updates


def _flat_kinds(state: State, slot: ParamSlot) -> dict[str, Tensor]:
    """A parameter's state by kinds: 1D fp32, one value or at most as many as the parameter has elements."""
    found: dict[str, Tensor] = {}
    for name, flat in flat_states(state, slot.shape, slot.numel, steps=-1).items():
        found |= in_pieces(name, flat, max(1, slot.numel))
    return found


def _step_count(state: State) -> float:
    """The number of updates; 1 for any number if the class does not count them."""
    return float(state.get(STEP, 1)) if state else 0.0


def _filled(unit: ParamUnit, values: Mapping[int, Any]) -> Tensor:
    """A unit's flat vector (1D, fp32) with values or a number at the start of each slot's range, and zero behind."""
    flat = torch.zeros(unit.layout.numel, dtype=torch.float32, device="cpu")
    for slot, value in values.items():
        layout = unit.layout.slots[slot]
        numel = value.numel() if isinstance(value, Tensor) else layout.numel
        flat[layout.start : layout.start + numel] = value
    return flat
