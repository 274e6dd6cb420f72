"""The run that a command means, by a name, by a folder, or the newest one; and lines about it for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rayzero.errors import ConfigError
from rayzero.quantities import count

RUNS = Path("runs")  # the default of RunConfig.storage_path
_MOST_LINES = 5  # the newest
_ASKED = "asked for"  # why a change that somebody asked for was made; all others are autoscaling's


def run_names(incomplete: str) -> list[str]:
    """The names of the runs in runs/ that begin so, for the shell's completion."""
    return sorted(path.parent.name for path in RUNS.glob("*/run.json") if path.parent.name.startswith(incomplete))


RunName = Annotated[
    str | None,
    typer.Argument(help="A run's folder or its name in runs/; default: the newest.", autocompletion=run_names),
]


def newest_run(parent: Path = RUNS) -> Path:
    """The run in ``parent`` that started last. Raises ConfigError if there is none, or a damaged record hides when."""
    from rayzero.cluster.files.run_record import list_runs

    try:
        records = list_runs(parent)
    except ConfigError as error:
        raise ConfigError(f"cannot tell which run is the newest: {error}; name a run, or move that one away") from error
    if not records:
        raise ConfigError(f"no runs in {parent.absolute()}; give the folder of a run")
    return parent / str(records[-1]["run"])


def find_run(name: str | None) -> Path:
    """The folder of a run: ``name`` is it, or a name in runs/; None: the newest. ConfigError if there is none."""
    if name is None:
        return newest_run()
    for path in (Path(name), RUNS / name):
        if path.is_dir():
            return path
    raise ConfigError(f"no such run: {name!r} is neither a folder nor a run in {RUNS.absolute()}")


# ---- lines for a terminal ---------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """``text`` on one line, with control characters escaped as Python does, so that none reaches the terminal."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def recovery_lines(record: Mapping[str, Any], now: float) -> list[str]:
    """A line for each process that is being replaced, and for each of the newest recoveries, the newest first.
    ``record``: what ``run_status`` returns; ``now``: seconds since 1970."""

    def line(one: Mapping[str, Any]) -> str:
        ago = f"{_duration(now - one['time'] + one['seconds'])} ago"
        if one["pid"] is None:
            return f"{one['who']} failed {ago} and started again from a checkpoint within {one['seconds']:.1f} s"
        return f"{one['who']} died {ago} and was replaced by pid {one['pid']} within {one['seconds']:.1f} s"

    under_way = record["replacing"] if record["state"] == "running" else []
    dying = [f"{who} died; another process is taking its place" for who in under_way]
    return dying + _newest(record["recoveries"], line, "earlier death")


def change_lines(record: Mapping[str, Any], now: float) -> list[str]:
    """A line for the change of the optimizers that is under way, and one for each of the newest, the newest first.
    ``record``: what ``run_status`` returns; ``now``: seconds since 1970."""

    def line(one: Mapping[str, Any]) -> str:
        were, ago = count(one["before"], "optimizer"), f"{_duration(now - one['time'])} ago"
        if one["failed"] is not None:
            return f"{were} stayed, {ago}: {one['failed']}"
        if not one["seconds"]:
            return f"{were} were asked for, {ago}, and there already"
        became = f"{were} became {one['after']}" if one["after"] != one["before"] else "optimizers moved to other nodes"
        why = "" if one["why"] == _ASKED else f", because {one['why']}"
        return f"{became}, {ago}{why}; training stood for {one['pause']:.2f} s"

    under_way = record["rescaling"] if record["state"] == "running" else None
    return ([under_way] if under_way is not None else []) + _newest(record["rescales"], line, "earlier change")


def _newest(found: Sequence[Any], line: Callable[[Any], str], noun: str) -> list[str]:
    """Lines of the newest, the newest first, and how many came before them."""
    newest = found[: -_MOST_LINES - 1 : -1]
    before = len(found) - len(newest)
    return [*map(line, newest), *([f"and {count(before, noun)}: see run.json"] if before else [])]


def memory_lines(memory: Mapping[str, Any], now: float) -> list[str]:
    """Whether the states of a killed run are still in this host's memory. ``memory``: see ``kept_states``."""
    if not memory["kept"]:
        return [f"not kept: {memory['why']}"]
    left = max(0.0, memory["until"] - now)
    return [f"kept in {memory['directory']} for another {_duration(left)}: step {memory['step']} is next"]


def _duration(seconds: float) -> str:
    """``42`` -> ``"42 s"``; ``300`` -> ``"5 min"``; ``9000`` -> ``"2.5 h"``."""
    seconds = max(0.0, seconds)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
