"""Settings as text: YAML as plain mappings, with one-line errors that name the source, and dotted overrides; lines for
people, made from the annotations and docstrings of a config's fields, for both ``help()`` and ``rayzero train
--help-config``."""

from __future__ import annotations

import copy
import inspect
import json
import re
import reprlib
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rayzero.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Loads safe YAML with the floats of YAML 1.2 (``1e-4`` is a number), and refuses a key that is set twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is set twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Writes YAML that ``_Loader`` reads back unchanged: text that looks like one of its floats is quoted."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def dump_yaml(settings: Mapping[str, Any]) -> str:
    """YAML text from which ``load_yaml`` makes an equal mapping, in the same order."""
    return str(yaml.dump(dict(settings), Dumper=_Dumper, sort_keys=False))


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{source}{where}: not valid YAML: {' '.join(problem.split())}") from None
    except ValueError as error:  # text that looks like a date, or has a tag, and is no such value
        raise ConfigError(f"{source}: not valid YAML: {error}; put text into quotes") from None
    except RecursionError:
        raise ConfigError(f"{source}: not valid YAML: it is nested too deeply") from None


def load_yaml(text: str, *, source: str = "YAML") -> dict[str, Any]:
    """Parse YAML text that is a mapping; empty text is an empty one. ``source`` names the text in errors.

    Raises ConfigError if the text is not YAML, or not a mapping with text keys."""
    value = _parse_yaml(text, source)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{source}: must be a mapping of setting names to values, got {reprlib.repr(value)}")
    return value


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a mapping from a YAML file. Raises ConfigError, which names the file, if it cannot be read or is not one."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"cannot read {path}: {reason}") from error
    return load_yaml(text, source=str(path))


def apply_overrides(settings: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of ``settings`` with each ``"key=value"`` or ``"part.key=value"`` set; values are read as YAML.

    Only the shape is checked here; the config that is made from the result checks names and values. Raises ConfigError
    for text without ``=``, an empty key, and a dotted key that leads through a value that is not a mapping.
    """
    result: dict[str, Any] = copy.deepcopy(dict(settings))
    for override in overrides:
        dotted, separator, text = override.partition("=")
        dotted = dotted.strip()
        if not separator or not all(dotted.split(".")):
            raise ConfigError(f"override {override!r} must look like key=value or part.key=value")
        set_value(result, dotted, _parse_yaml(text, f"override {override!r}"))
    return result


def set_value(settings: dict[str, Any], dotted: str, value: Any) -> None:
    """Set ``"part.key"`` in place. A part that is missing, or that a file leaves empty, becomes a mapping. Raises
    ConfigError for one that is something else."""
    *parts, name = dotted.split(".")
    for depth, part in enumerate(parts, start=1):
        if settings.get(part) is None:
            settings[part] = {}
        if not isinstance(settings[part], dict):
            path, found = ".".join(parts[:depth]), reprlib.repr(settings[part])
            raise ConfigError(f"override {dotted}: {path} is {found}, not a group of settings")
        settings = settings[part]
    settings[name] = value


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
