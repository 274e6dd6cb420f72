"""The reference of every setting, from the fields of the configs: type or unit, default, and all that it does."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import BaseModel

from docs.hooks.prose import prose
from rayzero.config import describe_settings
from rayzero.recipes.recipe import RecipeConfig

PUBLIC = ("zero.", "scaling.", "run.")
_LINE = re.compile(r"(?P<name>\S+): (?P<kind>.+?) = (?P<default>.+?)  ")
TITLES = {
    "": "The recipe",
    "zero.": "`zero`: how states are split and moved",
    "scaling.": "`scaling`: how many processes",
    "run.": "`run`: files, checkpoints, failures",
    "run.telemetry.": "`run.telemetry`: metrics",
    "run.security.": "`run.security`: connections",
}


def groups(model: type[BaseModel] = RecipeConfig, prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every group of settings with the prefix of its names, outermost first."""
    yield prefix, model
    for name, field in model.model_fields.items():
        value = field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            yield from groups(type(value), f"{prefix}{name}.")


def page() -> str:
    """A section for each group, an entry for each setting."""
    return "\n".join(line for prefix, model in groups() for line in _group(prefix, model))


def _group(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"\n## {TITLES[prefix]} {{ #{prefix.rstrip('.') or 'recipe'} }}\n"
    in_python = f"In Python: `rayzero.{model.__name__}(...)`."
    yield (in_python if prefix in PUBLIC else prose((model.__doc__ or "").partition("Settings:")[0])) + "\n"
    short = {_LINE.match(line)["name"]: _LINE.match(line) for line in describe_settings(model) if _LINE.match(line)}
    for name, field in model.model_fields.items():
        if isinstance(field.get_default(call_default_factory=True), BaseModel):
            continue
        told = short[name]
        yield f"\n#### `{prefix}{name}` {{ #{prefix}{name} }}\n"
        yield f"`{told['kind']}`, default `{told['default']}`\n{{ .kind }}\n"
        yield f"{prose(field.description or '')}\n"
