"""What each value of a manifest must be, as pydantic models of its JSON.

JSON can hold anything. A value that is not checked here would turn up later as a TypeError, or as a loop over 2**62
elements.
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Field, StrictBool, StrictInt, StrictStr, TypeAdapter, ValidationError

from rayzero.checkpoint.files.tensor_file import DTYPES
from rayzero.checkpoint.files.tensor_reader import is_shape

T = TypeVar("T")

_LARGEST = 1 << 62  # the largest number allowed: int64 holds the sum of two


def _printable(value: str) -> str:
    if not value or not value.isprintable():
        raise ValueError("must be a printable text")
    return value


def _shape(value: tuple[int, ...]) -> tuple[int, ...]:
    if not is_shape(list(value)):
        raise ValueError("must be sizes that a tensor may have")
    return value


def _dtype(value: str) -> str:
    if value not in DTYPES:
        raise ValueError("must be a dtype")
    return value


Count = Annotated[StrictInt, Field(ge=0, le=_LARGEST)]
Word = Annotated[StrictStr, AfterValidator(_printable)]  # messages may show it as it is
Sha256 = Annotated[StrictStr, Field(pattern="^[0-9a-f]{64}$")]
Shape = Annotated[tuple[Count, ...], AfterValidator(_shape)]
Dtype = Annotated[StrictStr, AfterValidator(_dtype)]  # one that our safetensors files can hold
_Options = list[dict[StrictStr, Any]]  # of each parameter group


class _Unit(BaseModel):
    name: StrictStr
    dtype: StrictStr
    trainable: StrictBool
    params: list[tuple[StrictStr, Shape]]
    frozen_master: StrictBool = False
    codec: StrictStr = "none"
    opaque: StrictBool = False


class _Layout(BaseModel):
    shard_numel: Annotated[Count, Field(ge=1)]
    units: list[_Unit]


class _Spec(BaseModel):
    run: StrictStr
    optimizer: StrictStr
    world_size: Annotated[Count, Field(ge=1)]
    hyper: _Options
    layout: _Layout
    group_of: list[list[Annotated[StrictInt, Field(ge=-1, le=_LARGEST)]]]


class File(BaseModel):
    """An entry of ``owner_files`` or ``rank_files``: a ``FileEntry``."""

    name: StrictStr
    size_bytes: Count
    sha256: Sha256
    content: dict[StrictStr, dict[StrictStr, Any]]


class Body(BaseModel):
    """A manifest without its own hash."""

    step: Count
    digest: Any
    spec: _Spec
    hyper: _Options
    steps: dict[StrictStr, Count]
    owner_files: list[File]
    rank_files: list[File]


def checked(kind: TypeAdapter[T], value: object) -> T:
    """``value`` as what it must be. Raises ValueError that names the first field that is not: one line."""
    try:
        return kind.validate_python(value)
    except ValidationError as exc:
        wrong = exc.errors(include_url=False)[0]
        where = repr(".".join(map(str, wrong["loc"]))[:100])
        says = f"{reprlib.repr(wrong['input'])}: {wrong['msg']}"
        raise ValueError(f"{where} is {'missing' if wrong['type'] == 'missing' else says}") from None
