"""The class of a Parameter while a call of its unit is open: what it was, but writes through ``.data`` are noticed.

[Note: data] Torch does not count a write through ``.data`` as a change of the tensor, so that a backward silently
computes with the new values of what autograd saved. Here ``.data`` of a slot gives tensors with one version counter of
their own, which the unit counts beside the Parameter's (``ParamUnit.writes``); autograd compares the Parameter's alone.
``param.data = value`` copies, because the memory belongs to the engine. What shared the old memory keeps the old
values, as in torch. A graph that saved them raises the error for in-place changes: plain torch would compute with the
old values where an operation saved a view, and with the new ones where it saved the Parameter.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from rayzero.engine.private_torch import outside_graphs, storage_key
from rayzero.tensor_metadata import plain

_DATA: Any = Tensor.data
get_data, set_data = _DATA.__get__, _DATA.__set__
_NO_FUNCTION: Any = nn.Parameter.__torch_function__


class OwnsData(Protocol):
    """A unit that is up: the owner of its Parameters' memory."""

    def data_of(self, param: Tensor) -> Tensor: ...

    def assign_data(self, param: Tensor, value: Tensor) -> None: ...


units_by_storage: WeakValueDictionary[int, OwnsData] = WeakValueDictionary()
"""Key of a Parameter's storage -> its unit. Of all engines: a Parameter of one may be given the memory of another's."""


def _unit_of(param: Tensor) -> OwnsData | None:
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
