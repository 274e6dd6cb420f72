"""First touch: an operation on a parameter that is not there brings it up.

[Note: first touch] Module hooks unshard ahead of forward. This is the net below, for every other way to use a
parameter: except while a call of its unit is open, a Parameter has a subclass whose ``__torch_function__`` sees every
operation. It opens the unit, which takes the class off, and then calls the function *plainly*: inside it (a whole
backward under ``torch.autograd.grad``, say) other parameters' first touch must keep working, so torch functions
stay enabled. Reading metadata opens nothing.

Reading ``.grad`` of a pushed gradient is an error: it would give None, and torch's own ``clip_grad_norm_`` would
silently clip nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from rayzero.engine.private_torch import plain
from rayzero.errors import GradientAccessError, UnsupportedError

_GETTERS = (
    "grad",
    "shape",
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "_version",
    "ndim",
    "nbytes",
    "itemsize",
    "is_sparse",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_quantized",
    "is_nested",
    "_base",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "output_nr",
    "names",
    "retains_grad",
    "_grad",
    "is_mkldnn",
    "is_sparse_csr",
)
_SETTERS = (
    "requires_grad",
    "grad",
    "_grad",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)
_METHODS = (
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "stride",
    "storage_offset",
    "is_contiguous",
    "element_size",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_inference",
    "is_conj",
    "is_neg",
    "get_device",
    "has_names",
    "__len__",
    "__hash__",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "retain_grad",
    "is_same_size",
    "dim_order",
)
_FUNCTIONS = (
    "numel",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_inference",
    "is_same_size",
    "is_conj",
    "is_neg",
)


def _metadata() -> frozenset[Any]:
    """Functions that read or set what a tensor says about itself, never its bytes."""
    tensor: Any = Tensor
    found = [getattr(tensor, name).__get__ for name in _GETTERS if hasattr(tensor, name)]
    found += [getattr(tensor, name).__set__ for name in _SETTERS]
    found += [getattr(tensor, name) for name in _METHODS if hasattr(tensor, name)]
    found += [getattr(torch, name) for name in _FUNCTIONS]
    return frozenset([*found, tensor.grad.__delete__])


METADATA = _metadata()
_GRAD: Any = Tensor.grad
_GET_GRAD = _GRAD.__get__
_DATA: Any = Tensor.data
_GET_DATA, _SET_DATA = _DATA.__get__, _DATA.__set__
_REQUIRES_GRAD: Any = Tensor.requires_grad
_ON_SELF = frozenset([_SET_DATA, _REQUIRES_GRAD.__set__, Tensor.requires_grad_])
_ON_GRAD = frozenset([_GET_GRAD, _GRAD.__set__, _GRAD.__delete__])


class Toucher(Protocol):
    """What a guarded Parameter reports to (the engine, on behalf of one unit)."""

    def touched(self, units: Sequence[Any]) -> AbstractContextManager[None]:
        """Have ``units`` up and unguarded inside the context."""
        ...

    def sent_gradient(self, param: nn.Parameter, unit: Any) -> str | None:
        """The parameter's name where its gradient has left the rank in this step, else None."""
        ...

    def name_of(self, param: nn.Parameter, unit: Any) -> str:
        """The parameter's name."""
        ...


class ShardedParameter(nn.Parameter):
    """The class a Parameter has except while a call of its unit is open; each unit has a subclass of its own."""

    toucher: ClassVar[Toucher]
    unit: ClassVar[Any]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ON_SELF:
            cls._refuse_change(func, args[0], args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
        if func == _GET_DATA:
            func = Tensor.detach  # shares the version counter: writes through it are seen
        if func in METADATA:
            with plain():
                result = func(*args, **kwargs)
            if func in _ON_GRAD and (result is None or func != _GET_GRAD):
                cls._refuse_if_sent(args[0])
            return result
        if func is torch.autograd.grad and not kwargs.get("materialize_grads"):
            return func(*_as_edges(args), **{name: _as_edges(value) for name, value in kwargs.items()})
        units = list({type(param).unit: None for param in _guarded((args, kwargs))})
        with cls.toucher.touched(units):
            return func(*args, **kwargs)

    @classmethod
    def _refuse_if_sent(cls, param: nn.Parameter) -> None:
        name = cls.toucher.sent_gradient(param, cls.unit)
        if name is not None:
            raise GradientAccessError(
                f"the gradient of {name!r} has left this rank for the optimizer owners, so .grad cannot be read or set "
                f"(by {_caller(sys._getframe(1))}). To clip, call optimizer.clip_grad_norm_(max_norm), which returns "
                "the global norm; to drop gradients, optimizer.zero_grad()"
            )

    @classmethod
    def _refuse_change(cls, func: Any, param: nn.Parameter, value: Any) -> None:
        """Raise UnsupportedError for a new ``.data`` of other bytes, and for unfreezing what has no master."""
        if func == _SET_DATA:
            with plain():
                same = value.untyped_storage().data_ptr() == param.untyped_storage().data_ptr()
                same = same and (value.dtype, value.shape) == (param.dtype, param.shape)
            change = None if same else "a new dtype, device or .data"
        else:
            change = "requires_grad=True" if value and not cls.unit.layout.trainable else None
        if change is not None:
            raise UnsupportedError(
                f"parameter {cls.toucher.name_of(param, cls.unit)!r} was given {change} after rayzero.prepare(), which "
                "is not supported yet; do it before"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain Parameter with the full values: a copy belongs to nobody."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain Parameter with the full values."""
        copied: Any = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        return copied.__reduce_ex__(protocol)


def guard_class(toucher: Toucher) -> type[ShardedParameter]:
    """A class for one unit's Parameters; its ``unit`` is set once the unit exists."""
    return type("ShardedParameter", (ShardedParameter,), {"toucher": toucher, "__module__": __name__})


def _guarded(tree: Any) -> Iterator[ShardedParameter]:
    """Every guarded Parameter in nested arguments."""
    if isinstance(tree, ShardedParameter):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _guarded(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _guarded(item)


def _as_edges(tree: Any) -> Any:
    """Arguments with each guarded Parameter replaced by its place in the graph: autograd does not read its bytes."""
    if isinstance(tree, ShardedParameter):
        with plain():
            return get_gradient_edge(tree)
    if isinstance(tree, list | tuple):
        return type(tree)(_as_edges(item) for item in tree)
    return tree


def _caller(frame: FrameType | None) -> str:
    """The innermost function outside this file, as people know it."""
    while frame is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_name.startswith("<")):
        frame = frame.f_back
    if frame is None:
        return "an unknown caller"
    return f"{frame.f_code.co_name} at {frame.f_code.co_filename}:{frame.f_lineno}"
