"""Finds the run that a command means: by a name, by a folder, or the newest one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayzero.errors import ConfigError

RUNS = Path("runs")  # the default of RunConfig.storage_path


def run_names(incomplete: str) -> list[str]:
    """The names of the runs in runs/ that begin so, for the shell's completion."""
    return sorted(path.parent.name for path in RUNS.glob("*/run.json") if path.parent.name.startswith(incomplete))


RunName = Annotated[
    str | None,
    typer.Argument(help="A run's folder or its name in runs/; default: the newest.", autocompletion=run_names),
]


def newest_run(parent: Path = RUNS) -> Path:
    """The run in ``parent`` that started last. Raises ConfigError if there is none, or if a damaged record does not say
    when its run started."""
    from rayzero.cluster.files.run_status import list_runs

    try:
        records = list_runs(parent)
    except ConfigError as error:
        raise ConfigError(f"cannot tell which run is the newest: {error}; name a run, or move that one away") from error
    if not records:
        raise ConfigError(f"no runs in {parent.absolute()}; give the folder of a run")
    return parent / str(records[-1]["run"])


def find_run(name: str | None) -> Path:
    """The folder of a run: ``name`` is that folder, or a run's name in runs/; None: the newest run. Raises ConfigError
    if there is none."""
    if name is None:
        return newest_run()
    for path in (Path(name), RUNS / name):
        if path.is_dir():
            return path
    raise ConfigError(f"no such run: {name!r} is neither a folder nor a run in {RUNS.absolute()}")
