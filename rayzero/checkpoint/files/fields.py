"""Checks the values of a manifest: each function returns its argument if it is right, and otherwise raises ValueError
that says what the value is and what it must be.

JSON can hold anything. A value that is not checked here would turn up later as a TypeError, or as a loop over 2**62
elements.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any

from rayzero.checkpoint.files.tensor_file import DTYPES
from rayzero.checkpoint.files.tensor_reader import is_shape
from rayzero.layout.model_layout import dtype_from_name
from rayzero.protocol.messages import FileEntry, ModelSpec

_LARGEST = 1 << 62  # the largest number allowed: int64 holds the sum of two
_SHA256 = re.compile("[0-9a-f]{64}")


def get(of: Mapping[str, Any], name: str) -> Any:
    """The entry ``name``."""
    if name not in of:
        raise ValueError(f"{name!r} is missing")
    return of[name]


def integer(value: Any, name: str, least: int = 0) -> int:
    """A whole number."""
    if type(value) is not int or not least <= value <= _LARGEST:
        raise _wrong(value, name, f"a whole number from {least} on")
    return value


def text(value: Any, name: str) -> str:
    """Any text."""
    if not isinstance(value, str):
        raise _wrong(value, name, "a text")
    return value


def word(value: Any, name: str) -> str:
    """A printable text, which messages may show as it is."""
    if not isinstance(value, str) or not value.isprintable() or not value:
        raise _wrong(value, name, "a printable text")
    return value


def sha256(value: Any, name: str) -> str:
    """A SHA-256 in hexadecimal."""
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise _wrong(value, name, "64 hexadecimal digits")
    return value


def mapping(value: Any, name: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise _wrong(value, name, "an object")
    return value


def sequence(value: Any, name: str) -> list[Any]:
    """A JSON array."""
    if not isinstance(value, list):
        raise _wrong(value, name, "an array")
    return value


def shape(value: Any, name: str) -> tuple[int, ...]:
    """A tensor's shape."""
    if not is_shape(value):
        raise _wrong(value, name, "an array of sizes")
    return tuple(value)


def dtype(value: Any, name: str) -> str:
    """The name of a dtype that our safetensors files can hold."""
    if not isinstance(value, str) or value not in DTYPES:
        raise _wrong(value, name, "a dtype")
    return value


def file_entry(name: str, described: Mapping[str, Any]) -> FileEntry:
    """The entry of the checkpoint's file ``name``."""
    content = mapping(get(described, "content"), f"content of {name}")
    return FileEntry(
        name=name,
        size_bytes=integer(get(described, "size_bytes"), f"size_bytes of {name}"),
        sha256=sha256(get(described, "sha256"), f"sha256 of {name}"),
        content={key: mapping(one, f"content of {name}") for key, one in content.items()},
    )


def model_spec(value: Any) -> ModelSpec:
    """The model and optimizer that the run described at attach."""
    described = mapping(value, "spec")
    integer(get(described, "world_size"), "world_size", 1)
    for name in ("run", "optimizer"):
        text(get(described, name), name)
    hyper(get(described, "hyper"))
    _layout(get(described, "layout"))
    for groups in sequence(get(described, "group_of"), "group_of"):
        for group in sequence(groups, "group_of"):
            integer(group, "a parameter's group", -1)
    spec = ModelSpec.from_json(described)
    if [len(groups) for groups in spec.group_of] != [len(unit.slots) for unit in spec.layout.units]:
        raise ValueError("group_of does not have one number for each parameter")
    return spec


def hyper(value: Any) -> tuple[dict[str, Any], ...]:
    """The options of each parameter group."""
    return tuple(mapping(group, "hyper") for group in sequence(value, "hyper"))


def _layout(value: Any) -> None:
    described = mapping(value, "layout")
    integer(get(described, "shard_numel"), "shard_numel", 1)
    names: set[str] = set()
    for unit in sequence(get(described, "units"), "units"):
        _unit(mapping(unit, "a unit"), names)


def _unit(described: Mapping[str, Any], names: set[str]) -> None:
    text(get(described, "name"), "a unit's name")
    if not isinstance(described.get("opaque", False), bool):
        raise _wrong(described["opaque"], "opaque", "true or false")
    dtype_from_name(text(get(described, "dtype"), "a unit's dtype"), opaque=described.get("opaque", False))
    if not isinstance(get(described, "trainable"), bool):
        raise _wrong(described["trainable"], "trainable", "true or false")
    if not isinstance(described.get("frozen_master", False), bool):
        raise _wrong(described["frozen_master"], "frozen_master", "true or false")
    text(described.get("codec", "none"), "codec")
    for param in sequence(get(described, "params"), "params"):
        if len(sequence(param, "a parameter")) != 2:
            raise _wrong(param, "a parameter", "a name and a shape")
        if text(param[0], "a parameter's name") in names:
            raise ValueError(f"parameter {reprlib.repr(param[0])} comes twice")
        names.add(param[0])
        shape(param[1], f"shape of {reprlib.repr(param[0])}")


def _wrong(value: Any, name: str, needed: str) -> ValueError:
    return ValueError(f"{name} is {reprlib.repr(value)}, and must be {needed}")
