"""``rayzero bench``: measures what this machine can do and how close RayZero comes to it."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from rayzero.errors import ConfigError

BENCHES = ("adam", "store", "step", "overlap", "simulation")


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=f"{', '.join(BENCHES[:-1])} or {BENCHES[-1]}.")],
) -> None:
    """Run one benchmark. Its own options, --json among them, follow its name: see rayzero bench step --help."""
    if name == "--help":  # after a benchmark's name, the benchmark itself answers it
        print(context.get_help())
        return
    if name not in BENCHES:
        raise ConfigError(f"there is no benchmark {name!r}; choose one of {', '.join(BENCHES)}")
    importlib.import_module(f"rayzero.bench.{name}").main(context.args)
