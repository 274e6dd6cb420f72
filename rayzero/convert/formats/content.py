"""What a checkpoint of any format holds, said in one way: names, shapes, dtypes, optimizer states, step counts.

Readers describe their source by a ``Content`` before they read a value; writers decide everything from it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from rayzero.checkpoint.tensor_file import DTYPES
from rayzero.errors import CheckpointError, UnsupportedError
from rayzero.layout.model_layout import dtype_name

WEIGHT = "weight"  # the kind of a parameter's or buffer's own values; other kinds are the names of optimizer states
PART = 1 << 20  # elements that are read at once
FLOATS = ("float32", "bfloat16", "float16")  # dtypes that an fp32 master holds exactly

T = TypeVar("T")

_MOST = 10  # names that a message lists


@dataclass(frozen=True, slots=True)
class WeightDecl:
    """What a source says of one tensor."""

    shape: tuple[int, ...]
    dtype: str  # torch's name without "torch."; the file's own code if this package has no name for it

    @classmethod
    def of(cls, tensor: Tensor) -> WeightDecl:
        """That of a tensor in memory."""
        return cls(tuple(tensor.shape), dtype_name(tensor.dtype))

    def torch_dtype(self, name: str) -> torch.dtype:
        """Its dtype. Raises UnsupportedError that names the tensor if safetensors files of this package have none."""
        if self.dtype not in DTYPES:
            raise UnsupportedError(f"{name!r} has dtype {self.dtype}, which cannot be converted; leave the tensor out")
        return DTYPES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter."""

    decl: WeightDecl
    trained: bool = True
    opaque: bool = False  # its bytes need not be its values: it is never cast
    states: tuple[str, ...] = ()  # optimizer states, in fp32, sorted
    own_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of states without the parameter's shape
    updates: int = 0  # how many it has had

    def shape_of(self, kind: str) -> tuple[int, ...]:
        """The shape of a state, or of the parameter itself."""
        return self.own_shapes.get(kind, self.decl.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerGroup:
    """A parameter group of an optimizer."""

    params: tuple[str, ...]
    options: Mapping[str, Any]  # lr, betas, ...; plain values

    @classmethod
    def of(cls, params: Iterable[str], options: Mapping[str, Any], but: Sequence[str] = ("params",)) -> OptimizerGroup:
        """A group with these options made plain, ``but`` some."""
        return cls(params=tuple(params), options={k: plain_option(v) for k, v in options.items() if k not in but})


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a checkpoint holds."""

    params: Mapping[str, Param]
    buffers: Mapping[str, WeightDecl] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)  # other names of tied parameters -> the name in ``params``
    groups: tuple[OptimizerGroup, ...] = ()  # empty: the source says nothing of them
    step: int = 0  # optimizer steps of the run
    left_out: tuple[str, ...] = ()  # what else there is: states of the loop, which no other format has; sorted names
    optimizer: str = ""  # import path of the optimizer's class; "": the source does not say

    @cached_property
    def decls(self) -> Mapping[str, WeightDecl]:
        """Every tensor of a state dict by its name: parameters, their other names, and buffers."""
        own = {name: param.decl for name, param in self.params.items()}
        return own | {alias: own[name] for alias, name in self.tied.items()} | dict(self.buffers)

    def cast_dtype(self, name: str, dtype: torch.dtype | None) -> torch.dtype:
        """The dtype in which a tensor of ``decls`` is written where ``dtype`` was asked for: parameters in floating
        point are cast to it, buffers and opaque parameters are not. None: nothing is cast. Raises UnsupportedError as
        ``WeightDecl.torch_dtype``."""
        given = self.decls[name].torch_dtype(name)
        param = None if name in self.buffers else self.params.get(self.tied.get(name, name))
        casts = param is not None and not param.opaque and given.is_floating_point
        return dtype if casts and dtype is not None else given

    @property
    def has_states(self) -> bool:
        """Whether there is any optimizer state."""
        return any(param.states for param in self.params.values())


class Reader(ABC):
    """A source that is open. Making one checks names, shapes, sizes and files, and reads no values."""

    content: Content

    def __init__(self, place: object) -> None:
        """place: names the source in messages."""
        self._source = place

    def __str__(self) -> str:
        return str(self._source)

    @abstractmethod
    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop``, in C order, of a tensor (``kind`` WEIGHT; in its declared dtype) or of an
        optimizer state of a parameter (fp32). 1D on the CPU; perhaps a view of a mapped file: do not write to it.

        ``name``: of a parameter or buffer in ``content``. Raises CheckpointError if the bytes cannot be read."""

    def weight(self, name: str, start: int, stop: int) -> Tensor:
        """``read`` of a tensor by any of its names in ``content.decls``."""
        return self.read(self.content.tied.get(name, name), WEIGHT, start, stop)

    def parts(self, name: str, kind: str = WEIGHT) -> Iterator[Tensor]:
        """All values of a tensor by any of its names, at most ``PART`` elements at a time."""
        own = self.content.tied.get(name, name)
        is_state = kind != WEIGHT and own in self.content.params
        numel = math.prod(self.content.params[own].shape_of(kind) if is_state else self.content.decls[name].shape)
        for start in range(0, numel, PART):
            yield self.read(own, kind, start, min(start + PART, numel))


def cut_into_files(items: Iterable[T], size_of: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """What each file gets, in order: as many items as fit into ``max_bytes``; a larger one has a file alone. At least
    one file, perhaps of nothing."""
    held: list[T] = []
    size = 0
    for item in items:
        if held and size + size_of(item) > max_bytes:
            yield held
            held, size = [], 0
        held.append(item)
        size += size_of(item)
    yield held


def require_states(name: str, decl: WeightDecl, kind: str, state: WeightDecl, where: object) -> None:
    """Raise UnsupportedError unless an optimizer state has its parameter's shape, in floating point."""
    if state.shape != decl.shape or state.dtype not in FLOATS:
        raise UnsupportedError(
            f"{where}: the optimizer state {kind!r} of {name!r} is {state.dtype} of shape {state.shape}, and the "
            f"parameter has shape {decl.shape}; only element-wise states in floating point can be converted: convert "
            "the weights alone (--weights-only)"
        )


def plain_option(value: Any) -> Any:
    """A group's option as a plain value; what is none becomes None."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, list | tuple):
        items = [plain_option(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value if isinstance(value, bool | int | float | str) else None


def step_count(value: Any, name: str) -> int:
    """A step count that a file may hold as a number or a tensor of one element. Raises ValueError for anything else."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 1 << 53:
        raise ValueError(f"{name} is {str(value)[:80]}")
    if number != int(number):
        raise ValueError(f"{name} is {number}")
    return int(number)


def listed(names: Sequence[str]) -> str:
    """Names for a message, the first few of many."""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(map(repr, names[:_MOST])) + more


def damaged(where: object, why: object) -> CheckpointError:
    """The error for a source that is not what it says: one line."""
    return CheckpointError(f"{where} is damaged or not what it seems: {' '.join(str(why).split())[:400]}")
