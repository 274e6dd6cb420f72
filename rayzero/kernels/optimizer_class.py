"""Works with any torch optimizer class: makes an instance over given groups, steps it, and sets its options. Several of
them over one model are one: an entry of each parameter group says which class updates it. ``optimizer_trial`` finds out
what a class can do, ``optimizer_states`` what it keeps.

A class may also read attributes and names of its parameters. The parts of Parameters that owners and buckets have lack
both, so such a class is refused: it would go on silently as if nobody had set them.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from rayzero.errors import ConfigError, UnsupportedError
from rayzero.modes import outside_modes
from rayzero.protocol.hyper import resolve_optimizer
from rayzero.protocol.messages import CLASS, Hyper

State = dict[str, Any]  # of one parameter, as torch has it: name -> tensor or number, or some of them

_BY_SCHEDULERS = "initial_lr"  # the entry that every torch scheduler writes into each group
_INTEGER, _DTYPE = "integer", "dtype"  # keys of a counter's value and a dtype in JSON. [Note: counters]
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_INSTEAD = "give those Parameters a group with an entry that says the same"
_NAMES = "param_names"  # the entry of a group that torch makes of named parameters
_SHAPES = ((8, 8), (8,), (2, 2, 2, 2))


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
    in ``step_alone()``. Torch looks its hooks up in a global, so no instance can have others.

    There, it imports torch's compiler only in a process that has it: torch's own wrapper imports it at the first step,
    which takes a second and 20 MiB, to break a graph that no process has without it. (Classes that call what torch
    writes in Python for its meta device, such as Adagrad's root, import it all the same.)"""
    inner = hooked.__wrapped__
    breaks_graphs = getattr(getattr(inner, "__code__", None), "co_name", "") == "_use_grad"

    @functools.wraps(hooked)
    def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not getattr(_alone, "steps", False):
            return hooked(optimizer, *args, **kwargs)
        if not breaks_graphs or "torch._dynamo" in sys.modules:
            return inner(optimizer, *args, **kwargs)
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return inner.__wrapped__(optimizer, *args, **kwargs)

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
    """A group's options as torch has them: JSON's lists turned into tuples, names of dtypes into dtypes, counters into
    tensors of their own. See [Note: counters]."""
    return {key: _as_option(value) for key, value in hyper.items()}


def _as_option(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {_INTEGER, _DTYPE}:
        return torch.tensor(value[_INTEGER], dtype=getattr(torch, value[_DTYPE]), device="cpu")
    if isinstance(value, dict):
        dtype = getattr(torch, value[_DTYPE]) if value.keys() == {_DTYPE} else None
        return dtype or {name: _as_option(item) for name, item in value.items()}
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
        return {_INTEGER: value.item()} | plain_value(value.dtype, name)
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [plain_value(item, name) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value) and _DTYPE not in value:
        return {key: plain_value(item, name) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedError(f"option {name!r} of a parameter group is {value!r}; pass a number, flag, text or dtype")


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


class Optimizers(torch.optim.Optimizer):
    """Steps every group with an optimizer of its class.

    Knows which groups are of which optimizer, and shares groups and states with it; not what an optimizer computes."""

    def __init__(self, params: Iterable[Hyper], attributes: Mapping[str, Hyper] | None = None) -> None:
        """Make the optimizers, too, one of each class. ``attributes``: of each class's instance, by its import path
        (``OptimizerMaker.attributes``)."""
        super().__init__(list(params), {})
        self.attributes = dict(attributes or {})
        self.parts = [self._make(path) for path in dict.fromkeys(group[CLASS] for group in self.param_groups)]

    @classmethod
    def of(cls, given: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> Optimizers:
        """Those that a user made, as one. ``names``: of Parameters, by id, for messages.

        If they are of different classes, each group gets the entry that says which. Raises ConfigError if there are
        none, UnsupportedError if two have a parameter in common or one has hooks."""
        if not given:
            raise ConfigError("a list of optimizers was empty; pass a torch.optim.Optimizer, or a list of them")
        _refuse_shared(given, names)
        if hooked := next((part for part in given if any(getattr(part, name) for name in HOOKS)), None):
            raise UnsupportedError(
                f"{type(hooked).__name__}, one of several optimizers, has hooks, but there is one step for all: "
                "register them on the optimizer that rayzero.prepare() returns"
            )
        one = cls.__new__(cls)
        one.attributes, one.parts = {}, list(given)
        for part in given if one.kind is cls else ():
            for group in part.param_groups:
                group[CLASS] = path_of(type(part))
        known = set.intersection(*(set(part.defaults) for part in given))  # a scheduler asks for what all have
        defaults = {name: value for name, value in given[0].defaults.items() if name in known}
        torch.optim.Optimizer.__init__(one, [group for part in given for group in part.param_groups], defaults)
        return one

    @property
    def kind(self) -> type[torch.optim.Optimizer]:
        """The class that owners run: that of all parts, or this one."""
        kinds = {type(part) for part in self.parts}
        return kinds.pop() if len(kinds) == 1 else type(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of each class, without hooks."""
        for path, part in {path_of(type(part)): part for part in self.parts}.items():
            part.state = self.state
            part.param_groups = self._groups(path)
            step_alone(part)

    def _groups(self, path: str) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group.get(CLASS, path) == path]

    def _make(self, path: str) -> torch.optim.Optimizer:
        groups = self._groups(path)
        hyper = [{name: plain_value(value, name) for name, value in options_of(group).items()} for group in groups]
        make = OptimizerMaker(resolve_optimizer(path), self.attributes.get(path, {}))
        made = make.build(list(map(own_options, hyper)), [group["params"] for group in groups])
        for group, own in zip(groups, made.param_groups, strict=True):
            group.update(options_of(own))  # with what the constructor has added
        self.state.update(made.state)
        return made


HOOKS = tuple(
    f"_optimizer_{kind}_{when}_hooks" for kind in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
)


def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that a user made: the parts of several, or the optimizer itself."""
    return optimizer.parts if isinstance(optimizer, Optimizers) else [optimizer]


def own_options(options: Hyper) -> Hyper:
    """A group's options without the class's name, as the class itself has them."""
    return {name: value for name, value in options.items() if name != CLASS}


def maker_of_group(make: OptimizerMaker, options: Hyper) -> OptimizerMaker:
    """The maker of the class that updates a group with these options."""
    if make.cls is not Optimizers:
        return make
    path = options[CLASS]
    return OptimizerMaker(resolve_optimizer(path), make.attributes["attributes"].get(path, {}))


def maker_of_several(makers: Sequence[OptimizerMaker]) -> OptimizerMaker:
    """What makes instances that compute what several optimizers would. ``makers``: of each of them.

    Raises UnsupportedError if two of one class differ in their attributes: groups know their class, not their
    optimizer."""
    by_path: dict[str, OptimizerMaker] = {}
    for make in makers:
        if by_path.setdefault(path_of(make.cls), make) != make:
            raise UnsupportedError(
                f"two optimizers of the class {make.name} have different attributes, and only groups of one differ; "
                "make a subclass for one of them"
            )
    if len(by_path) == 1:
        return makers[0]
    return OptimizerMaker(Optimizers, {"attributes": {path: make.attributes for path, make in by_path.items()}})


def path_of(cls: type[torch.optim.Optimizer]) -> str:
    """The import path of a class, as ``resolve_optimizer`` takes it."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _refuse_shared(given: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> None:
    seen: dict[int, int] = {}
    for at, part in enumerate(given):
        for param in (param for group in part.param_groups for param in group["params"]):
            if seen.setdefault(id(param), at) != at:
                raise UnsupportedError(
                    f"{names.get(id(param), 'a parameter')!r} is in two of the optimizers, "
                    f"{type(given[seen[id(param)]]).__name__} (number {seen[id(param)]}) and {type(part).__name__} "
                    f"(number {at}); give each parameter to one of them"
                )


@outside_modes
def refuse_reads(make: OptimizerMaker, groups: Sequence[Mapping[str, Any]], options: Hyper) -> None:
    """Raise UnsupportedError that names what the class reads of the Parameters or their groups and parts of them do not
    have.

    ``groups``: the user's, with their Parameters. ``options``: of one group. Found in two steps over small Parameters;
    what the class raises in these is for ``optimizer_trial`` to report. Classes of torch read nothing."""
    held = {name for group in groups for param in group["params"] for name in vars(param)}
    named = any(_NAMES in group for group in groups)
    if make.is_torchs or not (held or named):
        return
    params, watched = _stepped(make, options)
    if read := sorted(held & {name for param in params for name in param.asked}):
        raise UnsupportedError(
            f"{make.name} cannot be offloaded: it reads {', '.join(map(repr, read))} of the Parameters, which the "
            f"parts of them that it would update do not have; {_INSTEAD}"
        )
    if named and any(_NAMES in group.asked for group in watched):
        raise UnsupportedError(
            f"{make.name} cannot be offloaded: it reads {_NAMES!r} of its groups, but would update parts of "
            f"parameters, which have no names; {_INSTEAD}"
        )


def _stepped(make: OptimizerMaker, options: Hyper) -> tuple[list[_Watched], list[_WatchedGroup]]:
    for shapes in (_SHAPES, _SHAPES[:1]):  # some classes take matrices only
        numbers = torch.Generator().manual_seed(2026)
        params = [_Watched(_drawn(shape, numbers)) for shape in shapes]
        optimizer = make.build([options], [params])
        groups = [_WatchedGroup(group) for group in optimizer.param_groups]
        optimizer.param_groups = groups  # type: ignore[assignment]
        try:
            for _ in range(2):  # the first makes states
                for param in params:
                    param.grad = _drawn(param.shape, numbers)
                step_alone(optimizer)
        except Exception:  # a foreign class may raise anything
            continue
        return params, groups
    return [], []


def _drawn(shape: Sequence[int], numbers: torch.Generator) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=numbers, dtype=torch.float32, device="cpu")


class _Watched(Parameter):
    """Notes which attributes it is asked for that it does not have."""

    def __init__(self, data: torch.Tensor) -> None:
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.__dict__.setdefault("asked", set()).add(name)
        raise AttributeError(f"a Parameter has no attribute {name!r}")


class _WatchedGroup(dict[str, Any]):
    """Notes which entries it is asked for."""

    def __init__(self, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)
