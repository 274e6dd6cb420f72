"""Works with any torch optimizer class: makes an instance over given groups, steps it, and reads and writes the states
that it keeps. ``optimizer_trial`` finds out what a class can do."""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from rayzero.errors import UnsupportedError
from rayzero.modes import outside_modes
from rayzero.protocol.messages import STEP, Hyper

State = dict[str, Any]  # of one parameter, as torch has it: name -> tensor or number

_BY_SCHEDULERS = "initial_lr"  # the entry that every torch scheduler writes into each group
_INTEGER = "integer"  # the key of a counter's value in JSON. [Note: counters]
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_KEPT_EXACTLY = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.bool)  # by fp32


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

    @functools.wraps(hooked)
    def step(*args: Any, **kwargs: Any) -> Any:
        return (hooked.__wrapped__ if getattr(_alone, "steps", False) else hooked)(*args, **kwargs)

    step._is_routed = True  # type: ignore[attr-defined]
    return step


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


# ---- states ------------------------------------------------------------------------------------------------------


def is_scalar(value: object) -> bool:
    """Whether a state is a single number, as a 0-dim tensor or as a Python number."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)


def is_long(value: object) -> bool:
    """Whether a state is a finite number that fp32, in which owners keep states, would round."""
    if not is_scalar(value):
        return False
    number = float(value)  # type: ignore[arg-type]
    return math.isfinite(number) and number != float(torch.tensor(number, dtype=torch.float32, device="cpu"))


def scalar_like(template: object, value: float) -> object:
    """``value`` in the form of ``template``."""
    if isinstance(template, Tensor):
        return torch.tensor(value, dtype=template.dtype, device="cpu")
    kind: Any = type(template)
    made: object = kind(value)
    return made


@outside_modes
def stepped_once(optimizer: torch.optim.Optimizer) -> State:
    """Step an optimizer of one parameter with a zero gradient. Returns what it keeps for the parameter."""
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.zeros_like(param)
    step_alone(optimizer)
    return dict(optimizer.state[param])


@outside_modes
def state_template(make: OptimizerMaker, hyper: Hyper, *, stepped: bool = True) -> State:
    """What the class keeps for an fp32 matrix of 64 elements after one update, or before any with ``stepped=False``:
    name -> tensor or number. (A class may take matrices only; one whose states depend on the shape is not run.)"""
    param = Parameter(torch.zeros(8, 8, dtype=torch.float32, device="cpu"))
    optimizer = make.build([hyper], [[param]])
    return stepped_once(optimizer) if stepped else dict(optimizer.state.get(param, {}))


@outside_modes
def zero_state(make: OptimizerMaker, options: Hyper, like: Tensor) -> State:
    """The state that the class makes for a parameter with the shape, dtype and device of ``like``, after a step with a
    zero gradient. The step count is set back to zero."""
    state = stepped_once(make.build([options], [[Parameter(like.detach().clone())]]))
    if STEP in state:
        state[STEP] = scalar_like(state[STEP], 0.0)
    return state


def state_names(make: OptimizerMaker, options: Hyper) -> set[str]:
    """The names of what the class keeps for a parameter."""
    return set(zero_state(make, options, torch.ones(2, 2, dtype=torch.float32, device="cpu")))


def state_bytes(make: OptimizerMaker, options: Hyper, dtype: torch.dtype) -> int:
    """The bytes of state that the class keeps for an element of ``dtype``, measured on 4,096 elements and rounded
    up."""
    numel = 4096
    state = zero_state(make, on_cpu(options), torch.ones(64, 64, dtype=dtype, device="cpu"))
    return -(-sum(value.nbytes for value in state.values() if isinstance(value, Tensor) and value.dim()) // numel)


def load_into(optimizer: torch.optim.Optimizer, states: Sequence[State]) -> None:
    """Give an optimizer copies of its parameters' states, in the order of its parameters. Its groups stay."""
    copies = {
        at: {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
        for at, state in enumerate(states)
        if state
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": copies, "param_groups": groups})


@torch.no_grad()
@outside_modes
def prepare_states(optimizer: torch.optim.Optimizer) -> None:
    """Make the states that parameters lack, from copies that are stepped once with zero gradients; the step count is
    zero."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not optimizer.state.get(param):
                optimizer.state[param] = zero_state(OptimizerMaker(type(optimizer)), options_of(group), param)


# ---- states as owners and checkpoints keep them --------------------------------------------------------------------


def unkept(state: Mapping[str, Any], shape: Sequence[int]) -> str:
    """A description of the first state that neither is one number nor has the parameter's ``shape`` and a dtype that
    fp32 holds exactly; "" if there is none."""
    for name, value in state.items():
        if value is None or is_scalar(value):
            continue
        if not isinstance(value, Tensor):
            return f"{name!r}, which is a {type(value).__name__}"
        if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return f"{name!r}, which is a {type(value).__name__} and not a plain tensor"
        if tuple(value.shape) != tuple(shape):
            return f"{name!r} of shape {tuple(value.shape)} for a parameter of shape {tuple(shape)}"
        if value.dtype not in _KEPT_EXACTLY:
            return f"{name!r} in {value.dtype}"
    return ""


def flat_states(state: Mapping[str, Any], numel: int, steps: int) -> dict[str, Tensor]:
    """A parameter's states as 1D fp32 CPU tensors of its first ``numel`` elements, which a number fills. The step count
    is left out where it is ``steps``, the number of the parameter's updates."""
    found = {}
    for name, value in state.items():
        if is_scalar(value) and not (name == STEP and float(value) == steps):
            found[name] = torch.full((numel,), float(value), dtype=torch.float32, device="cpu")
        elif isinstance(value, Tensor) and not is_scalar(value):
            found[name] = value.detach().reshape(-1)[:numel].float().cpu()
    return found


def restored_state(alone: torch.optim.Optimizer, values: Mapping[str, Tensor], steps: int) -> State:
    """The inverse of ``flat_states``. ``alone``: an instance of one parameter, a copy, which has not stepped."""
    template = stepped_once(alone)
    for name, value in template.items():
        if name in values and isinstance(value, Tensor) and not is_scalar(value):
            value.zero_().reshape(-1)[: values[name].numel()].copy_(values[name])
        elif is_scalar(value):
            template[name] = scalar_like(value, float(values[name][0]) if name in values else float(steps))
    return template
