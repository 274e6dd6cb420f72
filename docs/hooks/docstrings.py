"""Reads the docstrings of the API reference: lines such as ``name: what it is`` describe a parameter."""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Docstring, Extension, Function

_ROLE = re.compile(r":(?:class|func|meth|mod):`~?([\w.]+)`")
_NAMED = re.compile(r"(\w+): \S")


def with_parameters(text: str, names: set[str]) -> str:
    """A docstring in which the lines that describe ``names`` are a section of parameters, as griffe knows it."""
    lines, found, rest = text.splitlines(), [], []
    inside = False
    for line in lines:
        named = _NAMED.match(line)
        if named and named[1] in names:
            inside = True
        elif inside and not line.startswith("    "):
            inside = False
        (found if inside else rest).append(line)
    if not found:
        return text
    return "\n".join([*rest, "", "Args:", *(f"    {line}" for line in found)])


class Parameters(Extension):
    """Changes docstrings as griffe loads them."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Mark the parameters of a function."""
        if func.docstring:
            _rewrite(func.docstring, {one.name for one in func.parameters})

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Resolve references in a class's docstring."""
        if cls.docstring:
            _rewrite(cls.docstring, set())


def _rewrite(docstring: Docstring, names: set[str]) -> None:
    docstring.value = _ROLE.sub(lambda match: f"`{match[1]}`", with_parameters(docstring.value, names))
