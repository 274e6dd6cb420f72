"""Tensors whose elements lie in other tensors: found by calling a function that only moves elements with tensors that
have no values, and read in ranges, in C order, as the tensor's own would be."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rayzero.convert.formats.content import WeightDecl
from rayzero.errors import UnsupportedError

_RUN = 512  # elements: shorter runs are not read one by one
_COPIES = ("aten::clone", "aten::_to_copy", "aten::contiguous")
_JOINS = {"aten::cat": False, "aten::stack": True}  # whether each tensor becomes one index of a new dimension

Range = Callable[[int, int], Tensor]


class Elements(Protocol):
    """``numel`` elements in a row, all of one dtype."""

    def read(self, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop``, 1D on the CPU; perhaps a view of what they are read from."""
        ...

    def locate(self, index: int) -> tuple[str, int]:
        """The name of the tensor that has element ``index``, and the element's place in it."""
        ...


@dataclass(frozen=True)
class HeldElements:
    """The elements of a tensor that a source holds."""

    name: str
    values: Range

    def read(self, start: int, stop: int) -> Tensor:
        return self.values(start, stop)

    def locate(self, index: int) -> tuple[str, int]:
        return self.name, index


@dataclass(eq=False)
class Strided:
    """A tensor that is a view of elements, as ``torch.as_strided`` has it.

    A range is read run by run if the last dimension is a long run. Otherwise it is read in blocks: the inner
    dimensions that are out of order (of a transposed matrix all) are read together and put in order."""

    base: Elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    _block: tuple[int, Tensor] | None = field(default=None, init=False)  # freed by: the read of the block's end

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def _dims(self) -> tuple[tuple[int, int], ...]:
        """(size, stride) of each dimension: those of one element left out, neighbours in C order merged."""
        dims: list[tuple[int, int]] = []
        for size, stride in zip(self.shape, self.strides, strict=True):
            if size == 1:
                continue
            if dims and dims[-1][1] == size * stride:
                dims[-1] = (dims[-1][0] * size, stride)
            else:
                dims.append((size, stride))
        return tuple(dims)

    @cached_property
    def _outer(self) -> int:
        """How many dimensions are walked one index after another; the others are read together."""
        dims = self._dims
        if dims and dims[-1][1] == 1 and (dims[-1][0] >= _RUN or len(dims) == 1):
            return len(dims) - 1
        outer = 0
        while outer < len(dims) and dims[outer][1] >= _span(dims[outer + 1 :]):
            outer += 1
        return min(outer, max(len(dims) - 1, 0))

    def read(self, start: int, stop: int) -> Tensor:
        if start == stop:
            return self.base.read(0, 0)
        outer, inner = self._dims[: self._outer], self._dims[self._outer :]
        size = math.prod(n for n, _ in inner)
        parts = []
        for block in range(start // size, -(-stop // size)):
            low, high = max(start - block * size, 0), min(stop - block * size, size)
            parts.append(self._read_block(self.offset + _place(block, outer), inner, low, high))
        return _joined(parts)

    def _read_block(self, at: int, dims: tuple[tuple[int, int], ...], low: int, high: int) -> Tensor:
        if all(stride == 1 for _, stride in dims):  # one run, or a single element
            return self.base.read(at + low, at + high)
        if self._block is None or self._block[0] != at:
            read = self.base.read(at, at + _span(dims))
            ordered = read.as_strided([n for n, _ in dims], [s for _, s in dims], read.storage_offset())
            self._block = at, ordered.reshape(-1)
        found = self._block[1][low:high]
        if high == math.prod(n for n, _ in dims):
            self._block = None
        return found

    def locate(self, index: int) -> tuple[str, int]:
        return self.base.locate(self.offset + _place(index, self._dims))


@dataclass(frozen=True, eq=False)
class Concatenated:
    """Tensors that are concatenated along a dimension."""

    parts: Sequence[Strided]
    dim: int
    dtype: torch.dtype

    @cached_property
    def _starts(self) -> list[int]:
        """Where each part begins in a row, and the row's end: a row has one index in the dimensions before ``dim``."""
        return [0, *accumulate(math.prod(part.shape[self.dim :]) for part in self.parts)]

    def read(self, start: int, stop: int) -> Tensor:
        read = [part.read(low, high).to(self.dtype) for part, low, high in self._pieces(start, stop)]
        return _joined(read or [torch.empty(0, dtype=self.dtype, device="cpu")])

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[Strided, int, int]]:
        """Each part that has some of the range, with the range's place in it."""
        starts, row_size = self._starts, self._starts[-1]
        while start < stop:
            row, place = divmod(start, row_size)
            number = bisect_right(starts, place) - 1
            width = starts[number + 1] - starts[number]
            low = place - starts[number]
            high = min(width, low + stop - start)
            yield self.parts[number], row * width + low, row * width + high
            start += high - low

    def locate(self, index: int) -> tuple[str, int]:
        part, low, _ = next(self._pieces(index, index + 1))
        return part.locate(low)


def _span(dims: Sequence[tuple[int, int]]) -> int:
    """How many elements lie between the first and the last one that the dimensions touch, both included."""
    return 1 + sum((size - 1) * stride for size, stride in dims)


def _place(index: int, dims: Sequence[tuple[int, int]]) -> int:
    """The place of the element with this number in C order."""
    place = 0
    for size, stride in reversed(dims):
        index, number = divmod(index, size)
        place += number * stride
    return place


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, notes where the elements of every tensor on the meta device come from.

    Views need no note: a meta tensor has a storage, strides and an offset. An operation that makes elements, or that
    gives them another dtype, raises UnsupportedError with its name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, Elements] = {}
        self._kept: list[Tensor] = []  # a storage's id means it only while it is alive

    def tensor(self, name: str, decl: WeightDecl, values: Range) -> Tensor:
        """A meta tensor for one of a source, whose elements ``values`` reads. Make it before the trace is entered."""
        made = torch.empty(decl.shape, dtype=decl.torch_dtype(name), device="meta")
        return self._note(made, HeldElements(name, values))

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
            return Concatenated([self.elements(tensor) for tensor in tensors if tensor.numel()], dim, output.dtype)
        raise UnsupportedError(f"{name.removeprefix('aten::')} makes values instead of moving them")


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
