"""A torch optimizer class on a shard. What it keeps of the parameters is in planned memory, beside the masters.

[Note: states in place] A class makes its states itself, at a parameter's first update, and may put others in their
place at any later one. After each update every tensor that is not in its place is copied there, and the class goes on
with that memory; numbers are noted there. So the memory has all that the class knows of a shard, for a successor and
for the owner of the next epoch. What has no place is refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from rayzero.errors import UnsupportedError
from rayzero.kernels.newton_schulz import fed
from rayzero.kernels.optimizer_class import (
    OptimizerMaker,
    State,
    by_group,
    maker_of_group,
    set_options,
    step_alone,
)
from rayzero.kernels.optimizer_states import (
    StateForms,
    fill_leaf,
    flat_states,
    is_scalar,
    kinds_of,
    leaves,
    restored_state,
    scalar_like,
    unkept,
    with_leaves,
)
from rayzero.kernels.rank_sum import RankSum
from rayzero.kernels.torch_kernel import TILE
from rayzero.layout.model_layout import Shard, SlotSlice, UnitLayout, aligned
from rayzero.owner.shard import OwnedShard, ShardWork
from rayzero.protocol.messages import CLASS, STEP, Hyper, ModelSpec, group_and_like

log = logging.getLogger(__name__)

_NUMBER_BYTES, _ALIGN = 8, 64


@dataclass(frozen=True)
class Places:
    """Where the leaves of a parameter's state are."""

    numbers: Mapping[str, int]  # in fp64: first byte
    tensors: Mapping[str, tuple[int, int]]  # first byte, and how many there are
    size: int  # bytes of all of them


class StateRoom:
    """The room that a class's states take in the memory of each shard.

    Knows shapes and what the class keeps for them, with the options of all groups of the parameter's class; not
    values. A parameter that no group had at ``prepare()`` has room for what any class keeps."""

    def __init__(self, make: OptimizerMaker, spec: ModelSpec) -> None:
        self._make, self._options, self._spec = make, list(spec.hyper), spec
        self._forms, self._layout = [StateForms(make, options) for options in spec.hyper], spec.layout
        self.whole = spec.layout.whole_parameters  # each slice is a parameter in its shape
        self._places_of = cache(self._places)

    def meet(self, hyper: Sequence[Hyper]) -> bool:
        """Groups may have come later. ``hyper``: the options of all. Returns whether some were not known."""
        later = hyper[len(self._options) :]
        self._options.extend(later)
        return bool(later)

    def __call__(self, shard: Shard) -> int:
        """Bytes."""
        unit = self._layout.units[shard.unit]
        return max(_ALIGN, sum(self.places(unit, part).size for part in self._layout.slices(shard)))

    def places(self, unit: UnitLayout, part: SlotSlice) -> Places:
        """Of a slice's state: the same in each life of an owner."""
        return self._places_of(self.shape(unit, part), self._group(unit, part.slot))

    def _group(self, unit: UnitLayout, slot: int) -> int:
        """Of a parameter at ``prepare()``; -1: none."""
        return self._spec.group_of[unit.index][slot]

    def shape(self, unit: UnitLayout, part: SlotSlice) -> tuple[int, ...]:
        """What the class sees of a parameter: all of it in its shape, or a piece with its padding."""
        return tuple(unit.slots[part.slot].shape) if self.whole else (aligned(part.numel),)

    def form(self, number: int, shape: tuple[int, ...]) -> State:
        """What it keeps for such a parameter of a group, which has this number."""
        return self._forms[self._like(number, shape)].of(shape)

    def options(self, number: int, shape: tuple[int, ...]) -> Hyper:
        """With which a class can be made that updates such a parameter of a group; before a later one is met, those of
        one like it."""
        group, _ = group_and_like(number)
        return self._options[group if 0 <= group < len(self._options) else self._like(number, shape)]

    def _like(self, number: int, shape: tuple[int, ...]) -> int:
        """See [Note: group numbers] in protocol/messages.py; of no group, the first that takes such a parameter."""
        _, like = group_and_like(number)
        return like if like >= 0 else next(at for at, forms in enumerate(self._forms) if _taken(forms, shape))

    def like(self, unit: UnitLayout, part: SlotSlice, kinds: Collection[str]) -> int:
        """The first group that keeps these kinds for a slice in no group; if none does, the first that takes it."""
        shape = self.shape(unit, part)
        taking = [at for at, forms in enumerate(self._forms) if _taken(forms, shape)]
        for at in taking:
            keeps = {kind for each in kinds_of(self._forms[at].of(shape), shape).values() for kind in each}
            if keeps - {STEP} == set(kinds) - {STEP}:
                return at
        return taking[0]

    def kinds(self, unit: UnitLayout) -> set[str]:
        """All kinds of a unit's states. See [Note: leaves] in kernels/optimizer_states.py."""
        found = set[str]()
        for index, slot in enumerate(unit.slots):
            shape = tuple(slot.shape) if self.whole else (aligned(slot.numel),)
            for form in self._possible(shape, self._group(unit, index)) if slot.numel else ():
                found.update(kind for kinds in kinds_of(form, shape).values() for kind in kinds)
        return found

    def _possible(self, shape: tuple[int, ...], group: int) -> list[State]:
        """What may be kept for a parameter that was in this group at ``prepare()``."""
        of = None if group < 0 else self._options[group].get(CLASS)
        return [
            forms.of(shape)
            for at, forms in enumerate(self._forms)
            if at == group or (of in (None, self._options[at].get(CLASS)) and _taken(forms, shape))
        ]

    def _places(self, shape: tuple[int, ...], group: int) -> Places:
        kept = [item for form in self._possible(shape, group) for item in leaves(form).items()]
        numbers = {name: _NUMBER_BYTES * at for at, name in enumerate(sorted({n for n, v in kept if is_scalar(v)}))}
        sizes = dict[str, int]()
        for name, value in kept:
            if not is_scalar(value):
                sizes[name] = max(sizes.get(name, 0), _rounded(value.nbytes))
        tensors, at = {}, _rounded(_NUMBER_BYTES * len(numbers))
        for name, size in sorted(sizes.items()):
            tensors[name], at = (at, size), at + size
        return Places(numbers, tensors, at)


def _taken(forms: StateForms, shape: tuple[int, ...]) -> bool:
    """Whether a class takes a parameter of this shape: some take matrices only, and raise what they like."""
    try:
        forms.of(shape)
    except Exception as error:
        log.debug("a class takes no parameter of shape %s: %s", shape, error)
        return False
    return True


def _rounded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class ShardOptimizer:
    """An instance of the class over one shard's parameters, which are views of its master, and what it keeps, in the
    shard's memory.

    Knows places and bytes; not what the class computes."""

    def __init__(self, make: OptimizerMaker, room: StateRoom, owned: OwnedShard) -> None:
        """``room``: has options to build the instance with; each step brings its own."""
        assert owned.master is not None
        assert owned.class_states is not None
        self._make, self._room, self._owned = make, room, owned
        self._master, self._memory = owned.master, owned.class_states
        self._ranges = [(part.start, part.start + aligned(part.numel)) for part in owned.slices]
        self.shapes = [room.shape(owned.unit, part) for part in owned.slices]
        self.params = [
            Parameter(_shaped(self._master[start:stop], shape))
            for (start, stop), shape in zip(self._ranges, self.shapes, strict=True)
        ]
        slices = by_group(owned.groups)  # groups without a slice here would be empty
        self._used = [group_and_like(number)[0] for number in slices]
        members = [[self.params[index] for index in own] for own in slices.values()]
        self._hyper = [room.options(*at) for at in zip(owned.groups, self.shapes, strict=True)]  # of each slice
        self._optimizer = make.build([self._hyper[own[0]] for own in slices.values()], members)
        self._places = [room.places(owned.unit, part) for part in owned.slices]
        self._first = list(accumulate((each.size for each in self._places), initial=0))  # byte of each slice
        for index, steps in enumerate(owned.steps):
            if steps:
                self._optimizer.state[self.params[index]] = self._in_place(index)

    # ---- updates

    def step(self, work: ShardWork, sums: RankSum) -> None:
        """Update the slices that have a gradient. Raises UnsupportedError if what this leaves cannot be kept; at the
        first update of a slice no value is changed then: a class may change its mind at sizes that no trial has."""
        set_options(self._optimizer, [work.hyper[used] if used >= 0 else {} for used in self._used])
        for index, (param, ranks) in enumerate(zip(self.params, work.contributors, strict=True)):
            param.grad = self._gradient(index, work, sums).to(param.device) if ranks else None
        updated = [index for index, ranks in enumerate(work.contributors) if ranks]
        first = not all(self._owned.steps[index] for index in updated)
        before = self._master.clone() if first else None
        step_alone(self._optimizer)
        if odd := self._keep({index: self._state(index) for index in updated}):
            if before is not None:
                with torch.no_grad():
                    self._master.copy_(before)
            at_first = "; no value was changed" if before is not None else ""
            names = sorted({maker_of_group(self._make, self._hyper[index]).name for index in updated})
            raise UnsupportedError(
                f"{' and '.join(names)} cannot run on shards: a step made {odd}{at_first}. Use an optimizer whose "
                "options and parameters' shapes say what it keeps"
            )
        for param in self.params:
            param.grad = None

    def fed(self, work: ShardWork, sums: RankSum, slices: Sequence[int]) -> dict[int, Tensor]:
        """See ``UpdateRule.fed``."""
        found = {}
        for index in (each for each in slices if work.contributors[each]):
            options, grad = work.hyper[self._owned.groups[index]], self._gradient(index, work, sums)
            matrix = fed(self._make, options, grad, self._state(index))
            found.update({} if matrix is None else {index: matrix})
        return found

    def _gradient(self, index: int, work: ShardWork, sums: RankSum) -> Tensor:
        """Of a slice, summed in tiles that stay in cache."""
        (start, stop), ranks = self._ranges[index], work.contributors[index]
        found = torch.empty(stop - start, dtype=torch.float32, device="cpu")
        for at in range(start, stop, TILE):
            end = min(at + TILE, stop)
            torch.mul(sums.sum(work.gradients, ranks, at, end), work.scale, out=found[at - start : end - start])
        limited = found.clamp_(-work.limit, work.limit) if work.limit < math.inf else found
        return _shaped(limited, self.shapes[index])

    # ---- states, by slice

    def _state(self, index: int) -> State:
        found: State = self._optimizer.state.get(self.params[index], {})
        return found

    def form(self, index: int) -> State:
        """The form of what the class keeps for a slice after an update."""
        return self._room.form(self._owned.groups[index], self.shapes[index])

    def states_of(self, index: int) -> dict[str, Tensor]:
        """See ``UpdateRule.slice_states``."""
        numel = self._owned.slices[index].numel
        return flat_states(self._state(index), self.shapes[index], numel, self._owned.steps[index])

    def restore(self, index: int, values: Mapping[str, Tensor]) -> None:
        """See ``UpdateRule.restore``. Raises StoreError as ``restored_state`` does."""
        steps = self._owned.steps[index]
        if steps:
            state = restored_state(self.form(index), values, steps, lambda name, like: self._place(index, name, like))
            self._optimizer.state[self.params[index]] = state
            self._note(index, state)

    def write(self, kind: str, values: Tensor) -> None:
        """See ``UpdateRule.write``."""
        for index, part in enumerate(self._owned.slices):
            if kind == STEP:
                self._restart(index)
                continue
            state, new = self._state(index), values[part.start : part.stop]
            for name, kinds in kinds_of(state, self.shapes[index]).items():
                if kind in kinds:
                    self._write_leaf(index, name, leaves(state)[name], kinds.index(kind), new)

    def _write_leaf(self, index: int, name: str, leaf: Any, at: int, new: Tensor) -> None:
        """Write the kind number ``at`` of a leaf."""
        if not is_scalar(leaf):
            start = at * new.numel()
            fill_leaf(leaf, new[: leaf.numel() - start], start)
            return
        parts = flat_states({name: leaf}, (), 1, steps=-1)
        parts[f"{name}#{at}" if at else name] = new[:1]
        state, number = self._state(index), scalar_like(leaf, sum(float(part) for part in parts.values()))
        state.update(with_leaves(state, {name: number}))
        self._note(index, state)

    def _restart(self, index: int) -> None:
        """Set a slice's state to that after its number of updates; its values are written later."""
        param = self.params[index]
        self._optimizer.state.pop(param, None)
        self.restore(index, {})
        if not self._owned.steps[index]:
            alone = self._make.build([self._hyper[index]], [[Parameter(param.detach().clone())]])
            if alone.state:  # made before the first step
                self._optimizer.state[param] = dict(next(iter(alone.state.values())))

    # ---- their memory

    def _in_place(self, index: int) -> State:
        """The state of a slice that has been updated before: on the shard's memory."""
        form = self.form(index)
        found = {
            name: scalar_like(like, self._number(index, name).item())
            if is_scalar(like)
            else self._place(index, name, like)
            for name, like in leaves(form).items()
        }
        return with_leaves(form, found)

    def _number(self, index: int, name: str) -> Tensor:
        """The memory of a number: 0-dim, fp64."""
        start = self._first[index] + self._places[index].numbers[name]
        return self._memory[start : start + _NUMBER_BYTES].view(torch.float64)[0]

    def _place(self, index: int, name: str, like: Tensor) -> Tensor:
        """The memory of a tensor, in its strides if these leave no gaps."""
        start = self._first[index] + self._places[index].tensors[name][0]
        flat = self._memory[start : start + like.numel() * like.itemsize].view(like.dtype)
        reach = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        dense = reach == like.numel()
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset()) if dense else flat.view(like.shape)

    def _keep(self, states: Mapping[int, State]) -> str:
        """Copy to their places the tensors that an update of slices (by index) has left in other memory. Returns a
        description of the first leaf that cannot be kept, and then changes nothing; "" if there is none."""
        ours, copies = self._memory.untyped_storage().data_ptr(), list[tuple[Tensor, Tensor]]()
        for index, state in states.items():
            if odd := self._misfit(index, state):
                return odd
        for index, state in states.items():
            away = {}
            for name, value in leaves(state).items():
                if not is_scalar(value) and not _is_at(value, place := self._place(index, name, value)):
                    away[name] = place
                    exchanged = value.untyped_storage().data_ptr() == ours  # read it before it is overwritten
                    copies.append((place, value.clone() if exchanged else value))
            if away:
                state.update(with_leaves(state, away))
            self._note(index, state)
        for place, value in copies:
            place.copy_(value)
        return ""

    def _misfit(self, index: int, state: State) -> str:
        places = self._places[index]
        if odd := unkept(state):
            return odd
        for name, value in leaves(state).items():
            if name not in (places.numbers if is_scalar(value) else places.tensors):
                return f"{name!r}, which its options at rayzero.prepare() did not make"
            if is_scalar(value):
                continue
            cut = not self._room.whole and tuple(value.shape) != self.shapes[index]  # of pieces, it knows elements only
            if cut or value.nbytes > places.tensors[name][1]:
                return f"{name!r} of shape {tuple(value.shape)} for a parameter of shape {self.shapes[index]}"
        return ""

    def _note(self, index: int, state: State) -> None:
        """Write a slice's numbers into the memory."""
        for name, value in leaves(state).items():
            if is_scalar(value):
                self._number(index, name).fill_(float(value))


def _shaped(values: Tensor, shape: Sequence[int]) -> Tensor:
    """The first elements of flat ``values``, in a shape."""
    return values[: math.prod(shape)].view(shape)


def _is_at(value: Tensor, place: Tensor) -> bool:
    return (value.data_ptr(), value.dtype, value.stride()) == (place.data_ptr(), place.dtype, place.stride())
