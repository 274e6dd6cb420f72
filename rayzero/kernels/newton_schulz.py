"""Cuts the step of a class that calls torch's Newton-Schulz in two there, without a copy of its code: what goes in is
taken from a step that ends at the call, and what comes out is what the call returns in the step that is made.

A thread says what its calls return. Calls of other threads, and those that it says nothing of, compute."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import _muon

from rayzero.errors import UnsupportedError
from rayzero.kernels.optimizer_class import OptimizerMaker, State, maker_of_group, own_options, step_alone
from rayzero.modes import outside_modes
from rayzero.protocol.messages import Hyper
from rayzero.protocol.products import STEPS

Answer = Callable[[Tensor], Tensor | None]  # by what goes in; None: compute it

_FUNCTION = "_zeropower_via_newtonschulz"
_OPTIONS = ("ns_coefficients", STEPS, "eps")  # what it is called with besides the matrix, and entries of the group
_torchs: Any = getattr(_muon, _FUNCTION)
_here = threading.local()  # .answer, .took: see ``answered``


def newton_schulz(matrix: Tensor, options: Hyper) -> Tensor:
    """torch's own function, on the matrix's device: (m, n) to (m, n) in bf16. Overwrites a bf16 ``matrix``.
    ``options``: of its parameter group."""
    result: Tensor = _torchs(matrix, *(options[name] for name in _OPTIONS))
    return result


@functools.cache
def _form(shape: tuple[int, int]) -> Tensor:
    """What comes out has these strides: how an update is rounded may depend on them."""
    matrix = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return newton_schulz(matrix, dict(zip(_OPTIONS, ((1.0, 1.0, 1.0), 1, 1e-7), strict=True)))


def as_product(flat: Tensor, shape: tuple[int, int]) -> Tensor:
    """``flat`` (1D, bf16) as what comes out for a matrix of this shape."""
    form = _form(shape)
    return flat.as_strided(form.shape, form.stride(), flat.storage_offset())


@contextmanager
def answered(answer: Answer | None) -> Iterator[list[float]]:
    """A context in which this thread's calls return what ``answer`` says. Yields the seconds of each matrix that they
    have computed, because it says nothing of it; None: it says nothing of any."""
    setattr(_muon, _FUNCTION, _asking)
    took: list[float] = []
    outer, _here.answer, _here.took = (getattr(_here, "answer", None), getattr(_here, "took", None)), answer, took
    try:
        yield took
    finally:
        _here.answer, _here.took = outer


@functools.wraps(_torchs)
def _asking(grad: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    answer: Answer | None = getattr(_here, "answer", None)
    found = None if answer is None else answer(grad)
    if found is not None:
        return found
    began, took = time.perf_counter(), getattr(_here, "took", None)
    result: Tensor = _torchs(grad, *args, **kwargs)
    if took is not None:
        took.append(time.perf_counter() - began)
    return result


class _FedError(Exception):
    """Ends a step at its call."""


@outside_modes
def fed(make: OptimizerMaker, options: Hyper, grad: Tensor, state: State) -> Tensor | None:
    """What the class feeds into Newton-Schulz for a parameter with this gradient (m, n): bf16, memory of its own. None:
    it does not call it. ``state``: what it keeps of the parameter, which stays as it is; empty before its first
    update."""
    param = Parameter(torch.zeros(grad.shape, dtype=torch.float32, device="cpu"))  # no memory until it is written to
    make, options = maker_of_group(make, options), own_options(options)
    optimizer = make.build([options], [[param]])
    if state:
        optimizer.state[param] = {
            name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()
        }
    param.grad, came = grad, list[Tensor]()

    def take(matrix: Tensor) -> Tensor | None:
        came.append(matrix.to(torch.bfloat16, copy=True))
        raise _FedError

    with answered(take):
        try:
            step_alone(optimizer)
        except _FedError:
            return came[0]
    return None


def answer_from(pairs: list[tuple[Tensor, Tensor]]) -> Answer:
    """Answers with what came out for what went in (bf16), which it finds by its bits and takes out of ``pairs``."""

    def answer(matrix: Tensor) -> Tensor | None:
        bits = matrix.bfloat16().view(torch.int16)
        for at, (given, out) in enumerate(pairs):
            if given.shape == bits.shape and torch.equal(given.view(torch.int16), bits):
                del pairs[at]
                return out
        return None

    return answer


@outside_modes
def require_divided(make: OptimizerMaker, hyper: Sequence[Hyper]) -> None:
    """Raise UnsupportedError unless the class's steps are the same when they are made in two. ``hyper``: of each group;
    those that have no Newton-Schulz are left out."""
    with_products = [options for options in hyper if STEPS in options]
    if not with_products:
        raise UnsupportedError(
            f"matrix_updates='rank' is for torch.optim.Muon, and {make.name} has no group with {STEPS!r}; "
            "set matrix_updates='owner'"
        )
    for options in with_products:
        if why := _difference(maker_of_group(make, options), own_options(options)):
            raise UnsupportedError(
                f"matrix_updates='rank': {make.name} with torch {torch.__version__} {why}; set matrix_updates='owner'"
            )


def _difference(make: OptimizerMaker, options: Hyper) -> str:
    """Why a step in two is not the class's own; "": it is."""
    numbers = torch.Generator().manual_seed(2026)
    for shape in ((16, 24), (24, 16), (8, 8)):
        first = torch.randn(shape, generator=numbers, dtype=torch.float32, device="cpu")
        ours, theirs = Parameter(first.clone()), Parameter(first.clone())
        divided, whole = make.build([options], [[ours]]), make.build([options], [[theirs]])
        for _ in range(2):
            ours.grad = torch.randn(shape, generator=numbers, dtype=torch.float32, device="cpu")
            theirs.grad = ours.grad.clone()
            given = fed(make, options, ours.grad, divided.state.get(ours, {}))
            if given is None:
                return "does not call torch's Newton-Schulz"
            product = newton_schulz(given.clone(), options)
            flat = torch.empty(given.numel(), dtype=torch.bfloat16, device="cpu")
            as_product(flat, shape).copy_(product)
            unused = [(given, as_product(flat, shape))]
            with answered(answer_from(unused)) as computed:
                step_alone(divided)
            step_alone(whole)
            if unused or computed:
                return "does not call torch's Newton-Schulz once, and with the same matrix each time"
            if product.stride() != _form(shape).stride() or not torch.equal(ours, theirs):
                return "has other bits if its Newton-Schulz is computed before its step"
    return ""
