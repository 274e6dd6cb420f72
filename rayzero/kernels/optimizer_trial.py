"""Finds out what a torch optimizer class can do: whether instances that have parts of a model train it as one does.

[Note: the trial] This is tried, not looked up. One instance trains parameters of several shapes as plain PyTorch does.
Then instances do it as owners have them: each has a part of every parameter, flat, and gets the options of each step.
Every bit of weights and states must agree. Plain PyTorch has another group with another rate, too. The parameters are
large enough for classes that change their minds by size (states in blocks from 4,096 elements on, factors from
128 x 128 on) and have 0, 1, 2 and 4 dimensions. Gradients are random, large, small, orthogonal to the weights, aligned
with them, and missing; the rate changes. Half way, the instances are made again from what a checkpoint keeps. What a
class fails at is the reason it is refused with.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from rayzero.errors import UnsupportedError
from rayzero.kernels.optimizer_class import (
    GroupEntries,
    OptimizerMaker,
    State,
    as_options,
    maker_of_group,
    options_of,
    over_matrices,
    own_option,
    own_options,
    plain_value,
    set_options,
    step_alone,
)
from rayzero.kernels.optimizer_states import (
    StateForms,
    described,
    flat_states,
    is_long,
    is_scalar,
    leaves,
    restored_state,
    unkept,
)
from rayzero.layout.model_layout import aligned
from rayzero.modes import outside_modes
from rayzero.protocol.messages import Hyper, canonical_json

Part = tuple[int, int, int]  # a parameter of the trial, and the first and last (excluded) of its elements

_STEPS, _MADE_AGAIN, _RATES = 12, 6, {4: 0.5, 9: 2.0}  # rates: from these steps on, times the first one
_WITHOUT = (3, 1)  # the step in which this parameter has no gradient

_INSTEAD = "use an element-wise optimizer (Adam, AdamW, SGD, Adagrad, RMSprop, ...)"
_IN_8_BITS = "torch.optim.AdamW with ZeroConfig(moments='int8')"
_FEWER_BITS = re.compile(r"[48]-?bit|fp8", re.IGNORECASE)  # in names of classes that keep states in fewer bits

_REFUSED = {  # reasons that are clearer than the trial's
    "LBFGS": "it needs a closure and a line search over all parameters",
    "SparseAdam": "it takes sparse gradients only",
}


@dataclass(frozen=True)
class _Shapes:
    """The parameters of a trial, and where owners might cut them: at multiples of 64 elements."""

    cut: Mapping[tuple[int, ...], Sequence[int]]  # shape -> the ends of its pieces
    small: Sequence[tuple[int, ...]] = ((), (5,))  # in one piece, which owners pad, so that torch rounds it otherwise

    def __iter__(self) -> Iterator[torch.Size]:
        return map(torch.Size, (*self.cut, *self.small))

    def whole(self) -> list[list[Part]]:
        """Instances with one parameter each."""
        return [[(index, 0, shape.numel())] for index, shape in enumerate(self)]

    def pieces(self) -> list[list[Part]]:
        """Three instances with a part of each parameter, in an order of their own; the first has the small ones."""
        ends = [(0, *ends) for ends in self.cut.values()]
        found = [[(index, each[at], each[at + 1]) for index, each in enumerate(ends)] for at in range(3)]
        return [[part for (part,) in self.whole()[len(ends) :]] + found[0], found[1], found[2][::-1]]


# The first are enough for most classes that mix elements, and cheap where these decompose matrices.
_SHAPES = (
    _Shapes(
        {(384,): (64, 256, 384), (16, 24): (192, 256, 384), (4, 96): (64, 128, 384), (8, 4, 4, 3): (128, 320, 384)}
    ),
    _Shapes(
        {  # multiples of 256 elements, because classes count in such blocks
            (8448,): (64, 4288, 8448),
            (132, 128): (4160, 12672, 16896),
            (44, 192): (4224, 4288, 8448),
            (24, 11, 8, 4): (4160, 8384, 8448),
        }
    ),
)


_MATRICES = _Shapes({(16, 24): (192, 256, 384), (4, 96): (64, 128, 384)}, small=())


@dataclass(frozen=True)
class TrialVerdict:
    """What a class can do with some options."""

    whole: bool  # whether each parameter must be whole, and may be in an instance of its own; else it may be cut
    reason: str = ""  # why owners cannot run it; "": they can
    writes: tuple[str, ...] = ()  # entries of its parameter groups that step() writes
    matrices: bool = False  # it takes parameters of two dimensions only


_verdicts: dict[tuple[type, str, str], TrialVerdict | UnsupportedError] = {}  # of this process


def require_owned(make: OptimizerMaker, hyper: Hyper, *, whole: bool = True) -> TrialVerdict:
    """What owners can do with a class. Raises UnsupportedError that names class and reason unless instances that
    each have a part of the model train it as one does. ``whole``: they have whole parameters; else these may be
    cut."""
    make, hyper = maker_of_group(make, hyper), own_options(hyper)
    refuse_known(make)
    verdict = try_class(make, hyper)
    if verdict.reason:
        raise UnsupportedError(f"{make.name} cannot run on shards: {verdict.reason}")
    if verdict.whole and not whole:
        raise UnsupportedError(
            f"{make.name} needs whole parameters with these options, and those of the groups at rayzero.prepare() let "
            "shards cut them: give it such a group there"
        )
    return verdict


def refuse_vectors(
    make: OptimizerMaker,
    groups: Sequence[Mapping[str, Any]],
    verdicts: Sequence[TrialVerdict],
    names: Mapping[int, str],
) -> None:
    """Raise UnsupportedError, naming it (``names``: by id), for a parameter without two dimensions in a group that
    takes matrices only. ``verdicts``: by group."""
    for group, verdict in zip(groups, verdicts, strict=True):
        for param in group["params"] if verdict.matrices else ():
            if param.dim() != 2:
                name = names.get(id(param), "a parameter")
                raise UnsupportedError(
                    f"{maker_of_group(make, dict(group)).name} takes matrices only, and {name!r} has shape "
                    f"{tuple(param.shape)}: give it to another optimizer, or freeze it"
                )


def refuse_known(make: OptimizerMaker) -> None:
    """Raise UnsupportedError for a class of torch that can only train whole parameters, or none."""
    if make.is_torchs and make.cls.__name__ in _REFUSED:
        raise UnsupportedError(f"{make.name} cannot run on shards: {_REFUSED[make.cls.__name__]}; {_INSTEAD}")


def try_class(make: OptimizerMaker, hyper: Hyper) -> TrialVerdict:
    """Run the class to find out. Raises UnsupportedError that names the class and the reason if instances over parts of
    a model cannot train it at all, however it is divided. A class is tried once a process with the same options."""
    asked = (make.cls, canonical_json(make.attributes), str(sorted(hyper.items(), key=lambda item: item[0])))
    if asked not in _verdicts:
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                _verdicts[asked] = _try(make, hyper)
        except UnsupportedError as exc:
            _verdicts[asked] = exc
    found = _verdicts[asked]
    if isinstance(found, UnsupportedError):
        raise UnsupportedError(str(found))
    return found


@outside_modes  # a default device is a mode
def _try(make: OptimizerMaker, hyper: Hyper) -> TrialVerdict:
    _require_numbers(make, hyper)
    verdict = TrialVerdict(whole=False)
    forms = StateForms(make, hyper)
    for every in _SHAPES:
        cheap = {shape: ends for shape, ends in every.cut.items() if every is _SHAPES[0] or not forms.is_dear(shape)}
        plain = _plain_course(make, hyper, _Shapes(cheap))
        if plain.zeroed:
            raise _refusal(make, f"its zero_grad() changes {', '.join(plain.zeroed)} of its parameter groups")
        if not verdict.whole and _trains_pieces(plain):
            verdict = TrialVerdict(whole=False, writes=_written(plain))
        else:
            verdict = _in_whole(plain)
        if verdict.reason or verdict.matrices:
            break
    return verdict


def _trains_pieces(plain: _Course) -> bool:
    """Whether instances over flat pieces of parameters get the bits of a course."""
    if plain.odd_state or plain.shaped or plain.moved:
        return False
    try:
        return plain.followed(plain.shapes.pieces(), made_again=True)
    except Exception:  # it takes no flat pieces
        return False


def _plain_course(make: OptimizerMaker, hyper: Hyper, shapes: _Shapes) -> _Course:
    """A course of the class; of those that raise something without every gradient, or with anything but matrices, one
    that has no more."""
    reason: Exception | None = None
    for of, missing in ((shapes, True), (shapes, False), (_MATRICES, True)):
        try:
            return _Course(make, hyper, of, missing=missing)
        except Exception as exc:  # a foreign class may raise anything
            reason = exc
    raise _refusal(make, f"a trial step without a closure, on dense tensors, raised {reason!r}") from reason


def _in_whole(plain: _Course) -> TrialVerdict:
    """What a class can do that does not train pieces."""
    make = plain.make
    if not plain.equals(_plain_course(make, plain.hyper, plain.shapes)):
        raise _refusal(make, "two equal trials gave different weights: it draws random numbers")
    if plain.moved:
        raise _refusal(make, "it changes parameters, or what it keeps of them, in steps without a gradient of them")
    try:
        alone = plain.followed(plain.shapes.whole())
    except Exception as exc:
        raise _refusal(make, f"a trial with a parameter in each instance raised {exc!r}") from exc
    if not alone:
        kept = f", or keeps in attributes what they do not share ({', '.join(plain.changed)})" if plain.changed else ""
        raise _refusal(make, f"parameters get other values in instances of their own: it mixes parameters{kept}")
    matrices = plain.shapes is _MATRICES
    verdict = partial(TrialVerdict, True, writes=_written(plain), matrices=matrices)
    if plain.odd_state:
        return verdict(
            f"it keeps {plain.odd_state}, not tensors and numbers that a checkpoint keeps exactly; {_INSTEAD}, or for "
            f"fewer bytes {_IN_8_BITS}"
        )
    if plain.long_numbers:
        return verdict(f"it keeps {', '.join(plain.long_numbers)} as an integer that fp32 would round; {_INSTEAD}")
    if plain.late:
        return verdict(f"{plain.late} of what it keeps have another form after a parameter's first update; {_INSTEAD}")
    if plain.followed(plain.shapes.whole(), made_again=True):
        return verdict()
    changes = f", and step() changes its attributes {', '.join(plain.changed)}" if plain.changed else ""
    return verdict(
        "an instance that is made again from its states, as when a run resumes, goes on with other values: it keeps "
        f"more than numbers and tensors in its states{changes}; {_INSTEAD}"
    )


def _refusal(make: OptimizerMaker, why: str) -> UnsupportedError:
    fewer = f", or for fewer bytes {_IN_8_BITS}" if _FEWER_BITS.search(make.cls.__name__) else ""
    return UnsupportedError(f"{make.name} cannot be offloaded: {why}; {_INSTEAD}{fewer}")


def stand_in(make: OptimizerMaker, hyper: Sequence[Hyper]) -> torch.optim.Optimizer:
    """An instance over small matrices, one in each group. Raises UnsupportedError that says why there can be none."""
    try:
        return over_matrices(make, hyper)
    except Exception as exc:
        known = ", ".join((*hyper[0], *make.attributes))
        raise _refusal(
            make,
            f"owners make instances of it from what its parameter groups and attributes say ({known}), and its "
            f"constructor then raised {exc!r}",
        ) from exc


def _require_numbers(make: OptimizerMaker, hyper: Hyper) -> None:
    """Raise UnsupportedError unless instances can be made, and take as options what they are given."""
    (group,) = stand_in(make, [hyper]).param_groups
    given = as_options(hyper)
    if tensors := [name for name in given if isinstance(group[name], Tensor) and not isinstance(given[name], Tensor)]:
        raise _refusal(
            make, f"it turns {', '.join(tensors)} of its parameter groups into tensors, but owners set numbers"
        )


# ---- the trial itself --------------------------------------------------------------------------------------------


class _Course:
    """What one instance does in plain PyTorch: the options and gradients of each step, and what comes of them."""

    def __init__(self, make: OptimizerMaker, hyper: Hyper, shapes: _Shapes, *, missing: bool) -> None:
        """``missing``: a parameter has no gradient in one of the steps. Raises what the class raises."""
        numbers = torch.Generator().manual_seed(2026)
        self.make, self.hyper, self.shapes, self._shape_of = make, hyper, shapes, list(shapes)
        self.first = [_draw(shape.numel(), numbers) for shape in shapes]
        params = [Parameter(value.clone().view(shape)) for value, shape in zip(self.first, shapes, strict=True)]
        other = Parameter(_draw(params[0].numel(), numbers).view(params[0].shape))
        slower = {"lr": hyper["lr"] * 0.25} if isinstance(hyper.get("lr"), float) else {}
        optimizer = make.build([hyper | slower, hyper], [[other], params])
        group = optimizer.param_groups[1]
        at_first = {name: own_option(value) for name, value in options_of(group).items()}  # counters change in place
        attributes = dict(vars(optimizer))
        self.gradients: list[list[Tensor | None]] = []
        self.before: list[Hyper] = []  # the options of each step ...
        self.after: list[Hyper] = []  # ... and what it left of them
        self.moved = False  # whether a parameter without a gradient was changed
        for step in range(_STEPS):
            if step in _RATES and isinstance(at_first.get("lr"), float):
                group["lr"] = at_first["lr"] * _RATES[step]
            self.gradients.append([_gradient(param, step + index, numbers) for index, param in enumerate(params)])
            without = params[_WITHOUT[1]] if missing and step == _WITHOUT[0] else None
            if without is not None:
                self.gradients[-1][_WITHOUT[1]] = None
                was = copy.deepcopy(_values_of(without, optimizer))
            self.before.append(_told(group, at_first, hyper))
            _step(optimizer, [other, *params], [other.detach(), *self.gradients[-1]])
            self.after.append(_told(group, at_first, hyper))
            if without is not None:
                self.moved = not _same(was, _values_of(without, optimizer))
        states = [optimizer.state.get(param, {}) for param in params]
        others = (f"{key!r} beside the states of parameters" for key in optimizer.state if not isinstance(key, Tensor))
        self.odd_state = next((odd for odd in (*map(unkept, states), *others) if odd), "")
        kept = [(value, shape) for state, shape in zip(states, shapes, strict=True) for value in leaves(state).values()]
        self.shaped = not self.odd_state and any(not is_scalar(value) and value.shape != of for value, of in kept)
        self.kept = [
            _kept(param, {} if self.odd_state else state, self._shape_of[index], self.updates(index))
            for index, (param, state) in enumerate(zip(params, states, strict=True))
        ]
        self.forms = StateForms(make, hyper)
        self.late = ""  # leaves whose dtype or shape is not yet there, or another, after a parameter's first update
        for shape, state in zip(self._shape_of, [] if self.odd_state else states, strict=False):
            ours, now = (described(each, strides=False) for each in (self.forms.of(shape), state))
            differing = sorted(name for name in ours.keys() | now.keys() if ours.get(name) != now.get(name))
            self.late = self.late or ", ".join(differing)
        self.long_numbers = sorted({name for state in states for name, v in leaves(state).items() if is_long(v)})
        self.changed = sorted(name for name, value in vars(optimizer).items() if _changed(attributes.get(name), value))
        optimizer.zero_grad()
        now = _told(group, at_first, hyper)
        self.zeroed = sorted(name for name, value in now.items() if self.after[-1].get(name, value) != value)

    def updates(self, index: int, steps: int = _STEPS) -> int:
        """How often parameter ``index`` is updated in the first ``steps`` steps."""
        return sum(grads[index] is not None for grads in self.gradients[:steps])

    def equals(self, other: _Course) -> bool:
        """Whether every bit of weights and states is equal."""
        return all(map(_same, self.kept, other.kept))

    def written(self) -> list[str]:
        """The entries of the parameter group that ``step()`` writes."""
        pairs = zip(self.before, self.after, strict=True)
        return sorted({name for was, now in pairs for name, value in now.items() if was.get(name, was) != value})

    def followed(self, instances: Sequence[Sequence[Part]], *, made_again: bool = False) -> bool:
        """Whether the parameters get the same bits if each of ``instances`` has some parts of them, flat unless whole
        parameters are the only part. ``made_again``: half way from their states. Raises what the class raises."""
        flat = any(len(parts) > 1 for parts in instances)
        return all(
            self._agrees(part, kept)
            for parts in instances
            for part, kept in zip(parts, self._follow(parts, flat, made_again), strict=True)
        )

    def _follow(self, parts: Sequence[Part], flat: bool, made_again: bool) -> list[dict[str, Tensor]]:
        params = [Parameter(self._fit(self.first[part[0]], part, flat)) for part in parts]
        optimizer = self.make.build([self.hyper], [params])
        for step, (options, gradients) in enumerate(zip(self.before, self.gradients, strict=True)):
            if made_again and step == _MADE_AGAIN:
                before, optimizer = optimizer.state, self.make.build([self.hyper], [params])
                for param, part in zip(params, parts, strict=True):
                    updates = self.updates(part[0], _MADE_AGAIN)
                    kept = flat_states(before.get(param, {}), param.shape, param.numel(), updates)
                    optimizer.state[param] = restored_state(self.forms.of(param.shape), kept, updates)
            mine = [gradients[part[0]] for part in parts]
            if all(grad is None for grad in mine):  # owners leave such an instance alone
                continue
            set_options(optimizer, [options])
            fitting = [None if g is None else self._fit(g, part, flat) for g, part in zip(mine, parts, strict=True)]
            _step(optimizer, params, fitting)
        states = [{} if self.odd_state else optimizer.state.get(param, {}) for param in params]
        return [
            _kept(param, state, param.shape, self.updates(part[0]))
            for param, state, part in zip(params, states, parts, strict=True)
        ]

    def _fit(self, values: Tensor, part: Part, flat: bool) -> Tensor:
        """A copy of a part of flat values, as an instance has it: padded with zeros, or in the parameter's shape."""
        index, start, stop = part
        if not flat:
            return values.clone().view(self._shape_of[index])
        out = torch.zeros(aligned(stop - start), dtype=torch.float32, device="cpu")
        out[: stop - start] = values[start:stop]
        return out

    def _agrees(self, part: Part, kept: Mapping[str, Tensor]) -> bool:
        index, start, stop = part
        ours, small = self.kept[index], tuple(self._shape_of[index]) in self.shapes.small
        same = partial(torch.allclose, rtol=1e-4, atol=1e-6, equal_nan=True) if small else _same_bits
        return ours.keys() == kept.keys() and all(
            same(value[start:stop], kept[name][: stop - start])
            if value.numel() == self.first[index].numel()
            else same(value, kept[name])
            for name, value in ours.items()
        )


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours, theirs) or torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)


def _values_of(param: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A parameter's values, and the leaves of its state."""
    return {"": param.detach()} | leaves(optimizer.state.get(param, {}))


def _same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether every bit of tensors, and every number, is equal."""
    return ours.keys() == theirs.keys() and all(
        type(value) is type(theirs[name])
        and (
            (value.dtype, value.shape) == (theirs[name].dtype, theirs[name].shape) and _same_bits(value, theirs[name])
            if isinstance(value, Tensor)
            else not is_scalar(value) or bool(value == theirs[name])
        )
        for name, value in ours.items()
    )


def _draw(numel: int, numbers: torch.Generator) -> Tensor:
    return torch.randn(numel, generator=numbers, dtype=torch.float32, device="cpu")


def _gradient(param: Tensor, kind: int, numbers: torch.Generator) -> Tensor:
    """A flat gradient; of eight kinds that follow one another, each is there."""
    weights, drawn = param.detach().reshape(-1).clone(), _draw(param.numel(), numbers)
    match kind % 4:
        case 1 if param.dim():
            return drawn - weights * (drawn.dot(weights) / weights.dot(weights).clamp_(min=1e-12))
        case 2:
            return weights * 0.5
        case 3:
            return drawn * (30.0 if kind % 8 == 7 else 1e-3)
        case _:
            return drawn


def _step(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for param, grad in zip(params, gradients, strict=True):
        param.grad = None if grad is None else grad.clone().view(param.shape)
    step_alone(optimizer)


def _told(group: Hyper, at_first: Hyper, hyper: Hyper) -> Hyper:
    """A group's options as owners are told them: what they were made with, and what has changed or come since."""
    return hyper | {
        name: plain_value(value, name)
        for name, value in options_of(group).items()
        if name not in at_first or value is not at_first[name]
    }


def _kept(param: Tensor, state: State, shape: Sequence[int], updates: int) -> dict[str, Tensor]:
    """The weights, and the states as a checkpoint keeps them."""
    return {"": param.detach().reshape(-1)} | flat_states(state, shape, param.numel(), updates)


def _changed(was: Any, now: Any) -> bool:
    simple = isinstance(was, int | float | str | None) and isinstance(now, int | float | str | None)
    return was is not now and not (simple and was == now)


def _written(plain: _Course) -> tuple[str, ...]:
    """The entries of its parameter groups that the class writes. Raises UnsupportedError if they depend on more than
    the other entries."""
    names = plain.written()
    for step, (before, after) in enumerate(zip(plain.before, plain.after, strict=True) if names else ()):
        if step in (0, _MADE_AGAIN):
            entries = GroupEntries(plain.make, [plain.hyper])
        group = as_options(before)
        entries.step([group])
        found = {name: plain_value(group.get(name), name) for name in names}
        if wrong := [name for name in names if found[name] != after.get(name)]:
            raise _refusal(
                plain.make,
                f"step() writes {', '.join(wrong)} of its parameter groups from gradients or weights of all of them",
            )
    return tuple(names)
