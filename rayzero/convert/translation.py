"""The names, shapes and values that transformers' own mapping makes of a checkpoint's tensors, in either direction.

[Note: translating] Loading: each name passes through all renamings, then through at most one converter, which turns
several tensors into one or one into several. Saving does the opposite. What a converter computes is not known here: it
is called once with tensors that have no values, and a ``Trace`` notes where their elements go. So any operation that
moves elements works, also one that a later version brings, and any other is refused by its name. Values are read in
ranges, in C order, as the tensor's own would be.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rayzero.convert.formats.content import WeightDecl
from rayzero.errors import CheckpointError, UnsupportedError

ReadPart = Callable[[str, int, int], Tensor]
Range = Callable[[int, int], Tensor]

_USED = (
    ("conversion_mapping", "get_model_conversion_mapping"),
    ("core_model_loading", "WeightConverter"),
    ("core_model_loading", "WeightRenaming"),
    ("core_model_loading", "dot_natural_key"),
    ("core_model_loading", "rename_source_key"),
    ("core_model_loading", "revert_weight_conversion"),
)
_RUN = 512  # elements: shorter runs are not read one by one
_COPIES = ("aten::clone", "aten::_to_copy", "aten::contiguous")
_JOINS = {"aten::cat": False, "aten::stack": True}  # whether each tensor becomes one index of a new dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """Tensors under their new names, made of tensors of a source."""

    decls: Mapping[str, WeightDecl]
    elements: Mapping[str, Strided]


def is_pretrained(model: object) -> bool:
    """Whether a model is one of transformers', which may publish its weights under other names."""
    loaded = sys.modules.get("transformers.modeling_utils")
    return loaded is not None and isinstance(model, loaded.PreTrainedModel)


def to_model(
    model: Any, held: Collection[str], decls: Mapping[str, WeightDecl], read: ReadPart, source: object
) -> Translation:
    """The tensors of a checkpoint as ``model.from_pretrained`` would take them. [Note: translating]

    held: all names of the model's parameters and persistent buffers. decls, read: the checkpoint's tensors. Tensors
    that the model has no place for keep their names, unless the model's class says that they may be left over. Raises
    CheckpointError, with ``source``, if two tensors would get one name or some do not go together, UnsupportedError
    that names an operation which does more than move elements, and if this transformers has no such mapping."""
    names = Names(model, held)
    tracer, made = Trace(), _Made(source)
    merged: dict[str, Any] = {}
    left_over: list[str] = []
    for given in names.in_order(decls):
        name, pattern = names.of(given)
        if name is None:
            left_over.append(given)
            continue
        tensor = tracer.tensor(given, decls[given], partial(read, given))
        if pattern is None:
            made.add(name, given, tensor)
        else:
            entry = merged.setdefault(name, names.converter(pattern))
            entry.add_tensor(name, given, pattern, tensor)
    for name, entry in merged.items():
        givens = sorted(given for target in entry.layer_targets.values() for given in target)
        with _refusing(f"{source}: {name!r}"), tracer:
            converted = entry.convert(name, model=model, config=model.config)
        for target, value in converted.items():
            made.add(target, givens[0], value[0] if isinstance(value, list) else value)
    for given in left_over:
        if not names.may_be_left_over(given):
            made.add(given, given, tracer.tensor(given, decls[given], partial(read, given)))
    return made.translation(tracer)


def from_model(model: Any, decls: Mapping[str, WeightDecl], read: ReadPart, source: object) -> Translation:
    """The tensors of a model as ``model.save_pretrained`` would write them: the names that transformers publishes,
    tied ones once. [Note: translating]

    decls, read: the model's tensors by the names of its parameters and persistent buffers. Raises as ``to_model``."""
    library = _library()
    tracer, made = Trace(), _Made(source)
    tensors = {name: tracer.tensor(name, decl, partial(read, name)) for name, decl in decls.items()}
    dropped = {alias for alias, name in model.all_tied_weights_keys.items() if name in tensors}
    dropped |= set(model._keys_to_ignore_on_save or ())
    kept = {name: tensor for name, tensor in tensors.items() if name not in dropped}
    with _refusing(f"{source}: {type(model).__name__}"), tracer:
        found = library.revert_weight_conversion(model, kept)
    for name, tensor in found.items():
        made.add(name, name, tensor)
    return made.translation(tracer)


def with_model_names(
    model: Any, held: Mapping[str, WeightDecl], stream: Iterable[tuple[str, Tensor]], source: object
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a stream as ``model.from_pretrained`` would take them, in the order in which they can be made.

    model: one of transformers', perhaps on the meta device. held: its parameters and persistent buffers. Tensors that
    are merged wait for one another, and no longer: in the order of a published file, those of one layer. Names that
    the model has no place for come out as they are. Raises as ``to_model``, with ``source``, and CheckpointError if a
    name of a merged tensor comes twice."""
    names = Names(model, held)
    parts = _parts(model, held, names, source)
    waiting: dict[str, dict[str, Tensor]] = {}
    for given, tensor in stream:
        name, merged = names.of(given)
        if name is None:
            if not names.may_be_left_over(given):
                yield given, tensor
        elif not merged:
            yield name, tensor
        else:
            group = waiting.setdefault(name, {})
            if given in group:
                raise CheckpointError(f"{source}: {given!r} comes twice")
            group[given] = tensor
            if group.keys() == parts.get(name):
                yield from _whole(model, held, waiting.pop(name), source)
    for group in waiting.values():  # other parts than transformers would publish now, or not all of them
        yield from _whole(model, held, group, source)


def _parts(model: Any, held: Mapping[str, WeightDecl], names: Names, source: object) -> dict[str, set[str]]:
    """First name of what parts are merged into -> the parts as transformers publishes them; empty if this model's
    cannot be published: parts then wait until the stream ends."""
    try:
        published = from_model(model, held, no_values, source).decls
    except (UnsupportedError, CheckpointError):
        return {}
    found: dict[str, set[str]] = {}
    for given in published:
        name, merged = names.of(given)
        if name is not None and merged:
            found.setdefault(name, set()).add(given)
    return found


def no_values(name: str, start: int, stop: int) -> Tensor:
    """What names alone are asked for with, as ``read``."""
    raise AssertionError(f"{name} is followed, not read")


def _whole(
    model: Any, held: Mapping[str, WeightDecl], group: Mapping[str, Tensor], source: object
) -> Iterator[tuple[str, Tensor]]:
    flat = {name: tensor.detach().cpu().reshape(-1) for name, tensor in group.items()}
    decls = {name: WeightDecl.of(tensor) for name, tensor in group.items()}
    made = to_model(model, held, decls, lambda name, start, stop: flat[name][start:stop], source)
    for name, decl in made.decls.items():
        yield name, made.elements[name].read(0, math.prod(decl.shape)).view(decl.shape)


class Names:
    """Where transformers puts the names of a checkpoint in a model. Asks transformers; knows no tensors."""

    def __init__(self, model: Any, held: Collection[str]) -> None:
        """held: all names of the model's parameters and persistent buffers. Raises UnsupportedError if this
        transformers has no such mapping."""
        self._library = library = _library()
        mapping = library.get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, library.WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, library.WeightConverter)]
        self._by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        self._places = dict.fromkeys(held, True)  # transformers asks for a state dict, and looks only for its names
        self._prefix = model.base_model_prefix
        self._ignored = _may_be_left_over(model)

    def in_order(self, names: Collection[str]) -> list[str]:
        """The names in the order in which transformers takes them."""
        return sorted(names, key=self._library.dot_natural_key)

    def of(self, given: str) -> tuple[str | None, str | None]:
        """(the model's name for a name, the pattern of the converter that it goes through with others). No name: the
        model has no place for it; no pattern: it is renamed alone."""
        name, pattern = self._renamed(given)
        if name not in self._places and given in self._places:
            name, pattern = self._library.rename_source_key(given, [], [], self._prefix, self._places)
        return (name, pattern) if name in self._places else (None, None)

    def converter(self, pattern: str) -> Any:
        """A copy of transformers' converter that has this pattern."""
        return deepcopy(self._by_pattern[pattern])

    def may_be_left_over(self, given: str) -> bool:
        """Whether the model's class says that a name it has no place for may be dropped."""
        name, _ = self._renamed(given)
        return any(pattern.search(name) for pattern in self._ignored)

    def _renamed(self, given: str) -> tuple[str, str | None]:
        found: tuple[str, str | None] = self._library.rename_source_key(
            given, self._renamings, self._converters, self._prefix, self._places
        )
        return found


class _Made:
    """Tensors by their new names, each once."""

    def __init__(self, source: object) -> None:
        self._source = source
        self._tensors: dict[str, Tensor] = {}
        self._from: dict[str, str] = {}

    def add(self, name: str, given: str, tensor: Tensor) -> None:
        if name in self._tensors:
            raise CheckpointError(
                f"{self._source} has {name!r} twice: transformers makes it of both {self._from[name]!r} and {given!r}"
            )
        self._tensors[name], self._from[name] = tensor, given

    def translation(self, tracer: Trace) -> Translation:
        return Translation(
            decls={n: WeightDecl.of(t) for n, t in self._tensors.items()},
            elements={name: tracer.elements(tensor) for name, tensor in self._tensors.items()},
        )


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Name transformers' operation that cannot be followed, or that fails."""
    try:
        yield
    except UnsupportedError as exc:
        raise UnsupportedError(
            f"{what} needs transformers' {_operation(exc)}, which cannot be streamed: {exc}"
        ) from exc
    except Exception as exc:  # operations raise what they like about tensors that do not go together
        why = " ".join(str(exc).split())[:300] or type(exc).__name__
        raise CheckpointError(f"{what} cannot be made by transformers' {_operation(exc)}: {why}") from exc


def _operation(exc: BaseException) -> str:
    """The innermost of transformers' operations that an exception passed through."""
    from transformers.core_model_loading import ConversionOps

    frames = [frame.f_locals.get("self") for frame, _ in walk_tb(exc.__traceback__)]
    return next((type(one).__name__ for one in reversed(frames) if isinstance(one, ConversionOps)), "mapping")


def _may_be_left_over(model: Any) -> list[re.Pattern[str]]:
    """What ``from_pretrained`` drops without a word: what the classes name, and buffers that old versions saved."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return [re.compile(pattern) for pattern in patterns]


def _library() -> Any:
    """What of transformers is used here. Raises UnsupportedError that names what this version lacks."""
    import transformers

    found: dict[str, Any] = {}
    for module, name in _USED:
        try:
            found[name] = getattr(importlib.import_module(f"transformers.{module}"), name)
        except (ImportError, AttributeError) as exc:
            raise UnsupportedError(
                f"transformers {transformers.__version__} has no {module}.{name}, which says how the names of "
                "published checkpoints become its models'; install transformers 5"
            ) from exc
    return SimpleNamespace(**found)


# ---- tensors whose elements lie in other tensors --------------------------------------------------------------------


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
