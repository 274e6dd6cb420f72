"""What a function that only moves elements does to tensors, found by calling it with tensors that have no values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rayzero.convert.formats.content import WeightDecl
from rayzero.convert.published.moved import Elements, Held, Joined, Range, Strided
from rayzero.errors import UnsupportedError

_COPIES = ("aten::clone", "aten::_to_copy", "aten::contiguous")
_JOINS = {"aten::cat": False, "aten::stack": True}  # whether each tensor becomes one index of a new dimension


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, notes where the elements of every tensor on the meta device come from.

    Views need no note: a meta tensor has a storage, strides and an offset. An operation that makes elements, or that
    gives them another dtype, raises UnsupportedError with its name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, Elements] = {}
        self._kept: list[Tensor] = []  # a storage's id means it only while it is alive

    def tensor(self, name: str, decl: WeightDecl, values: Range) -> Tensor:
        """A tensor on the meta device that stands for one of a source, whose elements ``values`` reads. Make it before
        the trace is entered."""
        made = torch.empty(decl.shape, dtype=decl.torch_dtype(name), device="meta")
        return self._note(made, Held(name, values))

    def _note(self, made: Tensor, elements: Elements) -> Tensor:
        self._storages[_storage(made)] = elements
        self._kept.append(made)
        return made

    def elements(self, tensor: Tensor) -> Strided:
        """Where the elements of a tensor lie. Raises KeyError if it was not made of traced ones."""
        base = self._storages[_storage(tensor)]
        return Strided(base, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.name().split(".")[0]
        if func._schema.is_mutable:
            raise UnsupportedError(f"{name.removeprefix('aten::')} writes values instead of moving them")
        made = func(*args, **(kwargs or {}))
        outputs = made if isinstance(made, list | tuple) else [made]
        for output in outputs:
            if isinstance(output, Tensor) and _storage(output) not in self._storages:
                self._note(output, self._source_of(name, output, args, kwargs or {}))
        return made

    def _source_of(self, name: str, output: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Elements:
        strides = output.stride()
        order = sorted(range(output.ndim), key=lambda dim: -strides[dim])  # as its storage has them
        if name in _COPIES and args[0].dtype == output.dtype:
            return self.elements(args[0].permute(order))
        if name in _JOINS and order == list(range(output.ndim)):
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            dim %= output.ndim
            tensors = [tensor.unsqueeze(dim) for tensor in args[0]] if _JOINS[name] else args[0]
            return Joined([self.elements(tensor) for tensor in tensors if tensor.numel()], dim, output.dtype)
        raise UnsupportedError(f"{name.removeprefix('aten::')} makes values instead of moving them")


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
