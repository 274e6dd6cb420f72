"""Write what type checkers see of the configs' constructors and setters, or check that it is current.

    python scripts/settings.py            write rayzero/config/arguments.pyi
    python scripts/settings.py --check    exit 1 if it differs

It is made from the fields, which accept more types ("4GiB", a Path) than they have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from rayzero.config import ConfigModel, RunConfig, ScalingConfig, ZeroConfig
from rayzero.config.text import Takes
from rayzero.config.zero import SHORT_NAMES

STUB = Path(__file__).parents[1] / "rayzero" / "config" / "arguments.pyi"

HEAD = '''\
"""What type checkers see of the configs' constructors and setters. Made by scripts/settings.py from their fields."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

from rayzero.config.base import ConfigModel
from rayzero.config.choices import AutoMemoryStrategy, CpuCompressionMethod
from rayzero.config.run import SecurityConfig, TelemetryConfig'''


def stub() -> str:
    """The text of the file."""
    lines = [HEAD]
    for model in (ZeroConfig, ScalingConfig, RunConfig):
        lines += ["", f"class {model.__name__.removesuffix('Config')}Arguments(TypedDict, total=False):"]
        lines += [f"    {name}: {taken}" for name, taken in _taken(model)]
    taken = dict(_taken(ZeroConfig))
    lines += ["", "class ZeroSetters(ConfigModel):"]
    for name, field in ({name: name for name in taken} | SHORT_NAMES).items():
        lines.append(f"    def with_{name}(self, value: {taken[field]}) -> Self: ...")
    return "\n".join(lines) + "\n"


def _taken(model: type[ConfigModel]) -> Iterator[tuple[str, str]]:
    hints = get_type_hints(model, include_extras=True)
    for name in model.model_fields:
        yield name, " | ".join(dict.fromkeys(_types(hints[name])))


def _types(hint: Any) -> Iterator[str]:
    """The types that a setting of this annotation takes."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        takes = next((one.types for one in reversed(hint.__metadata__) if isinstance(one, Takes)), None)
        yield from _types(hint.__origin__) if takes is None else (takes,)
    elif origin in (Union, UnionType):
        for one in arguments:
            yield from _types(one)
    elif origin is Literal:
        yield f"Literal[{', '.join(map(_quoted, arguments))}]"
    elif origin is dict:
        yield "Mapping[str, str]"
    elif hint is NoneType:
        yield "None"
    else:
        yield hint.__name__
        if issubclass(hint, Enum):
            yield "str"
        if issubclass(hint, ConfigModel):
            yield "Mapping[str, Any]"


def _quoted(choice: str) -> str:
    return f'"{choice}"'


def main() -> None:
    """See the module."""
    if sys.argv[1:] != ["--check"]:
        STUB.write_text(stub())
    elif STUB.read_text() != stub():
        sys.exit(f"{STUB} is not what the settings say: run scripts/settings.py and commit what it writes")


if __name__ == "__main__":
    main()
