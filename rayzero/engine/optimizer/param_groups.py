"""What of the user's optimizer counts: which options of its groups the owners are told, which a checkpoint keeps for
the run that resumes from it, and what it has beyond them.

The owners know only the options that an update needs. A loop has more: ``initial_lr``, and anything else that a
scheduler or the user keeps in a group. As in plain PyTorch, every entry has its saved value again before the first step
of a resumed run.

[Note: schedulers on resume] Creating a torch scheduler writes its first learning rate into the groups, so in plain
PyTorch a loop must create it before ``optimizer.load_state_dict()``. Here ``prepare()`` does that load. A scheduler may
be created before it or, as in most loops, after it, because the groups get their saved values once more after the
scheduler's own ``load_state_dict()``.

Owners make instances from the class and the groups' options. What else the user's instance has must go with it, or be
refused: attributes (a flag of a subclass, ``optimizer.scale = 3.0``), methods that were replaced, hooks.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from rayzero.checkpoint.state_values import is_packable
from rayzero.errors import CheckpointError, UnsupportedError
from rayzero.kernels import ADAMS
from rayzero.kernels.optimizer_class import (
    HOOKS,
    OptimizerMaker,
    Optimizers,
    maker_of_several,
    options_of,
    own_options,
    plain_value,
    refuse_reads,
)
from rayzero.kernels.optimizer_trial import refuse_known, stand_in
from rayzero.protocol.messages import CLASS, Hyper

log = logging.getLogger(__name__)

ParamGroup = dict[str, Any]  # one of torch.optim.Optimizer.param_groups


def hyper_of(optimizer: torch.optim.Optimizer, cls: type[torch.optim.Optimizer]) -> tuple[Hyper, ...]:
    """Each parameter group's options now, as plain JSON values. ``cls``: what the owners run. Adam and AdamW read only
    their own options; what another class reads is not known, so it gets all entries."""
    known = optimizer.defaults if cls in ADAMS else None
    return tuple(
        {name: plain_value(value, name) for name, value in options_of(group).items() if known is None or name in known}
        for group in optimizer.param_groups
    )


def saved_groups(groups: Sequence[ParamGroup], name_of: Mapping[int, str]) -> list[dict[str, Any]]:
    """Per group the names of its Parameters, in order, and its options as a checkpoint keeps them.

    ``name_of``: id of a Parameter -> its name. Options that a checkpoint cannot hold (functions, for example) are left
    out; a loop that resumes sets them again."""
    return [
        {
            "params": [name_of[id(param)] for param in group["params"]],
            "options": options,
        }
        for group, options in zip(groups, saved_options(groups), strict=True)
    ]


def saved_options(groups: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    """Each group's options as a checkpoint keeps them; see ``saved_groups``."""
    return [{key: value for key, value in options_of(group).items() if is_packable(value)} for group in groups]


def put_options(groups: Sequence[ParamGroup], saved: Sequence[Mapping[str, Any]]) -> None:
    """Give groups the options that ``saved_options`` returned of them."""
    for group, options in zip(groups, saved, strict=True):
        for key, value in options.items():
            group[key] = _put(group.get(key), value)


def _put(held: Any, value: Any) -> Any:
    """``value``; copied into the tensor ``held`` if possible, because a compiled step or a scheduler may refer to
    it."""
    if not isinstance(held, Tensor) or not held.is_floating_point():
        return value.clone() if isinstance(value, Tensor) else value
    if not isinstance(value, Tensor):
        return held.fill_(value)
    return held.copy_(value) if (held.shape, held.dtype) == (value.shape, value.dtype) else value.clone()


class ResumedGroups:
    """The groups of the checkpoint that a run resumes from, until its first step.

    A group is known by the parameters it trains, whatever its number. Knows saved options and names; not the owners.
    [Note: schedulers on resume]"""

    def __init__(self, saved: Sequence[Mapping[str, Any]], name_of: Mapping[int, str], checkpoint: str) -> None:
        """``saved``: the result of ``saved_groups``. ``checkpoint``: where they come from, for messages."""
        self._options: dict[frozenset[str], list[Mapping[str, Any]]] = {}  # groups without parameters share a key
        for group in saved:
            self._options.setdefault(frozenset(group["params"]), []).append(group["options"])
        self._name_of = name_of
        self._checkpoint = checkpoint

    def _params(self, group: ParamGroup) -> frozenset[str]:
        return frozenset(self._name_of[id(param)] for param in group["params"])

    def restore(self, groups: Sequence[ParamGroup], *, only: Collection[str] | None = None) -> None:
        """Restore the saved options in ``groups``. Options that were not saved, and groups that train other parameters,
        stay as they are.

        only: names of the options to restore; None: all."""
        seen: Counter[frozenset[str]] = Counter()
        for group in groups:
            params = self._params(group)
            saved = self._options.get(params, [])[seen[params] :]
            seen[params] += 1
            for key, value in saved[0].items() if saved else ():
                if only is None or key in only:
                    group[key] = _put(group.get(key), value)

    def require_classes(self, groups: Sequence[ParamGroup]) -> None:
        """Raise CheckpointError if another of several classes updates a parameter than does in the checkpoint."""
        saved = {name: options[0].get(CLASS) for params, options in self._options.items() for name in params}
        for group in groups:
            for name in sorted(self._params(group)):
                was, now = saved.get(name), group.get(CLASS)
                if was and now and was != now:
                    raise CheckpointError(
                        f"{name!r} was updated by {was} in {self._checkpoint}, but by {now} in this run; give each "
                        "parameter to an optimizer of the same class"
                    )

    def tell_kept(self, groups: Sequence[ParamGroup]) -> None:
        """Warn of groups that the checkpoint does not have and that therefore keep the loop's options."""
        for index, group in enumerate(groups):
            if self._params(group) not in self._options:
                log.warning(
                    "%s has no parameter group of the same parameters as the optimizer's group %d: the group keeps "
                    "the options that this run gave it (lr=%s), not those of the checkpoint",
                    self._checkpoint,
                    index,
                    group.get("lr"),
                )

    def require_all(self, groups: Sequence[ParamGroup]) -> None:
        """Raise CheckpointError if, at the first step, a parameter that the checkpoint trains is in no group."""
        saved = {name for params in self._options for name in params}
        if missing := sorted(saved.difference(*map(self._params, groups))):
            names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise CheckpointError(
                f"{self._checkpoint} trains {names}, which no parameter group of this run has; add the group with "
                f"add_param_group() before the first step, as the run that saved it did"
            )


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
        each = iter(map(own_options, hyper))
        return maker_of_several([maker_of(part, [next(each) for _ in part.param_groups]) for part in optimizer.parts])
    _refuse_replaced_methods(optimizer)
    cls = type(optimizer)
    if cls in ADAMS:  # owners have code of their own, which reads no attributes
        return OptimizerMaker(cls)
    refuse_known(OptimizerMaker(cls))
    arguments, own = inspect.signature(cls).parameters.keys() - hyper[0].keys(), _own(optimizer, _numbers(optimizer))
    plain = {path: value for path, value in own.items() if _is_plain(value) and path.count(".") < 2}
    make = OptimizerMaker(cls, {path: plain[path] for path in plain if path.rpartition(".")[2] in arguments})
    left = _differing(own, _made(make, hyper))
    make = OptimizerMaker(cls, make.attributes | {path: value for path, value in left.items() if _is_plain(value)})
    if left := _differing(own, _made(make, hyper)):
        names = ", ".join(map(repr, sorted(left)))
        raise UnsupportedError(
            f"the {cls.__name__} has attributes that owners cannot get: {names}. They make instances from the class, "
            "the options in its groups, and attributes that are numbers, texts, flags, lists or dicts of these; make "
            "it without them, or keep them outside of the optimizer"
        )
    refuse_reads(make, optimizer.param_groups, hyper[0])
    return make


def _made(make: OptimizerMaker, hyper: Sequence[Hyper]) -> dict[str, Any]:
    """What an instance that owners make keeps."""
    made = stand_in(make, hyper)
    return _own(made, _numbers(made))


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's defaults, those that are tensors of one number as the number, as in what owners get."""
    return {
        name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in optimizer.defaults.items()
    }


def attribute_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer's ``step()`` may read on it, as of now: dotted path -> value. Torch's own read nothing."""
    if OptimizerMaker(type(optimizer)).is_torchs:
        return {}
    own = _own(optimizer, {name: value for name, value in optimizer.defaults.items() if not isinstance(value, Tensor)})
    return {path: _noted(value) for path, value in own.items()}  # schedulers change a rate that is a tensor in place


def _noted(value: Any) -> Any:
    if isinstance(value, Tensor):
        return [id(value), value._version]
    return copy.deepcopy(value) if _is_plain(value) else value


def late_attribute(then: dict[str, Any], optimizer: torch.optim.Optimizer) -> str:
    """The path of an attribute that is not what ``attribute_values`` found then; "" if there is none."""
    return min(_differing(then, attribute_values(optimizer)), default="")


def _own(optimizer: torch.optim.Optimizer, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What an instance keeps beside what torch does, with these ``defaults``. See ``_flat``."""
    slots = (name for kind in type(optimizer).__mro__ for name in _slots(kind) if hasattr(optimizer, name))
    own = vars(optimizer) | {name: getattr(optimizer, name) for name in slots} | {"defaults": defaults}
    return _flat({name: value for name, value in own.items() if name not in _BY_TORCH})


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


def _flat(values: Mapping[str, Any], path: str = "", around: tuple[int, ...] = ()) -> dict[str, Any]:
    """Dotted path -> value: one that JSON keeps, or of which nobody can say what it consists of; of all others their
    type, followed by what they consist of. ``around``: ids of what ``values`` are in."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        at, is_whole = f"{path}{name}", _is_plain(value) or isinstance(value, torch.optim.Optimizer)
        inside = None if is_whole else _inside(value)
        found[at] = value if inside is None else type(value)
        if inside is not None and id(value) not in around:
            found |= _flat(inside, f"{at}.", (*around, id(value)))
    return found


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Path -> our value, where ``theirs`` lacks it or has another one; nothing of what is in it then."""
    found: dict[str, Any] = {}
    for path in sorted(ours.keys() | theirs.keys()):  # "args" is before "args.bits"
        value = ours.get(path, _Missing)
        if not _equal(value, theirs.get(path, _Missing)) and not any(path.startswith(f"{each}.") for each in found):
            found[path] = value
    return found


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
    if isinstance(ours, FunctionType):  # each constructor makes one
        return ours.__code__ is theirs.__code__ and _equal(_bound(ours), _bound(theirs))
    if isinstance(ours, partial):
        return _equal((ours.func, ours.args, ours.keywords), (theirs.func, theirs.args, theirs.keywords))
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_equal(value, theirs[key]) for key, value in ours.items())
    if (inside := _inside(ours)) is not None:
        return _equal(inside, _inside(theirs))
    return bool(ours == theirs)


def _bound(made: FunctionType) -> list[Any]:
    """What a function has beside its code."""
    return [made.__defaults__, made.__kwdefaults__, *(cell.cell_contents for cell in made.__closure__ or ())]
