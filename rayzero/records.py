"""Reads JSON that RayZero has written, checked against one type, with one line for what is wrong.

A type is a ``JsonRecord`` or a frozen dataclass, and its annotations say all that is allowed. Entries that it does not
have are left out, so that a RayZero reads what a later one has written. The coordinator and janitors write records and
read none: they start without pydantic, so what they write is a dataclass.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, TypeAdapter, ValidationError

from rayzero.errors import ConfigError
from rayzero.files import read_bytes

__all__ = [
    "JsonRecord",
    "Several",
    "Sha256",
    "Whole",
    "check_record",
    "fault_of",
    "load_record",
    "parse_record",
    "record_text",
]

_T = TypeVar("_T")

Whole = Annotated[int, Strict(), Field(ge=0, le=1 << 62)]
"""A number of bytes, elements or steps: int64 holds the sum of two."""

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

Several = Annotated[tuple[_T, ...], Strict(False)]
"""A JSON array, from text or as a list."""


class JsonRecord(BaseModel):
    """Base of what is written as JSON and read again: frozen, no value is converted, and a number is not inf or NaN."""

    # defer_build: a process that reads none pays nothing for it
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


def load_record(path: Path, kind: type[_T], what: str, instead: str, *, at_most: int, follow_links: bool = True) -> _T:
    """The record in a file of up to ``at_most`` bytes. ``what``: "a run's record"; ``instead``: what to do about a
    damaged one.

    Raises OSError as ``read_bytes``, and ConfigError in one line: the file, what is wrong with which entry, what is
    allowed, what to do."""
    text = read_bytes(path, at_most=at_most, follow_links=follow_links)
    try:
        return parse_record(text, kind)
    except ValueError as error:
        raise ConfigError(f"{path} is not {what}: {error}; {instead}") from error


def parse_record(text: bytes | str, kind: type[_T], *, extra: Literal["ignore", "forbid"] | None = None) -> _T:
    """The record in JSON text. ``extra``: what becomes of entries that ``kind`` does not have; None: as it says itself.
    Raises ValueError in one line: the entry, its value, what is allowed."""
    try:
        return _adapter(kind).validate_json(text, strict=True, extra=extra)
    except ValidationError as error:
        raise ValueError(fault_of(error)) from None


def record_text(record: object) -> str:
    """A dataclass as JSON text, which ``parse_record`` reads; bytes in it are text in UTF-8."""
    return _adapter(type(record)).dump_json(record).decode()


def check_record(found: Mapping[str, Any], kind: type[_T]) -> _T:
    """The record in a JSON object that is parsed. A dataclass is strict where its fields are. Raises as
    ``parse_record``."""
    try:
        return _adapter(kind).validate_python(found)
    except ValidationError as error:
        raise ValueError(fault_of(error)) from None


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}  # made when the first record of a kind is read


def _adapter(kind: type[_T]) -> TypeAdapter[_T]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def fault_of(error: ValidationError, depth: int | None = None) -> str:
    """The first fault that pydantic has found, in one line: ``driver.pid is 'x' but must be a valid integer``.

    ``depth``: how many names of its place are shown; one of several types that a value may have is a name there, too.
    """
    found = error.errors(include_url=False)
    first, place = found[0], found[0]["loc"][:depth]
    shown = ".".join(part if (part := str(one)).isprintable() else ascii(part) for one in place) or "it"
    if first["type"] == "json_invalid":
        return f"it is not JSON ({first['msg'].removeprefix('Invalid JSON: ')})"
    if first["type"] == "unexpected_keyword_argument":
        return f"{shown} is unknown"
    if first["type"] == "missing":
        return f"{shown} is missing"
    said = _one_line(first["msg"])
    if first["type"] == "value_error" and not place:
        return said
    if first["type"] == "value_error" and isinstance(first["input"], dict | list) and not said.startswith("must "):
        return f"{shown}: {said}"
    allowed = dict.fromkeys(_one_line(one["msg"]) for one in found if one["loc"][:depth] == place)
    return f"{shown} is {reprlib.repr(first['input'])} but {' or '.join(allowed)}"


def _one_line(message: str) -> str:
    for theirs, ours in (
        ("^Value error, ", ""),
        ("^String should have at least 1 character$", "must not be empty"),
        (r"^\w+ should ", "must "),
        (" after validation, not .*$", ""),
        ("a valid tuple", "a list"),
    ):
        message = re.sub(theirs, ours, message)
    return " ".join(message.split())
