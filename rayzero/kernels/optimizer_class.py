"""Works with any torch optimizer class: makes an instance over given groups, reads the states it keeps, and tries
whether a parameter in pieces gets equal bits.

[Note: the probe] Whether a class may get a parameter in pieces is tried, not looked up. The same fp32 values and
gradients go through it once as a matrix, once flat, and once flat in pieces, for several steps, and every bit of
weights and states must agree. A class that mixes elements (norms, factored moments, Muon's matrix products), needs a
closure, or draws random numbers fails and is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rayzero.errors import UnsupportedError
from rayzero.modes import outside_modes
from rayzero.protocol.messages import STEP, Hyper

State = dict[str, Any]  # of one parameter, as torch has it: name -> tensor or number

_PROBE_SHAPE = (16, 24)  # elements of the probe's matrix ...
_PROBE_PIECES = (64, 192, 128)  # ... and of its pieces
_PROBE_STEPS = 4

_REFUSED = {  # reasons that are clearer than the probe's
    "LBFGS": "it needs a closure and a line search over all parameters",
    "SparseAdam": "it takes sparse gradients only",
    "Muon": "it orthogonalises whole matrices",
    "Adafactor": "it factors whole matrices and scales by their norm",
}


# ---- instances ---------------------------------------------------------------------------------------------------


@outside_modes  # some classes make states at once: on the default device, which is a mode
def build(
    cls: type[torch.optim.Optimizer], hyper: Sequence[Hyper], members: Sequence[Sequence[Tensor]]
) -> torch.optim.Optimizer:
    """An instance with these groups; ``members``: the parameters of each. The constructor gets the first group's
    options too, because some classes require them, and Adagrad fills its state from its own argument."""
    groups = [as_options(options) | {"params": list(params)} for options, params in zip(hyper, members, strict=True)]
    accepted = list(inspect.signature(cls).parameters.values())[1:]
    return cls(groups, **{p.name: groups[0][p.name] for p in accepted if p.name in groups[0] and p.name != "params"})


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
    """A group's options with JSON's lists turned into tuples, as torch has them."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in hyper.items()}


# ---- states ------------------------------------------------------------------------------------------------------


def is_scalar(value: object) -> bool:
    """Whether a state is a single number, as a 0-dim tensor or as a Python number."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)


def scalar_like(template: object, value: float) -> object:
    """``value`` in the form of ``template``."""
    if isinstance(template, Tensor):
        return torch.tensor(value, dtype=template.dtype, device="cpu")
    return type(template)(value)  # type: ignore[call-arg]


@outside_modes
def stepped_once(optimizer: torch.optim.Optimizer) -> State:
    """Step an optimizer of one parameter with a zero gradient. Returns what it keeps for the parameter."""
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.zeros_like(param)
    optimizer.step()
    return dict(optimizer.state[param])


@outside_modes
def state_template(cls: type[torch.optim.Optimizer], hyper: Hyper, *, stepped: bool = True) -> State:
    """What ``cls`` keeps for an fp32 parameter of 64 elements after one update, or before any with ``stepped=False``:
    name -> tensor or number."""
    param = torch.zeros(64, requires_grad=True, dtype=torch.float32, device="cpu")
    optimizer = build(cls, [hyper], [[param]])
    return stepped_once(optimizer) if stepped else dict(optimizer.state.get(param, {}))


@outside_modes
def zero_state(cls: type[torch.optim.Optimizer], options: Hyper, like: Tensor) -> State:
    """The state that ``cls`` makes for a parameter with the shape, dtype and device of ``like``, after a step with a
    zero gradient. The step count is set back to zero."""
    state = stepped_once(build(cls, [options], [[like.detach().clone().requires_grad_()]]))
    if STEP in state:
        state[STEP] = scalar_like(state[STEP], 0.0)
    return state


def state_names(cls: type[torch.optim.Optimizer], options: Hyper) -> set[str]:
    """The names of what the class keeps for a parameter."""
    return set(zero_state(cls, options, torch.ones(2, 2, dtype=torch.float32, device="cpu")))


def state_bytes(cls: type[torch.optim.Optimizer], options: Hyper, dtype: torch.dtype) -> int:
    """The bytes of state that the class keeps for an element of ``dtype``, measured on 4,096 elements and rounded
    up."""
    numel = 4096
    state = zero_state(cls, on_cpu(options), torch.ones(64, 64, dtype=dtype, device="cpu"))
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
                optimizer.state[param] = zero_state(type(optimizer), options_of(group), param)


# ---- what a class can do -----------------------------------------------------------------------------------------


def is_elementwise(cls: type[torch.optim.Optimizer], options: Hyper) -> bool:
    """Whether the class gives a parameter in pieces the same bits. It is run to find out."""
    try:
        probe(cls, options)
    except UnsupportedError:
        return False
    return True


def require_whole(cls: type[torch.optim.Optimizer], options: Hyper) -> None:
    """Raise UnsupportedError that names the class and the reason unless the class can step dense tensors without a
    closure, and gives the same bits twice."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    try:
        same = _equal(*(_run_probe(cls, options, [_PROBE_SHAPE]) for _ in range(2)))
    except Exception as exc:  # a foreign class may raise anything; whatever it is, the class cannot be used
        raise UnsupportedError(
            f"{name} cannot be offloaded: a trial step without a closure, on a dense matrix, raised {exc!r}; "
            "use a class that steps from .grad alone"
        ) from exc
    if not same:
        raise UnsupportedError(f"{name} cannot be offloaded: two equal trial steps gave different weights")


def probe(cls: type[torch.optim.Optimizer], hyper: Hyper) -> None:
    """Raise UnsupportedError that names the class and the reason unless whole and split parameters get equal bits."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls.__module__.startswith("torch.optim") and cls.__name__ in _REFUSED:
        raise UnsupportedError(f"{name} cannot run on shards: {_REFUSED[cls.__name__]}")
    numel = sum(_PROBE_PIECES)
    try:
        whole = _run_probe(cls, hyper, [_PROBE_SHAPE])
        same = all(
            _equal(whole, _run_probe(cls, hyper, shapes)) for shapes in ([(numel,)], [(n,) for n in _PROBE_PIECES])
        )
    except Exception as exc:  # a foreign class may raise anything; whatever it is, the class cannot run on slices
        raise UnsupportedError(f"{name} cannot run on shards: a trial on slices raised {exc!r}") from exc
    if not same:
        raise UnsupportedError(
            f"{name} is not element-wise: a parameter split into slices gets other values than the whole one, "
            "so it cannot run on shards; use an element-wise optimizer (Adam, AdamW, SGD, Adagrad, RMSprop, ...)"
        )


@outside_modes
def _run_probe(cls: type[torch.optim.Optimizer], hyper: Hyper, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The weights and element-wise states after some steps, each as one flat tensor of all pieces."""
    values = torch.Generator().manual_seed(2026)
    draws = [
        torch.randn(sum(_PROBE_PIECES), generator=values, dtype=torch.float32, device="cpu")
        for _ in range(_PROBE_STEPS + 1)
    ]
    params = [piece.detach().requires_grad_() for piece in _cut(draws[0], shapes)]
    optimizer = build(cls, [hyper], [params])
    for draw in draws[1:]:
        for param, grad in zip(params, _cut(draw, shapes), strict=True):
            param.grad = grad
        optimizer.step()
    states = [optimizer.state[param] for param in params]
    kept = [name for name, value in states[0].items() if isinstance(value, Tensor) and not is_scalar(value)]
    return [_joined(params), *(_joined([state[name] for state in states]) for name in kept)]


def _cut(values: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [
        piece.clone().view(shape) for piece, shape in zip(torch.split_with_sizes(values, sizes), shapes, strict=True)
    ]


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat([piece.detach().reshape(-1) for piece in pieces])


def _equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
