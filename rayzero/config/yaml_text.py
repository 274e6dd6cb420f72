"""Reads and writes YAML as plain mappings, with one-line errors that name the source, and applies dotted overrides."""

from __future__ import annotations

import copy
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

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
