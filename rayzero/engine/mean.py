"""``rayzero.mean_over_ranks``: a loss or a metric of all ranks, for logging and evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor

from rayzero.engine.context import get_context
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.protocol.messages import MEAN_BYTES, MeanInput

N = TypeVar("N", float, Tensor)

_MOST_SAID = 80  # letters of a value in a message


@overload
def mean_over_ranks(value: Tensor, *, weight: float = 1.0) -> Tensor: ...
@overload
def mean_over_ranks(value: float, *, weight: float = 1.0) -> float: ...
@overload
def mean_over_ranks(value: Mapping[str, N], *, weight: float = 1.0) -> dict[str, N]: ...
def mean_over_ranks(value: Any, *, weight: float = 1.0) -> Any:
    """The mean of ``value`` over all ranks, with the same bits on each and in the form of ``value``.

    ::

        loss = rayzero.mean_over_ranks(loss)                                   # a 0-dim tensor
        metrics = rayzero.mean_over_ranks({"loss": total / count, "accuracy": right / count}, weight=count)

    value: a number, a small floating-point tensor of any shape on any device, or a mapping from names to numbers or
        0-dim tensors; at most 4,000 bytes, of which a number takes 8 and a name 4 and its length. Numbers come back as
        floats, tensors in their dtype and on their device, without a gradient.
    weight: how much this rank's value counts, >= 0; for example its number of samples, if ranks have different numbers.
        The value of a rank with weight 0 is ignored.

    Sums are fp64, in rank order; if a sum of finite values overflows, the mean is computed exactly instead. Every rank
    calls it the same number of times in the same order, from the thread that trains, and waits for the other ranks. It
    may be called at any point of a step, and waits for no step. In a run of several ranks call rayzero.prepare() first;
    with one rank, the mean is ``value``.

    Raises ConfigError for any other value, for too many bytes, and if all weights are 0; UnsupportedError before
    prepare(); StepMismatchError, on all ranks, if names or shapes differ between ranks or if ranks make this and other
    waiting calls in different orders; RankLeftError if a rank has left, StallError if one makes no progress."""
    given = _input(value, _weight(weight))
    context = get_context()
    if context.world_size == 1:
        if not given.weight:
            raise given.no_weight()
        return _like(value, given.values)
    if context.engine is None:
        raise UnsupportedError(
            f"mean_over_ranks() was called before rayzero.prepare(), which connects the run's {context.world_size} "
            "ranks; call it afterwards"
        )
    return _like(value, context.engine.mean(given))


def _input(value: object, weight: float) -> MeanInput:
    """What this rank gives. Raises ConfigError."""
    if isinstance(value, Mapping):
        _check_names(value)
        names = tuple(sorted(value))
        given = MeanInput(names=names, values=(0.0,) * len(names), weight=weight)
        _check_size(given)
        return replace(given, values=tuple(_number(value[name], f"of {name!r}") for name in names))
    if not isinstance(value, Tensor):
        return MeanInput(values=(_number(value, ""),), weight=weight)
    _check_tensor(value, "")
    given = MeanInput(shape=tuple(value.shape), values=(0.0,) * value.numel(), weight=weight)
    _check_size(given)
    return replace(given, values=tuple(value.detach().cpu().double().flatten().tolist()))


def _check_names(value: Mapping[Any, object]) -> None:
    if not value:
        raise ConfigError("mean_over_ranks() got an empty mapping; give it at least one number")
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(f"mean_over_ranks() takes mappings whose names are text, got {_said(name)}")
        try:
            name.encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            raise ConfigError(f"mean_over_ranks() takes names that are valid Unicode, got {name!r}") from None


def _check_size(given: MeanInput) -> None:
    if given.size_bytes > MEAN_BYTES:
        raise ConfigError(
            f"mean_over_ranks() takes at most {MEAN_BYTES:,} bytes: 8 for each number, 4 and its length for each name; "
            f"{given} needs {given.size_bytes:,}. Give it fewer numbers, for example their mean on this rank"
        )


def _check_tensor(value: Tensor, where: str) -> None:
    if value.is_nested or value.layout != torch.strided or value.is_meta:
        kind = "a nested tensor" if value.is_nested else str(value.layout)
        got = f"{kind} on {value.device} {where}".rstrip()
        raise ConfigError(f"mean_over_ranks() takes dense tensors with values, got {got}")
    if not value.is_floating_point():
        raise ConfigError(f"mean_over_ranks() takes floating-point tensors, got {value.dtype} {where}".rstrip())


def _number(value: object, where: str) -> float:
    if isinstance(value, Tensor) and value.dim() == 0:
        _check_tensor(value, where)
        return float(value)
    if not isinstance(value, Real):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise ConfigError(
            "mean_over_ranks() takes a number, a floating-point tensor, or a mapping from names to numbers and 0-dim "
            f"tensors, got {type(value).__name__}{shape} {where}".rstrip()
        )
    try:
        return float(value)
    except OverflowError:
        which = f"a number {where}".rstrip()
        raise ConfigError(f"mean_over_ranks() got {which} that is too large for a float") from None


def _weight(weight: object) -> float:
    known = isinstance(weight, Real) or (isinstance(weight, Tensor) and weight.dim() == 0)
    try:
        number = float(cast(float, weight)) if known else math.nan
    except (OverflowError, RuntimeError):  # 10**400; a tensor that is complex or has no values
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"weight of mean_over_ranks() must be a finite number >= 0, got {_said(weight)}")
    return number


def _said(value: object) -> str:
    """A short description of ``value``, on one line."""
    try:
        said = " ".join(repr(value).split())
    except ValueError:  # an integer of more digits than Python writes
        return f"{type(value).__name__} of too many digits"
    return said if len(said) <= _MOST_SAID else f"{said[:_MOST_SAID]}…"


def _like(value: Any, mean: Sequence[float]) -> Any:
    """``mean`` in the form of ``value``."""
    if isinstance(value, Mapping):
        by_name = dict(zip(sorted(value), mean, strict=True))
        return {name: _like(given, [by_name[name]]) for name, given in value.items()}
    if isinstance(value, Tensor):
        exact = torch.tensor(mean, dtype=torch.float64, device="cpu").view(value.shape)
        return exact.to(device=value.device, dtype=value.dtype)
    return mean[0]
