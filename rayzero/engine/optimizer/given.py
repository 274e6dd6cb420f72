"""The optimizer that a user gives to ``prepare()``: what it has beyond its class and the options of its groups.

Owners make instances from the class and the groups' options. What else the user's instance has must go with it, or be
refused: attributes (a flag of a subclass, ``optimizer.scale = 3.0``), methods that were replaced, hooks.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from rayzero.errors import UnsupportedError
from rayzero.kernels import ADAMS
from rayzero.kernels.torch_classes.optimizer_class import OptimizerMaker
from rayzero.kernels.torch_classes.optimizer_trial import refuse_known, stand_in
from rayzero.kernels.torch_classes.optimizers import HOOKS, Optimizers, maker_of_several, own_options
from rayzero.kernels.torch_classes.parameter_reads import refuse_reads
from rayzero.protocol.messages import Hyper

_BY_TORCH = {  # attributes that torch sets, or reads on the instance that the loop holds
    *HOOKS,
    *("state", "param_groups", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_opt_called"),
    *("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused", "step"),
}


def maker_of(optimizer: torch.optim.Optimizer, hyper: Sequence[Hyper]) -> OptimizerMaker:
    """Who makes instances that compute what ``optimizer`` would. ``hyper``: its groups' options.

    Raises UnsupportedError that names a method that was replaced, an attribute that owners cannot get, or the reason
    why they cannot make an instance."""
    if isinstance(optimizer, Optimizers):
        own = iter(map(own_options, hyper))
        return maker_of_several([maker_of(part, [next(own) for _ in part.param_groups]) for part in optimizer.parts])
    _refuse_replaced_methods(optimizer)
    cls = type(optimizer)
    if cls in ADAMS:  # owners have code of their own, which reads no attributes
        return OptimizerMaker(cls)
    refuse_known(OptimizerMaker(cls))
    arguments = inspect.signature(cls).parameters.keys() - hyper[0].keys()
    named = {path: value for path, value in _plain_values(_own(optimizer)) if path.rpartition(".")[2] in arguments}
    make = OptimizerMaker(cls, named)
    left = _differing(_own(optimizer), _own(stand_in(make, hyper)))
    make = OptimizerMaker(cls, make.attributes | {path: value for path, value in left.items() if _is_plain(value)})
    if left := _differing(_own(optimizer), _own(stand_in(make, hyper))):
        names = ", ".join(map(repr, sorted(left)))
        raise UnsupportedError(
            f"the {cls.__name__} has attributes that owners cannot get: {names}. They make instances from the class, "
            "the options in its groups, and attributes that are numbers, texts, flags, lists or dicts of these; make "
            "it without them, or keep them outside of the optimizer"
        )
    refuse_reads(make, optimizer.param_groups, hyper[0])
    return make


def attribute_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer's ``step()`` may read on it, as of now: dotted path -> value. Torch's own read nothing."""
    return {} if OptimizerMaker(type(optimizer)).is_torchs else dict(_snapshot(_own(optimizer)))


def late_attribute(then: dict[str, Any], optimizer: torch.optim.Optimizer) -> str:
    """The path of an attribute that is not what ``attribute_values`` found then; "" if there is none."""
    return min(_differing(then, attribute_values(optimizer)), default="")


def _snapshot(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        at = f"{path}{name}"
        if _is_plain(value):
            yield at, copy.deepcopy(value)
        elif isinstance(value, Tensor):
            yield at, [id(value), value._version]
        elif (inside := _inside(value)) is not None and not isinstance(value, torch.optim.Optimizer):
            yield from _snapshot(inside, f"{at}.")
        else:
            yield at, value


def _own(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    slots = (name for kind in type(optimizer).__mro__ for name in _slots(kind) if hasattr(optimizer, name))
    own = vars(optimizer) | {name: getattr(optimizer, name) for name in slots}
    return {name: value for name, value in own.items() if name not in _BY_TORCH}


def _slots(cls: type) -> Sequence[str]:
    named = vars(cls).get("__slots__", ())
    return [named] if isinstance(named, str) else [name for name in named if not name.startswith("__")]


# ---- methods -----------------------------------------------------------------------------------------------------


def _refuse_replaced_methods(optimizer: torch.optim.Optimizer) -> None:
    for name, value in vars(optimizer).items():
        replaces = callable(value) and callable(getattr(type(optimizer), name, None))
        if replaces and not (name == "step" and _is_by_scheduler(value, type(optimizer))):
            raise UnsupportedError(
                f"{name}() of the {type(optimizer).__name__} that was given to rayzero.prepare() was replaced by "
                f"{getattr(value, '__qualname__', value)!r}, which owners would not call; register_step_pre_hook() and "
                "register_step_post_hook() work, and so does a class with its own step()"
            )


def _is_by_scheduler(step: Any, cls: type) -> bool:
    """Whether a ``step`` only tells torch's schedulers that it was called, and then calls the class's."""
    code = getattr(step, "__code__", None)  # what wraps it again has its marks, but code of its own
    by_torch = code is not None and code.co_filename == lr_scheduler.__file__
    return by_torch and inspect.unwrap(step) is inspect.unwrap(cls.step)  # type: ignore[attr-defined]


# ---- attributes --------------------------------------------------------------------------------------------------


def _differing(ours: dict[str, Any], theirs: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Dotted path -> our value, where ``theirs`` lacks it or has another one."""
    found: dict[str, Any] = {}
    for name in ours.keys() | theirs.keys():
        value, other, at = ours.get(name, _Missing), theirs.get(name, _Missing), f"{path}{name}"
        inside = None if _is_plain(value) or type(value) is not type(other) else _inside(value)
        if _equal(value, other):
            continue
        if inside is None:
            found[at] = value
        else:
            found |= _differing(inside, _inside(other) or {}, f"{at}.")
    return found


def _plain_values(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The plain values, and those directly inside others ("args.bits"), with their paths."""
    for name, value in values.items():
        inside = (
            {name: value} if _is_plain(value) else {f"{name}.{key}": v for key, v in (_inside(value) or {}).items()}
        )
        yield from ((path, held) for path, held in inside.items() if _is_plain(held))


class _Missing:
    """Stands for a value that one of two instances does not have."""


def _inside(value: Any) -> dict[str, Any] | None:
    """The values that an object or a dict consists of; None if that cannot be said."""
    if isinstance(value, dict):
        return value if all(isinstance(key, str) and "." not in key for key in value) else None
    opaque = isinstance(value, Tensor | nn.Module | type | Enum) or callable(value) or not hasattr(value, "__dict__")
    return None if opaque else vars(value)


def _is_plain(value: Any) -> bool:
    """Whether JSON keeps a value, but for a tuple, which is made a list."""
    if isinstance(value, Tensor):
        return False
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and "." not in key and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def _equal(ours: Any, theirs: Any) -> bool:
    """Whether an instance that owners make has the same value."""
    if ours is theirs or (isinstance(ours, torch.optim.Optimizer) and type(ours) is type(theirs)):
        return True
    if type(ours) is not type(theirs):
        numbers = [
            value.item() if isinstance(value, Tensor) and value.dim() == 0 else value for value in (ours, theirs)
        ]
        return all(type(number) in (int, float) for number in numbers) and numbers[0] == numbers[1]
    if isinstance(ours, Tensor):
        return ours.shape == theirs.shape and ours.dtype == theirs.dtype and bool(torch.equal(ours, theirs))
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    if isinstance(ours, MethodType):
        return ours.__func__ is theirs.__func__ and _equal(ours.__self__, theirs.__self__)
    if isinstance(ours, partial):
        return _equal((ours.func, ours.args, ours.keywords), (theirs.func, theirs.args, theirs.keywords))
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_equal(value, theirs[key]) for key, value in ours.items())
    if (inside := _inside(ours)) is not None:
        return _equal(inside, _inside(theirs))
    return bool(ours == theirs)
