"""One unit's parameters and the one state they share.

[Note: swap] A Parameter stays the same object for the whole training. It owns a storage of its own, which is empty
while the unit is SHARDED. Lanes fill a buffer ahead of use, or it is the memory that the owners write
(``UnitBuffer.mapped``). Unsharding swaps the buffer's slices under the storages; resharding swaps them back. No byte is
copied.

[Note: use count] A storage at rest is held by its Parameter, by our alias of it and by our wrapper. Anything above that
is a view, a tensor that autograd saved, a numpy alias: somebody may still read the bytes. Such a unit is *pinned*: it
is not resharded, because reading freed memory crashes the process instead of raising an error. The count does not
include a Parameter that autograd saved itself. Hooks replace those by handles (handles.py). If a program bypasses the
hooks, backward raises torch's in-place error, because resharding raises the version counters.

[Note: data] While a call of its unit is open, a Parameter has a class of its own: what it was, but writes through
``.data`` are noticed. Torch does not count a write through ``.data`` as a change of the tensor, so that a backward
silently computes with the new values of what autograd saved. Here ``.data`` of a slot gives tensors with one version
counter of their own, which the unit counts beside the Parameter's (``ParamUnit.writes``); autograd compares the
Parameter's alone.
``param.data = value`` copies, because the memory belongs to the engine. What shared the old memory keeps the old
values, as in torch. A graph that saved them raises the error for in-place changes: plain torch would compute with the
old values where an operation saved a view, and with the new ones where it saved the Parameter.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from rayzero.engine.private_torch import (
    AT_REST,
    empty_storage,
    increment_versions,
    storage_key,
    swap_all,
    swap_bytes,
    tensor_use_count,
    use_count,
)
from rayzero.engine.units.residency import Fetching, UnitBuffer, Waited
from rayzero.errors import UnsupportedError
from rayzero.layout.model_layout import UnitLayout
from rayzero.modes import outside_graphs
from rayzero.protocol.messages import same_bits
from rayzero.tensor_metadata import plain

_DATA: Any = Tensor.data
get_data, set_data = _DATA.__get__, _DATA.__set__
_NO_FUNCTION: Any = nn.Parameter.__torch_function__

units_by_storage: WeakValueDictionary[int, ParamUnit] = WeakValueDictionary()
"""Key of a Parameter's storage -> its unit. Of all engines: a Parameter of one may be given the memory of another's."""


def _unit_of(param: Tensor) -> ParamUnit | None:
    with plain():
        return units_by_storage.get(storage_key(param.untyped_storage()))


@outside_graphs
def _get(param: Any) -> Tensor:
    unit = _unit_of(param)
    if unit is None or type(param).__torch_function__ is _NO_FUNCTION:
        return get_data(param) if unit is None else unit.data_of(param)
    shown: Tensor = get_data(param)  # what the class makes of it
    with plain():
        if _unit_of(shown) is not unit or shown.dtype is not param.dtype:
            return shown
        place = (shown.size(), shown.stride(), shown.storage_offset())
        data = torch.as_strided(unit.data_of(param), *place).as_subclass(type(shown))
    data.__dict__.update(shown.__dict__)
    return data


@outside_graphs
def _set(param: Any, value: Tensor) -> None:
    unit = _unit_of(param)
    if unit is None:
        set_data(param, value)
    else:
        unit.assign_data(param, value)


def _deepcopy(param: Any, memo: dict[int, Any]) -> Any:
    with as_made(param):
        return copy.deepcopy(param, memo)


def _reduce_ex(param: Any, protocol: Any) -> Any:
    with plain():
        copied: Any = Tensor._make_subclass(param.made, param.detach().clone(), param.requires_grad)
    copied.__dict__.update(param.__dict__)
    return copied.__reduce_ex__(protocol)


def _repr(param: Any, **how: Any) -> str:
    with as_made(param):
        shown: Any = type(param).__repr__
        return str(shown(param, **how))


@functools.cache
def open_class(made: type[nn.Parameter]) -> type[nn.Parameter]:
    """The open class of Parameters whose own class is ``made``. One for all units: torch.compile guards on it."""
    names = {
        "data": property(_get, _set),
        "made": made,
        "__torch_function__": _function_of(made),
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce_ex,
        "__repr__": _repr,
        "__module__": made.__module__,
        "__qualname__": made.__qualname__,
    }
    return type(made.__name__, (made,), names)


def _function_of(made: type[nn.Parameter]) -> Any:
    """``made``'s own function, called as for Parameters that are of that class, so that results are, too."""
    its: Any = made.__torch_function__
    if its is _NO_FUNCTION:
        return its

    def function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return its(func, tuple(getattr(kind, "made", kind) for kind in types), args, kwargs)

    return classmethod(function)


@contextmanager
def as_made(param: Any) -> Iterator[None]:
    """The open Parameter has its own class inside."""
    kind = type(param)
    param.__class__ = kind.made
    try:
        yield
    finally:
        param.__class__ = kind


class UnitState(Enum):
    """Where a unit's full parameters are."""

    SHARDED = auto()  # only at the owners; the Parameters' storages are empty
    UNSHARDING = auto()  # a fetch into a leased buffer is in flight; the storages are still empty
    UNSHARDED = auto()  # the buffer is under the Parameters, every byte of it valid


S = UnitState
_MOVES = {S.SHARDED: {S.UNSHARDING}, S.UNSHARDING: {S.UNSHARDED, S.SHARDED}, S.UNSHARDED: {S.SHARDED}}


class ParamUnit:
    """Parameters gathered, released and reduced together (usually one transformer block).

    Knows its layout, its state and what is in flight; not modules, other units, or who carries the bytes."""

    def __init__(self, layout: UnitLayout, params: list[nn.Parameter], guards: Sequence[type[nn.Parameter]]) -> None:
        """``params``: one per slot, each on the device in the unit's dtype. Their storages are replaced; their
        values are gone after this. ``guards``: per Parameter, its class while its first use must be noticed
        (touch.py)."""
        self.layout = layout
        self.index = layout.index
        self.name = layout.name
        self.size_bytes = layout.size_bytes
        self.params = params
        self.guards = guards
        self._closed = list(zip(params, guards, strict=True))
        self._opened = [(param, open_class(type(param))) for param in params]
        self.state = S.SHARDED
        self.fetching: Fetching | None = None
        self.buffer: UnitBuffer | None = None  # while UNSHARDED. freed by: reshard()
        self.kept: UnitBuffer | None = None  # while SHARDED: memory with bytes of ``version``. freed by: take_kept()
        self.version = -1  # published version that the bytes in ``buffer`` or ``kept`` were right for
        self.open_calls = 0  # running forward calls and touches
        self.storages = [_own_storage(param) for param in params]
        self.keys = [storage_key(storage) for storage in self.storages]
        self.slots: dict[int, tuple[ParamUnit, int]] = {}  # of the engine: storage key -> unit, slot
        units_by_storage.update((key, self) for key in self.keys)
        with plain():
            self._aliases = [param.detach() for param in params]  # plain tensors over the same storages and versions
        self._data: dict[int, Tensor] = {}  # slot whose .data was read -> a tensor with .data's version counter
        self._data_before: dict[int, int] = {}  # slot -> writes through version counters that .data had earlier
        self._at_rest = [AT_REST + 1] * len(params)  # + alias
        self._nodes = [0] * len(params)  # AccumulateGrad nodes that the engine keeps
        self._filled = [i for i, slot in enumerate(layout.slots) if slot.numel]
        self._outdated = 0  # how often the engine raised the Parameters' version counters itself
        self._written = self.writes()
        self.guarded = False
        self.set_guard(True)

    def __repr__(self) -> str:
        return f"<ParamUnit {self.name!r} {self.state.name}>"

    def slot_of(self, param: Tensor) -> int:
        """The slot of one of the unit's Parameters."""
        return next(slot for slot, own in enumerate(self.params) if own is param)

    def _become(self, state: UnitState) -> None:
        assert state in _MOVES[self.state], f"{self} cannot become {state}"
        self.state = state

    # ---- up

    def unshard(self, fetching: Fetching) -> None:
        """Begin to unshard from a fetch that was just requested."""
        self._become(S.UNSHARDING)
        self.fetching = fetching

    def wait_unsharded(self) -> Waited:
        """Block until every byte is there, then put the buffer under the Parameters.

        Returns how long it waited. If the fetch failed, raises its error and leaves the unit SHARDED."""
        fetching = self.fetching
        assert fetching is not None
        waited = fetching.wait()
        self._swap(fetching.buffer)
        self.buffer, self.version, self.fetching = fetching.buffer, fetching.version, None
        self._become(S.UNSHARDED)  # last: the bytes may be read from here on
        return waited

    def abandon(self) -> Fetching:
        """Give up a fetch that is no longer needed. The caller cancels it and waits for its end."""
        fetching, self.fetching = self.fetching, None
        assert fetching is not None
        self._become(S.SHARDED)
        return fetching

    def take_kept(self) -> UnitBuffer | None:
        """Hand over the memory that was kept; None if there is none."""
        kept, self.kept = self.kept, None
        return kept

    # ---- down

    def reshard(self) -> UnitBuffer:
        """Take the buffer from under the Parameters and hand it over. Requires ``can_reshard()``."""
        buffer, self.buffer = self.buffer, None
        assert buffer is not None
        self._become(S.SHARDED)  # first: nothing may be read from here on
        self._outdate()
        self._swap(buffer)
        return buffer

    def can_reshard(self) -> bool:
        """Whether it is up, none of its calls is open, and only the Parameters hold its bytes."""
        return self.state is S.UNSHARDED and not self.open_calls and not self.pinned_slots()

    def pinned_slots(self) -> list[int]:
        """Slots whose bytes something besides the Parameter holds. [Note: use count]"""
        return [i for i in self._filled if use_count(self.keys[i]) != self._at_rest[i]]

    def keeps_node(self, slot: int) -> None:
        """The engine keeps the AccumulateGrad node of a slot, and the node its Parameter."""
        self._nodes[slot] += 1

    def is_saved(self) -> bool:
        """Whether a graph holds a Parameter itself, which it does where it gets no handles. [Note: use count]"""
        with plain():  # a view is a use of both
            return any(
                tensor_use_count(self.params[i]) - 1 - self._nodes[i] > use_count(self.keys[i]) - self._at_rest[i]
                for i in self._filled
            )

    def _swap(self, buffer: UnitBuffer) -> None:
        if len(self._filled) == len(self.storages):
            swap_all(self.storages, buffer.slices)
            return
        for i in self._filled:
            swap_bytes(self.storages[i], buffer.slices[i])

    # ---- guard, writes

    def set_guard(self, on: bool) -> None:
        """Notice every operation on the Parameters (touch.py), or none."""
        if self.guarded is on:
            return
        self.guarded = on
        for param, kind in self._closed if on else self._opened:  # a zip here takes three times as long
            param.__class__ = kind

    def _outdate(self) -> None:
        """Make autograd refuse Parameters that it saved without a handle. [Note: use count]"""
        increment_versions(self.params)
        self._outdated += 1

    def writes_of(self, slot: int) -> int:
        """How often the user has written into a slot's Parameter in place, as autograd counts: not through
        ``.data``."""
        return self._aliases[slot]._version - self._outdated

    def writes(self) -> list[int]:
        """Per slot, how often the user has written in place or through ``.data``."""
        counts = [alias._version - self._outdated for alias in self._aliases]
        for slot, data in self._data.items():
            counts[slot] += data._version
        for slot, before in self._data_before.items():
            counts[slot] += before
        return counts

    def was_written(self) -> bool:
        """Whether the user has written into a Parameter since the last ``settle_writes``."""
        return self.writes() != self._written

    def settle_writes(self) -> None:
        """Stop counting the writes that the user has made so far."""
        self._written = self.writes()

    def count_writes(self, slots: Sequence[int]) -> None:
        """The engine wrote values into these slots on the user's behalf: make autograd treat it as an in-place
        write."""
        increment_versions([self._aliases[slot] for slot in slots])

    # ---- .data. [Note: data]

    def data_of(self, param: Tensor) -> Tensor:
        """What ``param.data`` is while the unit is up: a detached tensor over its memory. Writes through it are
        counted, but autograd does not see them."""
        slot = self.slot_of(param)
        with plain():
            if slot not in self._data:
                with torch.inference_mode(False):
                    self._data[slot] = get_data(self._aliases[slot])
                self._at_rest[slot] += 1
            return self._data[slot].detach()

    def assign_data(self, param: Tensor, value: Tensor) -> None:
        """``param.data = value`` while the unit is up: copies the values, unless they are the same bits.

        Raises UnsupportedError if their dtype, shape or device differs from the parameter's, or if another parameter
        lies in their memory."""
        slot = self.slot_of(param)
        name, alias = self.layout.slots[slot].name, self._aliases[slot]
        with plain(), torch.no_grad(), torch.inference_mode(False):
            ours, new = (alias.dtype, alias.shape, alias.device), (value.dtype, value.shape, value.device)
            if ours != new:
                raise UnsupportedError(
                    f"parameter {name!r} was given .data of {_form(*new)} after rayzero.prepare(), it has "
                    f"{_form(*ours)}; change dtype, shape and device before"
                )
            key = storage_key(value.untyped_storage())
            other = units_by_storage.get(key)
            if key == self.keys[slot] and _place(value) == _place(alias):
                return
            if other is not None and key != self.keys[slot] and value.numel():
                raise UnsupportedError(
                    f"parameter {name!r} was given the memory of {other.layout.slots[other.keys.index(key)].name!r} as "
                    ".data, which plain PyTorch would share between them from here on; give it a .clone()"
                )
            if slot in self.pinned_slots():
                self._leave_memory(slot)
            if not bool(same_bits(self._aliases[slot], value).all()):
                self._aliases[slot].copy_(value)

    def _leave_memory(self, slot: int) -> None:
        """Others hold a slot's storage: give that a copy of its bytes, and the Parameter another storage over the
        unit's memory."""
        left, key = self.storages[slot], self.keys[slot]
        moved = self._aliases[slot].clone()
        self.storages[slot] = moved.untyped_storage()
        self.keys[slot] = storage_key(self.storages[slot])
        swap_bytes(left, self.storages[slot])
        set_data(self.params[slot], moved)  # it keeps its version counter
        self._aliases[slot] = self.params[slot].detach()
        data = self._data.pop(slot, None)
        if data is not None:
            self._data_before[slot] = self._data_before.get(slot, 0) + data._version
            self._at_rest[slot] -= 1
        del units_by_storage[key]
        units_by_storage[self.keys[slot]] = self
        if self.slots:
            self.slots[self.keys[slot]] = self.slots.pop(key)

    # ---- gradients

    def take_grads(self, slots: Sequence[int]) -> list[Tensor | None]:
        """Take ``.grad`` of each of ``slots``, made dense, and set it to None. Returns one entry per slot of the unit;
        slots that are not in ``slots`` keep theirs and give None."""
        taken: list[Tensor | None] = [None] * len(self.params)
        with plain():
            for slot in slots:
                param = self.params[slot]
                grad = param.grad
                if grad is not None:
                    taken[slot] = grad if grad.layout is torch.strided else grad.to_dense()
                    param.grad = None
        return taken

    def refreshed(self, version: int) -> None:
        """A new version was written into the buffer in place; tensors that autograd saved of the old one are out of
        date."""
        self.version = version
        self._outdate()

    def tensor(self, slot: int, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: Any) -> Tensor:
        """A detached tensor over a slot's storage, which begins at element ``offset`` there. It pins the unit."""
        alias = self._aliases[slot]
        if dtype is alias.dtype:
            return torch.as_strided(alias, size, stride, offset)
        other: Any = torch.empty(0, dtype=dtype, device=alias.device)
        return cast(Tensor, other.set_(self.storages[slot], offset, size, stride))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor's elements lie in its storage."""
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _form(dtype: torch.dtype, shape: torch.Size, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


def _own_storage(param: nn.Parameter) -> torch.UntypedStorage:
    """Give ``param`` a contiguous storage of its own, empty. Its size, dtype and device stay as they are."""
    with plain():
        param.data = torch.empty(param.shape, dtype=param.dtype, device=param.device)
        storage = param.untyped_storage()
    if param.numel():
        swap_bytes(storage, empty_storage(param.device))
    return storage
