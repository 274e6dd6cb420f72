"""The reference of errors: the tree of classes, and what each one means."""

from __future__ import annotations

from collections.abc import Iterator

from docs.hooks.prose import prose
from rayzero.cli import exit_code, section_of
from rayzero.errors import RayZeroError


def page() -> str:
    """A row for each class of rayzero/errors.py, below the class that it is a kind of; each leads to its section."""
    return "\n".join(["| error | exit code | meaning |", "|---|--:|---|", *_rows(RayZeroError, 0), ""])


def _rows(error: type[RayZeroError], depth: int) -> Iterator[str]:
    name = "&emsp;" * depth + f'[<code class="name">{error.__name__}</code>](#{section_of(error)})'
    yield f"| {name} | {exit_code(error())} | {prose(error.__doc__ or '')} |"
    for kind in error.__subclasses__():
        if kind.__module__ == RayZeroError.__module__:  # others are of one module alone, and do not leave it
            yield from _rows(kind, depth + 1)
