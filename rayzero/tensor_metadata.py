"""Parameters whose bytes are not there yet, and the operations that need no bytes, only a tensor's metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

_C: Any = torch._C
_T = TypeVar("_T", bound=Tensor)

plain: Callable[[], AbstractContextManager[None]] = _C.DisableTorchFunctionSubclass
"""A context in which tensor subclasses are plain tensors: no ``__torch_function__`` runs."""

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
    """The functions that read or set a tensor's metadata, never its bytes."""
    tensor: Any = Tensor
    found = [getattr(tensor, name).__get__ for name in _GETTERS if hasattr(tensor, name)]
    found += [getattr(tensor, name).__set__ for name in _SETTERS]
    found += [getattr(tensor, name) for name in _METHODS if hasattr(tensor, name)]
    found += [getattr(torch, name) for name in _FUNCTIONS]
    return frozenset([*found, tensor.grad.__delete__])


METADATA = _metadata()


def of_class(kind: type[_T], tree: Any) -> Iterator[_T]:
    """Every object of a class in nested lists, tuples and dicts, in their order."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from of_class(kind, item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from of_class(kind, item)


class AbsentParameter(nn.Parameter):
    """A Parameter whose bytes are not there. The first operation that needs them brings them.

    The code that can bring them makes the Parameter's class a subclass of this one, and changes it back once they are
    there. Torch calls ``__torch_function__`` for every operation, in a module's forward or anywhere else. Operations on
    metadata bring nothing."""

    family: ClassVar[type[AbsentParameter]]  # the subclass whose ``brought`` knows all Parameters of its kind

    @classmethod
    def brought(cls, params: list[Any]) -> AbstractContextManager[None]:
        """Bring the bytes of these Parameters of the family. They are there inside the context."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with plain():
                return func(*args, **kwargs)
        with cls.brought(list(of_class(cls.family, (args, kwargs)))):
            return func(*args, **kwargs)


def own_class(param: nn.Parameter) -> type[nn.Parameter]:
    """The class that a Parameter was made with. Classes made of it name it in ``made``."""
    kinds: tuple[Any, ...] = type(param).__mro__
    found: type[nn.Parameter] = vars(kinds[0]).get("made") or next(
        k for k in kinds if not issubclass(k, AbsentParameter)
    )
    return found


def class_name(param: nn.Parameter) -> str:
    """That class with its module, for messages."""
    kind = own_class(param)
    return f"{kind.__module__}.{kind.__qualname__}"
