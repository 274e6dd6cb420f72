"""``rayzero bench``: what this machine can do, and how near RayZero comes to it."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from rayzero.errors import ConfigError

BENCHES = ("adam", "store", "step", "overlap")


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=f"{', '.join(BENCHES[:-1])} or {BENCHES[-1]}.")],
) -> None:
    """Measure one thing; its own options follow its name, --json among them: rayzero bench step --help."""
    if name == "--help":  # of a benchmark's own is the benchmark's
        print(context.get_help())
        return
    if name not in BENCHES:
        raise ConfigError(f"there is no benchmark {name!r}; there are {', '.join(BENCHES)}")
    importlib.import_module(f"rayzero.bench.{name}").main(context.args)
