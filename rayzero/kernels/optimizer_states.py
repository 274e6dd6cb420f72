"""What a torch optimizer class keeps for a parameter: its form by the parameter's shape, its values as owners and
checkpoints keep them.

[Note: leaves] A state is a dict of tensors and numbers, or of lists, tuples and dicts of them; each is a *leaf* and
has a name. Owners give and take leaves as *kinds*, with a value in fp32 for every element of the parameter: a number
fills it; a number in fp64 is three that add up to it; a tensor with more elements than the parameter (a preconditioner
of a vector) is several, one piece after the other. Checkpoints have tensors of another shape than the parameter's as
they are."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from rayzero.errors import StoreError
from rayzero.kernels.optimizer_class import OptimizerMaker, State, on_cpu, options_of, set_options, step_alone
from rayzero.layout.model_layout import aligned
from rayzero.modes import outside_modes
from rayzero.protocol.messages import STEP, Hyper

_KEPT_EXACTLY = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.bool)  # by fp32


def is_scalar(value: object) -> bool:
    """Whether a state is a single number, as a 0-dim tensor or as a Python number."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)


def is_wide(value: object) -> bool:
    """Whether a number may need fp64."""
    return isinstance(value, float) or (is_scalar(value) and getattr(value, "dtype", None) is torch.float64)


def is_long(value: object) -> bool:
    """Whether a state is an integer that fp32, in which owners keep it, would round."""
    if not is_scalar(value) or is_wide(value):
        return False
    number = float(value)  # type: ignore[arg-type]
    return number != float(torch.tensor(number, dtype=torch.float32, device="cpu")) and not math.isnan(number)


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
def zero_state(make: OptimizerMaker, options: Hyper, like: Tensor) -> State:
    """The state that the class makes for a parameter with the shape, dtype and device of ``like``, after a step with a
    zero gradient. The step count is set back to zero."""
    state = stepped_once(make.build([options], [[Parameter(like.detach().clone())]]))
    if STEP in state:
        state[STEP] = scalar_like(state[STEP], 0.0)
    return state


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


def leaves(state: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors and numbers of a state by their places, "GG[0]" of a list, tuple or dict inside it. None and tensors
    without elements are left out."""
    found: dict[str, Any] = {}

    def take(place: str, value: Any) -> None:
        if type(value) in (list, tuple, dict):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                take(f"{place}[{key}]", item)
        elif value is not None and not (isinstance(value, Tensor) and not value.numel()):
            found[place] = value

    for name, value in state.items():
        take(name, value)
    return found


def with_leaves(form: Mapping[str, Any], found: Mapping[str, Any]) -> State:
    """A state like ``form`` with other tensors and numbers, by their places; what ``found`` lacks stays."""

    def taken(place: str, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(taken(f"{place}[{at}]", item) for at, item in enumerate(value))
        if type(value) is dict:
            return {key: taken(f"{place}[{key}]", item) for key, item in value.items()}
        return found.get(place, value)

    return {name: taken(name, value) for name, value in form.items()}


def unkept(state: Mapping[str, Any]) -> str:
    """A description of the first leaf that is neither a number nor a plain tensor of a dtype that fp32 holds exactly;
    "" if there is none."""
    for name, value in leaves(state).items():
        if is_scalar(value):
            continue
        if not isinstance(value, Tensor):
            return f"{name!r}, which is a {type(value).__name__}"
        if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return f"{name!r}, which is a {type(value).__name__} and not a plain tensor"
        if value.dtype not in _KEPT_EXACTLY:
            return f"{name!r} in {value.dtype}"
    return ""


def _parts(number: float) -> list[float]:
    """The three numbers in fp32."""
    found = []
    for _ in range(3):
        found.append(float(torch.tensor(number, dtype=torch.float32, device="cpu")))
        number = number - found[-1] if math.isfinite(found[-1]) else 0.0
    return found


def kinds_of(form: Mapping[str, Any], shape: Sequence[int]) -> dict[str, list[str]]:
    """Leaf -> the kinds under which owners give it, each with a value for every element of a parameter of ``shape``: a
    wide number's parts; of a tensor with more elements than the parameter, one piece after the other."""
    numel = max(1, math.prod(shape))
    found = {}
    for name, value in leaves(form).items():
        count = 3 if is_wide(value) and name != STEP else 1 if is_scalar(value) else -(-value.numel() // numel)
        found[name] = [name, *(f"{name}#{part}" for part in range(1, count))]
    return found


def in_pieces(kind: str, flat: Tensor, numel: int) -> dict[str, Tensor]:
    """A tensor's kinds (see ``kinds_of``) with their values: ``numel`` elements each, the last one may have fewer."""
    starts = range(0, flat.numel(), numel)
    return {f"{kind}#{at}" if at else kind: flat[start : start + numel] for at, start in enumerate(starts)}


def read_leaf(like: Any, values: Sequence[Tensor]) -> Any:
    """The inverse of the above: a leaf like ``like`` from the values of its kinds, 1D fp32 of a parameter's elements
    each."""
    if is_scalar(like):
        return scalar_like(like, sum(float(value[0]) for value in values))
    return torch.cat(list(values))[: like.numel()].view(like.shape)


def flat_states(state: Mapping[str, Any], shape: Sequence[int], numel: int, steps: int) -> dict[str, Tensor]:
    """The leaves of a parameter's state as 1D fp32 CPU tensors. Those of the parameter's ``shape`` have its first
    ``numel`` elements, which a number fills. The step count is left out where it is ``steps``, the number of the
    parameter's updates."""
    found = {}
    for name, value in leaves(state).items():
        if is_scalar(value):
            if name == STEP and float(value) == steps:
                continue
            numbers = _parts(float(value)) if is_wide(value) and name != STEP else [float(value)]
            for at, number in enumerate(numbers):
                kind = f"{name}#{at}" if at else name
                found[kind] = torch.full((numel,), number, dtype=torch.float32, device="cpu")
        else:
            flat = value.detach().reshape(-1).float().cpu()
            found[name] = flat[:numel] if tuple(value.shape) == tuple(shape) else flat
    return found


def _own_memory(_: str, like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")


def restored_state(
    form: State,
    values: Mapping[str, Tensor],
    steps: int,
    memory: Callable[[str, Tensor], Tensor] = _own_memory,
) -> State:
    """The inverse of ``flat_states``. ``form``: what the class keeps for such a parameter. ``memory``: of a leaf's
    values, which are zero where ``values`` has none. Raises StoreError if a tensor has another size."""
    found: dict[str, Any] = {}
    for name, like in leaves(form).items():
        if is_scalar(like):
            kinds = [kind for kind in (name, f"{name}#1", f"{name}#2") if kind in values]
            found[name] = scalar_like(like, sum(float(values[k][0]) for k in kinds) if kinds else float(steps))
            continue
        found[name] = memory(name, like).zero_()
        if name in values:
            if like.numel() not in (values[name].numel(), aligned(values[name].numel())):
                raise StoreError(f"{name} has {values[name].numel():,} elements, and {like.numel():,} are kept here")
            fill_leaf(found[name], values[name])
    return with_leaves(form, found)


def fill_leaf(leaf: Tensor, flat: Tensor, start: int = 0) -> None:
    """Replace elements of a leaf, in C order from ``start`` on."""
    whole = leaf.contiguous()
    whole.view(-1)[start : start + flat.numel()].copy_(flat)
    if whole is not leaf:
        leaf.copy_(whole)


# ---- what a class keeps for a shape ---------------------------------------------------------------------------------


_PROBES = ((16, 24), (132, 128), (8448,), (24, 11, 8, 4))  # classes keep other things of large ones
_MOST_PROBED = 1 << 20  # elements of a tensor that a class keeps; what it does with more may take minutes


class StateForms:
    """What a class keeps for parameters, by their shapes, with the options of one group.

    Knows the class and its options; not values. A step on the ``meta`` device says it without memory or time, if it
    says of ``_PROBES`` what real steps do; else a parameter of the shape is stepped once."""

    def __init__(self, make: OptimizerMaker, options: Hyper, *, made_with: Hyper | None = None) -> None:
        """``made_with``: the options that an instance is made with, before ``options`` are set; None: the same."""
        self.make, self._options = make, on_cpu(options)
        self._made_with = self._options if made_with is None else on_cpu(made_with)
        self._known: dict[tuple[tuple[int, ...], bool], State] = {}

    def of(self, shape: Sequence[int], *, stepped: bool = True) -> State:
        """What the class keeps for an fp32 parameter of this shape after one update, or before any with
        ``stepped=False``. Tensors have a shape, strides and a dtype, but not always values."""
        key = tuple(shape), stepped
        if key not in self._known and self._meta_agrees:
            with suppress(Exception):  # a step over this shape needs values
                self._known[key] = self._made(key[0], "meta", stepped=stepped)
        if key not in self._known:
            self._known[key] = self._made(key[0], "cpu", stepped=stepped)
        return self._known[key]

    def is_dear(self, shape: Sequence[int]) -> bool:
        """Whether the class keeps so much of such a parameter that a step may take long."""
        return self._meta_agrees and _is_large(self.of(shape))

    @functools.cached_property
    def _meta_agrees(self) -> bool:
        agreed = False
        for shape in _PROBES:
            meta: State | None = None
            with suppress(Exception):  # it needs values, or does not take this shape
                meta = self._made(shape, "meta", stepped=True)
            if meta is not None and _is_large(meta):
                continue
            try:
                real = self._made(shape, "cpu", stepped=True)
            except Exception:  # the class does not take this shape
                continue
            if meta is None or described(meta) != described(real):
                return False
            agreed = True
        return agreed

    @outside_modes
    def _made(self, shape: tuple[int, ...], device: str, *, stepped: bool) -> State:
        param = Parameter(torch.zeros(shape, dtype=torch.float32, device=device))
        numbers = _MetaNumbers() if device == "meta" else nullcontext()  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices=[]), numbers:
            optimizer = self.make.build([self._made_with], [[param]])
            if self._made_with is not self._options:
                set_options(optimizer, [self._options])
            return stepped_once(optimizer) if stepped else dict(optimizer.state.get(param, {}))


def _is_large(state: State) -> bool:
    return any(not is_scalar(value) and value.numel() > _MOST_PROBED for value in leaves(state).values())


class _MetaNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers that are read from meta tensors are 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))


def described(state: Mapping[str, Any], *, strides: bool = True) -> dict[str, tuple[Any, ...]]:
    """Leaf -> dtype, shape and perhaps strides of a tensor; of a number nothing."""
    return {
        name: () if is_scalar(value) else (value.dtype, tuple(value.shape), value.stride() if strides else ())
        for name, value in leaves(state).items()
    }
