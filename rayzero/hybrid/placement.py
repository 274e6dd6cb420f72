"""Decides which side updates which pieces, and how many from measured times. Pure; it only looks at the
parameters. And merges the options of the two sides' classes into one set of groups, kept equal in both directions.

The host gets a parameter's first elements, the device the rest. At most one parameter is cut, at a multiple of 64
elements.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rayzero.errors import ConfigError, UnsupportedError
from rayzero.kernels import ADAMS
from rayzero.kernels.optimizer_class import is_counter, options_of, own_option
from rayzero.layout.model_layout import ALIGN

Order = Literal["first", "last"]
OptimizerClass = type[torch.optim.Optimizer]
Group = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One parameter as the split sees it."""

    numel: int
    weight: int  # bytes that an element counts as
    whole: bool = False  # must not be cut
    on_host: bool = False  # on the host in any case: not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A range of one parameter's elements, updated on one side."""

    param: int  # index over all parameter groups
    start: int
    stop: int
    whole: bool  # the whole parameter: its tensors have the parameter's shape; other pieces' are 1D

    @property
    def numel(self) -> int:
        return self.stop - self.start


def total_bytes(items: Sequence[Item]) -> int:
    """The bytes that a fraction refers to: those of every parameter that either side could update."""
    return sum(item.numel * item.weight for item in items if not item.on_host)


def host_elements(items: Sequence[Item], target: int, *, order: Order = "first", at_least: bool = False) -> list[int]:
    """How many of each item's first elements the host gets, so that together they count ``target`` bytes.

    Takes whole items in ``order`` while the target leaves room. Cuts the item on the border at the multiple of 64
    elements nearest to the target (``at_least``: at the first that reaches it). If that item must stay whole, it goes
    to the side that leaves the smaller error (``at_least``: to the host)."""
    found = [0] * len(items)
    left = target
    for index in range(len(items)) if order == "first" else reversed(range(len(items))):
        item = items[index]
        found[index] = item.numel if item.on_host else _share(item, left, at_least=at_least)
        left -= 0 if item.on_host else item.numel * item.weight  # below zero after the item on the border
    return found


def _share(item: Item, left: int, *, at_least: bool) -> int:
    size = item.numel * item.weight
    if left <= 0 or size == 0:
        return 0
    if left >= size:
        return item.numel
    if item.whole:
        return item.numel if at_least or 2 * left >= size else 0
    line = ALIGN * item.weight
    lines = -(-left // line) if at_least else (left + line // 2) // line
    return min(item.numel, lines * ALIGN)


def chunks(param: int, numel: int, start: int, stop: int, most: int | None) -> list[Piece]:
    """``[start, stop)`` of a parameter of ``numel`` elements as pieces of at most ``most`` elements, a multiple of 64
    (None: one piece)."""
    step = most or max(1, stop - start)
    cuts = range(start, stop, step)
    whole = start == 0 and stop == numel and len(cuts) == 1
    return [Piece(param=param, start=at, stop=min(at + step, stop), whole=whole) for at in cuts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the user asked for. The host gets the larger share of what ``fraction`` and ``device_memory_budget`` call
    for."""

    fraction: float  # of the parameters' bytes
    device_memory_budget: int | None  # bytes of masters and states that may stay on the device
    order: Order
    bucket_bytes: int

    def __post_init__(self) -> None:
        if not 0.0 <= self.fraction <= 1.0:
            raise ConfigError(f"offload_fraction must be in [0, 1], got {self.fraction}")
        if self.device_memory_budget is not None and self.device_memory_budget < 0:
            raise ConfigError(f"device_memory_budget must be >= 0 bytes, got {self.device_memory_budget}")
        if self.order not in ("first", "last"):
            raise ConfigError(f'offload_order must be "first" or "last", got {self.order!r}')
        if self.bucket_bytes < 4 * ALIGN:
            raise ConfigError(f"bucket_bytes must be >= {4 * ALIGN}, got {self.bucket_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What each side updates, and the memory it takes. Sizes are bytes."""

    offload_fraction: float  # of the bytes of parameters that either side could update
    offloaded_bytes: int  # of parameters whose update the host computes
    device_bytes: int  # of those that the device updates
    num_buckets: int
    host_memory_bytes: int  # masters, rounded values, gradients and states that exist now
    device_memory_bytes: int  # masters and states on the device that exist now


def the_device(params: Sequence[Tensor]) -> torch.device:
    """The one device besides the CPU that has parameters, or the CPU if all are there. Raises UnsupportedError, naming
    the devices, if there are several."""
    devices = sorted({param.device for param in params if param.device.type != "cpu"}, key=str)
    if len(devices) > 1:
        raise UnsupportedError(
            f"parameters are on {', '.join(map(str, devices))}: one optimizer serves one device; make one for each"
        )
    return devices[0] if devices else torch.device("cpu")


def check_param(index: int, param: Tensor) -> None:
    """Raise UnsupportedError, naming the parameter by its index, unless it is a plain, dense, real floating-point
    tensor."""
    kind = type(param) if is_lazy(param) else type(param.detach())
    if kind is not Tensor or param.layout is not torch.strided or not param.is_floating_point():
        raise UnsupportedError(
            f"parameter {index} is a {kind.__name__} of {param.dtype} and {param.layout}: only plain, dense, real "
            "floating-point tensors can be offloaded; give the others an optimizer of their own"
        )


def decide(
    params: Sequence[Tensor],
    targets: Targets,
    device: torch.device,
    *,
    elementwise: bool,
    device_cost: Sequence[int],
) -> tuple[list[Piece], list[Piece]]:
    """(pieces that the host updates, pieces that the device updates), ascending. ``elementwise``: parameters may be
    cut. ``device_cost``: for each parameter, bytes of master and states that an element takes on the device.

    Frozen parameters have no piece. A parameter that is not contiguous is never cut, nor is any if the optimizer is not
    element-wise."""
    items = [_item(param, param.element_size(), device, elementwise) for param in params]
    shares = host_elements(items, round(targets.fraction * total_bytes(items)), order=targets.order)
    if targets.device_memory_budget is not None:
        costs = [_item(param, cost, device, elementwise) for param, cost in zip(params, device_cost, strict=True)]
        over = max(0, total_bytes(costs) - targets.device_memory_budget)
        needed = host_elements(costs, over, order=targets.order, at_least=True)
        shares = [max(pair) for pair in zip(shares, needed, strict=True)]
    host: list[Piece] = []
    kept: list[Piece] = []
    for index, (param, item, share) in enumerate(zip(params, items, shares, strict=True)):
        most = None if item.whole else targets.bucket_bytes // param.element_size() // ALIGN * ALIGN
        host += chunks(index, item.numel, 0, share, most)
        kept += chunks(index, item.numel, share, item.numel, None)
    return host, kept


def _item(param: Tensor, weight: int, device: torch.device, elementwise: bool) -> Item:
    return Item(
        numel=param.numel() if param.requires_grad else 0,
        weight=weight,
        whole=not (elementwise and param.is_contiguous()),
        on_host=param.device != device,
    )


_STEPS = 5  # steps per decision, which takes medians over them
_SLACK = 0.02  # share of the updates' time: shorter waits are noise
_GROWTH = 1.25  # growth of the fraction while nothing waits
_LEAST_MOVE = 0.05  # a move copies states, so smaller changes are not worth it


class FractionSearch:
    """Searches for the largest fraction whose updates finish before the computation needs their parameters.

    An update's time grows with the fraction; the part that the computation waits for does not hide. While there is no
    wait, the fraction grows, but not back to a value that caused one."""

    def __init__(self) -> None:
        self._too_much = float("inf")
        self._busy: list[float] = []
        self._stalls: list[float] = []

    def note(self, fraction: float, busy_s: float, stall_s: float) -> float | None:
        """Record one step at ``fraction``: seconds that updates took, and seconds that the computation waited for them.
        Every few steps, returns the fraction to move to; None where a move does not pay."""
        self._busy.append(busy_s)
        self._stalls.append(stall_s)
        if len(self._busy) < _STEPS:
            return None
        busy, stall = median(self._busy), median(self._stalls)
        self._busy, self._stalls = [], []
        wanted = min(1.0, self._better(fraction, busy, stall))
        worth = abs(wanted - fraction) >= _LEAST_MOVE or wanted == 1.0 > fraction
        return wanted if worth else None

    def _better(self, fraction: float, busy: float, stall: float) -> float:
        if stall > _SLACK * busy:
            self._too_much = min(self._too_much, fraction)
            return fraction * max(0.0, busy - stall) / busy if busy > 0.0 else fraction
        grown = max(fraction * _GROWTH, fraction + _LEAST_MOVE)
        return min(grown, (fraction + self._too_much) / 2) if self._too_much < float("inf") else grown


def defaults(cpu: OptimizerClass, gpu: OptimizerClass, given: Mapping[str, Any]) -> dict[str, Any]:
    """Both classes' options: ``given``, completed by the defaults of their constructors.

    Raises TypeError for an option that neither class has, ConfigError if their defaults differ, UnsupportedError for
    ``differentiable=True``."""
    if given.get("differentiable"):
        raise UnsupportedError(
            "differentiable=True of the optimizer is not supported: the update runs outside of autograd; leave it out"
        )
    known = [_options(cls, given) for cls in dict.fromkeys((cpu, gpu))]
    unknown = sorted(key for key in given if not any(key in options for options in known))
    if unknown:
        raise TypeError(f"{cpu.__name__} and {gpu.__name__} have no option {', '.join(unknown)}")
    differ = sorted(k for k in known[0] if len(known) > 1 and k in known[1] and known[0][k] != known[1][k])
    if differ:
        raise ConfigError(
            f"{cpu.__name__} and {gpu.__name__} have different defaults for {', '.join(differ)}; pass a value for each"
        )
    return fused({key: value for options in known for key, value in options.items()}, gpu)


def _options(cls: OptimizerClass, given: Mapping[str, Any]) -> dict[str, Any]:
    accepted = inspect.signature(cls).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    mine = {key: value for key, value in given.items() if takes_all or key in accepted}
    make: Any = cls
    return options_of(
        make([nn.Parameter(torch.zeros(2, 2, dtype=torch.float32, device="cpu"))], **mine).param_groups[0]
    )


def fused(options: Group, cls: OptimizerClass) -> Group:
    """Choose torch's fused Adam kernel, whose bits the tile kernels have, unless the user chose another
    implementation."""
    chosen = options.get("fused") is not None or options.get("foreach") or options.get("capturable")
    return options if cls not in ADAMS or chosen else {**options, "fused": True}


def fitting(saved: Sequence[Group], groups: Sequence[Group]) -> Sequence[Group]:
    """``saved`` if its groups have the sizes of ``groups``; else raises ValueError, as torch does."""
    sizes, ours = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if sizes != ours:
        raise ValueError(
            f"the state to load has parameter groups of {sizes} parameters, this optimizer of {ours}: "
            "make it with the groups that were saved"
        )
    return saved


def numbers_of(group: Group) -> Group:
    """``options_of`` with numbers in place of 0-dim tensors, because the worker reads them while a scheduler may write
    the tensors; counters are copied."""
    return {key: _number(value) for key, value in options_of(group).items()}


def _number(value: Any) -> Any:
    if isinstance(value, tuple):  # betas
        return tuple(map(_number, value))
    if is_counter(value):
        return own_option(value)
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value


class HyperLink:
    """Keeps a sub-optimizer's groups equal to the user's groups that they stand for. Knows options; not parameters. An
    option that only the sub-optimizer changed or added since the last ``push`` is taken from it; all others are copied
    to it. Each has counters of its own."""

    def __init__(
        self,
        indices: Sequence[int],
        groups_of_sub: Callable[[], Sequence[Group]],
        adapt: Callable[[Group], Group] = numbers_of,
    ) -> None:
        """``indices``: which user group each of the sub-optimizer's groups stands for. ``groups_of_sub``: returns the
        latter; called each time, because loading a state replaces them. ``adapt``: turns a user group into theirs."""
        self._indices, self._groups_of_sub, self._adapt = list(indices), groups_of_sub, adapt
        self._last: list[Group] = [{} for _ in indices]

    def pull(self, groups: Sequence[Group]) -> None:
        """Take over options that the sub-optimizer changed or added."""
        for index, sub, last in zip(self._indices, self._groups_of_sub(), self._last, strict=True):
            ours = self._adapt(groups[index])
            for key, value in last.items():
                if key in sub and not equal(sub[key], value) and key in ours and equal(ours[key], value):
                    groups[index][key] = own_option(sub[key])
            for key in options_of(sub).keys() - last.keys() - groups[index].keys():
                groups[index][key] = own_option(sub[key])

    def push(self, groups: Sequence[Group]) -> None:
        """Copy all options to the sub-optimizer."""
        adapted = [self._adapt(groups[index]) for index in self._indices]
        self._last = [{key: own_option(value) for key, value in options.items()} for options in adapted]
        for sub, options in zip(self._groups_of_sub(), adapted, strict=True):
            sub.update({key: own_option(value) for key, value in options.items()})

    def changed(self, groups: Sequence[Group]) -> list[str]:
        """The names of the options that ``push`` would change."""
        pairs = ((self._adapt(groups[index]), last) for index, last in zip(self._indices, self._last, strict=True))
        return sorted({key for ours, last in pairs for key in ours if key in last and not equal(ours[key], last[key])})


def equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        first, second = (torch.as_tensor(value, dtype=torch.float64, device="cpu") for value in (a, b))
        return bool(torch.equal(first, second))
    return bool(a == b)
