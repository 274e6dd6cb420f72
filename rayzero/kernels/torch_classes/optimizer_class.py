"""Works with any torch optimizer class: makes an instance over given groups, steps it, and sets its options.
``optimizer_trial`` finds out what a class can do, ``optimizer_states`` what it keeps."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from rayzero.errors import UnsupportedError
from rayzero.modes import outside_modes
from rayzero.protocol.messages import Hyper

State = dict[str, Any]  # of one parameter, as torch has it: name -> tensor or number, or some of them

_BY_SCHEDULERS = "initial_lr"  # the entry that every torch scheduler writes into each group
_INTEGER = "integer"  # the key of a counter's value in JSON. [Note: counters]
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


# ---- instances ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerMaker:
    """Makes instances that compute what a user's optimizer would.

    Knows the class, and what the user's instance keeps in attributes; not parameters."""

    cls: type[torch.optim.Optimizer]
    attributes: Hyper = field(default_factory=dict)  # "scale" or "args.bits" -> plain value

    @property
    def name(self) -> str:
        """The class's name, with its module."""
        return f"{self.cls.__module__}.{self.cls.__qualname__}"

    @property
    def is_torchs(self) -> bool:
        """Whether the class comes with torch."""
        return self.cls.__module__.startswith("torch.optim")

    @outside_modes  # what a constructor makes lies beside its parameters, not on the thread's default device
    def build(self, hyper: Sequence[Hyper], members: Sequence[Sequence[Tensor]]) -> torch.optim.Optimizer:
        """An instance with these groups; ``members``: the parameters of each.

        The constructor gets the first group's options too, because some classes require them and Adagrad fills its
        state from its own argument, and attributes that have the names of its arguments ("bits" of "args.bits"). Then
        the attributes are set."""
        entries = [as_options(options) for options in hyper]
        scheduled = [options.pop(_BY_SCHEDULERS, None) for options in entries]  # some classes refuse it
        groups = [options | {"params": list(own)} for options, own in zip(entries, members, strict=True)]
        given = {path.rpartition(".")[2]: value for path, value in as_options(self.attributes).items()} | groups[0]
        accepted = [name for name in list(inspect.signature(self.cls).parameters)[1:] if name != "params"]
        made = self.cls(groups, **{name: given[name] for name in accepted if name in given})
        for group, value in zip(made.param_groups, scheduled, strict=True):
            group.update({} if value is None else {_BY_SCHEDULERS: value})
        for path, value in self.attributes.items():
            _set(made, path, value)
        return made


def _set(made: torch.optim.Optimizer, path: str, value: Any) -> None:
    """Set the attribute at a dotted path; JSON's list becomes a tuple where the instance has one."""
    *parents, last = path.split(".")
    holder: Any = made
    for parent in parents:
        holder = holder[parent] if isinstance(holder, dict) else getattr(holder, parent)
    held = holder.get(last) if isinstance(holder, dict) else getattr(holder, last, None)
    value = tuple(value) if isinstance(held, tuple) and isinstance(value, list) else value
    if isinstance(holder, dict):
        holder[last] = value
    else:
        setattr(holder, last, value)


_alone = threading.local()  # .steps: this thread is in step_alone()


def step_alone(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()`` without the hooks that torch puts around it: those that are registered for all optimizers
    are for steps of the user's."""
    for cls in type(optimizer).__mro__:  # of parents, too, because a step() may call its parent's
        step = vars(cls).get("step")
        if getattr(step, "hooked", False) and not hasattr(step, "_is_routed"):
            cls.step = _routed(step)  # type: ignore[attr-defined]
    outer, _alone.steps = getattr(_alone, "steps", False), True
    try:
        optimizer.step()
    finally:
        _alone.steps = outer


def _routed(hooked: Any) -> Any:
    """A class's ``step`` as torch has it when the first instance is made, with hooks around it, which leaves these out
    in ``step_alone()``. Torch looks its hooks up in a global, so no instance can have others."""
    alone = _without_compiler(hooked.__wrapped__)

    @functools.wraps(hooked)
    def step(*args: Any, **kwargs: Any) -> Any:
        return (alone if getattr(_alone, "steps", False) else hooked)(*args, **kwargs)

    step._is_routed = True  # type: ignore[attr-defined]
    return step


def _without_compiler(step: Any) -> Any:
    """A class's ``step`` that imports torch's compiler only in a process that has it. Torch's own wrapper imports it at
    the first step, which takes a second and 20 MiB, to break a graph that no process has without it. (Classes that call
    what torch writes in Python for its meta device, such as Adagrad's root, import it all the same.)"""
    if getattr(getattr(step, "__code__", None), "co_name", "") != "_use_grad":
        return step

    @functools.wraps(step)
    def alone(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return step(optimizer, *args, **kwargs)
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return step.__wrapped__(optimizer, *args, **kwargs)

    return alone


def set_options(optimizer: torch.optim.Optimizer, hyper: Sequence[Hyper]) -> None:
    """Give each parameter group its options for the next step."""
    for group, options in zip(optimizer.param_groups, hyper, strict=True):
        group.update(as_options(options))


def by_group(group_of: Iterable[int]) -> dict[int, list[int]]:
    """Group -> the positions in ``group_of`` that have it, both in ascending order."""
    found: dict[int, list[int]] = {}
    for at, group in enumerate(group_of):
        found.setdefault(group, []).append(at)
    return dict(sorted(found.items()))


def options_of(group: Hyper) -> Hyper:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def on_cpu(options: Hyper) -> Hyper:
    """The options with which a class can be tried on the CPU."""
    return {key: value for key, value in options.items() if key not in ("fused", "capturable")}


def as_options(hyper: Hyper) -> Hyper:
    """A group's options as torch has them: JSON's lists turned into tuples, counters into tensors of their own. See
    [Note: counters]."""
    return {key: _as_option(value) for key, value in hyper.items()}


def _as_option(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {_INTEGER, "dtype"}:
        return torch.tensor(value[_INTEGER], dtype=getattr(torch, value["dtype"]), device="cpu")
    return own_option(tuple(map(_as_option, value)) if isinstance(value, list) else value)


def own_option(value: Any) -> Any:
    """An option for a group of another optimizer: a copy of a counter, else ``value``."""
    return value.clone() if is_counter(value) else value


def is_counter(value: object) -> bool:
    """Whether an option is an integer in a tensor.

    [Note: counters] A class that keeps a count of steps in such a tensor adds to it in place, so instances get it as a
    tensor, and each a tensor of its own. Numbers in floating-point tensors (a rate) are only read: instances get
    numbers."""
    return isinstance(value, Tensor) and value.dim() == 0 and value.dtype in _INTEGERS


def plain_value(value: Any, name: str) -> Any:
    """Option ``name`` of a group as a plain JSON value; ``as_options`` reads it. Raises UnsupportedError if it is
    none."""
    if isinstance(value, Tensor) and is_counter(value):
        return {_INTEGER: value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [plain_value(item, name) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedError(f"option {name!r} of a parameter group is {value!r}; pass a plain number, flag or text")


# ---- stand-ins ---------------------------------------------------------------------------------------------------


@outside_modes  # a default device is a mode
def over_matrices(make: OptimizerMaker, hyper: Sequence[Hyper]) -> torch.optim.Optimizer:
    """An instance over small matrices, which every class takes, one in each group. Raises what the class raises."""
    return make.build(hyper, [[Parameter(torch.zeros(8, 8, dtype=torch.float32, device="cpu"))] for _ in hyper])


class GroupEntries:
    """Writes what ``step()`` of a class writes into its parameter groups (a count of steps, a rate that warms up) where
    the parameters are not: an instance over stand-ins steps with zero gradients.

    For classes whose entries depend on other entries alone, which ``optimizer_trial`` makes sure of. Knows options; not
    the parameters that the user's groups train."""

    def __init__(self, make: OptimizerMaker, hyper: Sequence[Hyper]) -> None:
        """``hyper``: each group's options."""
        self._optimizer, self.num_groups = over_matrices(make, hyper), len(hyper)
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.zeros_like(param)

    def step(self, groups: Sequence[Hyper]) -> None:
        """Give the groups, which have the options of this step, the entries that the step leaves in them."""
        told = [{name: plain_value(value, name) for name, value in options_of(group).items()} for group in groups]
        set_options(self._optimizer, told)
        step_alone(self._optimizer)
        for group, was, ours in zip(groups, told, self._optimizer.param_groups, strict=True):
            now = {name: plain_value(value, name) for name, value in options_of(ours).items()}
            group.update(as_options({name: value for name, value in now.items() if value != was.get(name, was)}))
