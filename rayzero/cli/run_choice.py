"""Which run a command means when it is given a name, a folder or nothing."""

from __future__ import annotations

from pathlib import Path

from rayzero.errors import ConfigError

RUNS = Path("runs")  # RunConfig's storage_path by default


def newest_run(parent: Path = RUNS) -> Path:
    """The run in ``parent`` that was started last; raises ConfigError where there is none, or where a damaged record
    does not say when its run was started."""
    from rayzero.cluster.files.status import list_runs

    try:
        records = list_runs(parent)
    except ConfigError as error:
        raise ConfigError(f"the newest run cannot be told: {error}; name a run, or move that one away") from error
    if not records:
        raise ConfigError(f"no runs in {parent.absolute()}; name the folder that a run was written to")
    return parent / str(records[-1]["run"])


def find_run(name: str | None) -> Path:
    """A run's folder, or the name of one in runs/, or (None) the newest; raises ConfigError where there is none."""
    if name is None:
        return newest_run()
    for path in (Path(name), RUNS / name):
        if path.is_dir():
            return path
    raise ConfigError(f"no such run: {name!r} is neither a folder nor a run in {RUNS.absolute()}")
