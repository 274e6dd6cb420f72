"""Describes a config's settings in lines for people. They are made from the annotations and docstrings of its fields,
for both ``help()`` and ``rayzero train --help-config``."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo

__all__ = ["Settings", "Takes", "Unit", "commented_settings", "describe_fields", "describe_settings"]


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a number of an annotated type, or its range."""

    name: str


@dataclass(frozen=True, slots=True)
class Takes:
    """What a constructor takes for a value of an annotated type, where that is more than the type."""

    types: str


class Settings(inspect.Signature):
    """A constructor's signature that prints in short form, because ``help()`` has a line for each setting below it.
    Its parameters are still complete, for editors that complete names."""

    __slots__ = ()

    @classmethod
    def of(cls, signature: inspect.Signature) -> Self:
        """The same parameters, without annotations."""
        return cls([one.replace(annotation=one.empty) for one in signature.parameters.values()])

    def __str__(self) -> str:
        return "(*, setting=value, ...)"


def describe_fields(model: type[BaseModel]) -> list[str]:
    """A line for each field, in order, such as ``cpu_memory_budget: bytes = 32GiB  Bytes of host memory ...``. Values
    are written as in Python."""
    return [_line(name, name, model, repr) for name in model.model_fields]


def describe_settings(model: type[BaseModel], group: str = "") -> list[str]:
    """A line for every setting of a YAML file or a command line, with values written as in JSON. The names of settings
    in groups are dotted."""
    lines = []
    for name, field in model.model_fields.items():
        value = field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            lines += ["", f"# {first_sentence(field.description or '')}"]
            lines += describe_settings(type(value), f"{group}{name}.")
        else:
            lines.append(_line(f"{group}{name}", name, model, json.dumps))
    return lines


def commented_settings(model: type[BaseModel], chosen: Mapping[str, Any], indent: str = "") -> list[str]:
    """The lines of a YAML file with every setting: what it is, its unit, and its default behind a ``#``; those that are
    ``chosen`` (by name, groups as mappings) have their value and no ``#``."""
    lines = []
    for name, field in model.model_fields.items():
        hint = get_type_hints(model, include_extras=True)[name]
        default, told = field.get_default(call_default_factory=True), first_sentence(field.description or "")
        if isinstance(default, BaseModel):
            inner = commented_settings(type(default), chosen.get(name) or {}, f"{indent}  ")
            lines += ["", f"{indent}# {told}", f"{indent}{name}:", *inner]
        else:
            mark, value = ("", json.dumps(chosen[name])) if name in chosen else ("#", _default(field, hint, json.dumps))
            prose = textwrap.wrap(f"({_kind(hint, json.dumps)}) {told}", 118 - len(indent), break_on_hyphens=False)
            lines += [*(f"{indent}# {line}" for line in prose), f"{indent}{mark}{name}: {value}"]
    return lines


def _line(shown: str, name: str, model: type[BaseModel], write: Callable[[Any], str]) -> str:
    field, hint = model.model_fields[name], get_type_hints(model, include_extras=True)[name]
    return f"{shown}: {_kind(hint, write)} = {_default(field, hint, write)}  {first_sentence(field.description or '')}"


def first_sentence(text: str) -> str:
    """The text up to the first full stop that ends a sentence, on one line."""
    return re.split(r"(?<=[.])\s+(?=[A-Z\"`])", " ".join(text.split()), maxsplit=1)[0]


def _kind(hint: Any, write: Callable[[Any], str]) -> str:
    """The unit of a setting; its choices if it has no unit; its type if it has neither."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        unit = next((one.name for one in reversed(hint.__metadata__) if isinstance(one, Unit)), None)
        return unit or _kind(hint.__origin__, write)
    if origin in (Union, UnionType):
        return " or ".join(write(None) if one is NoneType else _kind(one, write) for one in arguments)
    if origin is Literal:
        return " | ".join(map(write, arguments))
    if origin is tuple:
        return "list of " + _kind(arguments[0], write)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " | ".join(write(str(one.value)) for one in hint)
    return hint.__name__ if isinstance(hint, type) and origin is None else str(hint)


def _default(field: FieldInfo, hint: Any, write: Callable[[Any], str]) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return f"{type(value).__name__}()"
    if isinstance(value, int) and "bytes" in _kind(hint, write):
        return _whole_units(value)
    if isinstance(value, Enum):
        value = value.value
    return write(value)


def _whole_units(size: int) -> str:
    """``8388608`` -> ``"8MiB"``: the largest binary unit that divides it."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size % (1 << power) == 0:
            return f"{size >> power}{unit}"
    return str(size)
