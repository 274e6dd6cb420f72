"""The run that a command means, by a name, by a folder, or the newest one. ``rayzero status``: shows how far it is,
from the files that its driver keeps up to date. ``rayzero scale`` and ``rayzero trace``: change it, and watch its
processes, while it trains."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from rayzero.errors import ConfigError
from rayzero.files import to_json
from rayzero.quantities import count, format_bytes

if TYPE_CHECKING:
    from rayzero.config.zero import Placement

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
    if Path(name).is_file():
        raise ConfigError(f"no such run: {name!r} is a file; give the run's folder, which has a run.json")
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


# ---- what is known of a run -----------------------------------------------------------------------------------------


_MAX_CONFIG = 1 << 24  # bytes
_OF_THE_RECORD = (
    "run", "state", "error", "resumed_from", "started_at", "ended_at", "recoveries", "replacing", "rescaling",
    "rescales", "members", "spares", "addresses", "metrics", "telemetry", "loggers",
)  # fmt: skip
_SPEED = {"tokens_per_second", "step_seconds"}
_SHOWN = {"step", "loss", "validation_loss", *_SPEED}  # these have lines of their own


def status(
    run: RunName = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show a run's state, progress and newest checkpoint."""
    described = describe_run(find_run(run))
    typer.echo(to_json(described) if as_json else format_status(described))


def describe_run(path: Path) -> dict[str, Any]:
    """What the files of the run in ``path`` say, as values for JSON.

    Raises ConfigError if there is no run, and DataError if its metrics cannot be read."""
    from rayzero.cluster.files.metrics_log import latest_metrics, read_log
    from rayzero.cluster.files.run_record import kept_states, run_status
    from rayzero.recipes.plan_check import read_plan

    record = run_status(path)
    memory = kept_states(record)
    rows = read_log(path)
    checkpoints, damaged = sound_checkpoints(path)
    validated = [row["validation_loss"] for row in rows if row.get("validation_loss") is not None]
    return {name: record[name] for name in _OF_THE_RECORD} | {
        "path": str(path.absolute()),
        "steps": planned_steps(path),
        "last": latest_metrics(rows),
        "validation_loss": validated[-1] if validated else None,
        "checkpoint": str(checkpoints[-1]) if checkpoints else None,
        "checkpoints": [str(checkpoint) for checkpoint in checkpoints],
        "damaged": damaged,
        "memory": memory,
        "continue_with": _continue_with(path, memory, bool(checkpoints)) if memory is not None else None,
        "plan": read_plan(path),
    }


def _continue_with(path: Path, memory: Mapping[str, Any], has_checkpoint: bool) -> str | None:
    """What continues a run whose driver was killed; None if there is nothing to go on from."""
    if not (memory["kept"] or has_checkpoint):
        return None
    if (path / "config.yaml").exists():
        return f"rayzero train --resume --run-dir {shlex.quote(str(path))}"
    where = path.absolute()
    return f"RunConfig(name={where.name!r}, storage_path={str(where.parent)!r}, resume=True)"


def planned_steps(run_dir: Path) -> int | None:
    """The steps that a run's config.yaml says; None if there is no such file. Raises ConfigError if it is no recipe."""
    from rayzero.files import regular_size
    from rayzero.recipes.recipe import load_recipe

    config = run_dir / "config.yaml"
    try:
        size = regular_size(config)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {config}: {error.strerror}") from error
    if size > _MAX_CONFIG:
        raise ConfigError(f"cannot read {config}: it has {size:,} bytes, too many for a recipe")
    return load_recipe(config).steps


def sound_checkpoints(run_dir: Path) -> tuple[list[Path], list[str]]:
    """(the checkpoints that a run can resume from, oldest first; why it cannot resume from the others). Checks the
    files' sizes, but not every byte."""
    from rayzero.cluster.files.run_dir import checkpoints_of

    catalog = checkpoints_of(run_dir).catalog()
    return [one.path for one in catalog.sound], list(catalog.damaged.values())


def _by_index(who: str) -> tuple[str, int, str]:
    """Sorts "optimizer 10" after "optimizer 9", and one that joined late beside the others."""
    name, _, index = who.rpartition(" ")
    return name, len(index), index


def format_status(described: dict[str, Any]) -> str:
    """A few lines for people. Control characters in the names and texts of the loop are escaped."""
    seconds = (described["ended_at"] or time.time()) - described["started_at"]
    lines = [
        f"run         {described['run']} ({described['path']})",
        f"state       {described['state']}, {seconds:.0f} s",
        *_progress(described),
        f"checkpoint  {described['checkpoint'] or 'none'}",
        *(f"damaged     {why}" for why in described["damaged"]),
    ]
    now = time.time()
    lines += [f"recovery    {line}" for line in recovery_lines(described, now)]
    lines += [f"change      {line}" for line in change_lines(described, now)]
    if described["memory"] is not None:
        lines += [f"memory      {line}" for line in memory_lines(described["memory"], now)]
    if described["continue_with"] is not None:
        lines.append(f"continue    {described['continue_with']}")
    lines += [f"logger      {_logger(one)}" for one in described["loggers"]]
    if described["state"] == "running":
        members = sorted(described["members"], key=lambda member: _by_index(str(member["who"])))
        lines += [f"process     {who['who']}: pid {who['pid']} on {who['host']}{_without(who)}" for who in members]
        lines += [f"spare       pid {who['pid']} on {who['host']}" for who in described["spares"]]
        if described["telemetry"]:
            lines.append(f"metrics     {described['telemetry']['http_sd']} (Prometheus http_sd)")
            if page := described["telemetry"].get("page"):
                lines.append(f"live page   {page}")
    if described["error"]:
        lines.append(f"error       {described['error'].partition(chr(10))[0]}")
    return "\n".join(map(plain, lines))


def _without(member: Mapping[str, Any]) -> str:
    return "" if member.get("has_shards", True) else ", without shards"


def _logger(told: Mapping[str, Any]) -> str:
    """Where a logger has the run's rows, and what it does not take."""
    where = told["where"] or "not open"
    lost = f", {count(told['lost'], 'row')} refused" if told["lost"] else ""
    error = f" ({told['error']})" if told["error"] else ""
    until = f", until step {told['step']}" if told["step"] >= 0 else ""
    return f"{told['logger']}: {where}{until}{lost}{error}"


def _progress(described: dict[str, Any]) -> list[str]:
    last, validation = described["last"], described["validation_loss"]
    if last is None:
        return []
    of = "" if described["steps"] is None else f" of {described['steps']}"
    lines = [f"step        {last['step']}{of}"]
    if "loss" in last:
        validated = "" if validation is None else f", {_value(validation, '.4f')} validation"
        lines.append(f"loss        {_value(last['loss'], '.4f')} train{validated}")
    if last.keys() >= _SPEED:
        speed = f"{_value(last['tokens_per_second'], ',.0f')} tokens/s, {_value(last['step_seconds'], '.3f')} s a step"
        lines.append(f"speed       {speed}")
    others = {name: value for name, value in last.items() if name not in _SHOWN}
    if others:
        lines.append("reported    " + ", ".join(f"{name} {_value(value, '.6g')}" for name, value in others.items()))
    return lines


def _value(value: Any, form: str) -> str:
    """A number in this format. None was inf or nan, for which the log has no number."""
    if value is None:
        return "nan"
    return f"{value:{form}}" if isinstance(value, int | float) else " ".join(str(value).split())


# ---- while it trains ------------------------------------------------------------------------------------------------


def scale(
    run: RunName = None,
    optimizers: Annotated[int, typer.Option(help="How many optimizer actors there shall be.")] = ...,  # type: ignore[assignment]
    avoid: Annotated[
        list[str] | None,
        typer.Option(help="A node (id or address) on which no optimizer actor is to have shards; several times, too."),
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(help="Where all of them are to be: beside_rank, packed or cpu_nodes; default: as before."),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until they have changed, and say what it took.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Change the number of a run's optimizer actors, or where they are, while it trains. No step is lost."""
    from rayzero.cluster.upkeep.rescaling import scale as ask

    def show(progress: str) -> None:
        typer.echo(progress, err=True)

    where = cast("Placement | None", placement)  # a request checks it
    done = ask(find_run(run), optimizers, avoid=avoid or (), placement=where, wait=wait, on_progress=show)
    if done is None:
        typer.echo(to_json({"asked": optimizers}) if as_json else "asked; rayzero status says what comes of it")
    elif as_json:
        typer.echo(to_json(asdict(done)))
    elif not done.seconds:
        typer.echo(f"it has {count(done.before, 'optimizer')} already")
    else:
        typer.echo(
            f"{count(done.before, 'optimizer')} became {done.after}; {format_bytes(done.moved_bytes)} have another "
            f"owner; training stood for {done.pause:.2f} s"
        )


def trace(
    run: RunName = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to watch: at least a few steps.")] = 5.0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file; default: RUN-trace.json.")] = None,
) -> None:
    """Watch a running run, and write the times of its forwards, backwards, fetches, pushes and updates on one clock."""
    from rayzero.cluster.files.tracing import trace_run, write_trace

    folder = find_run(run)
    name = folder.resolve().name
    path = output or Path(f"{name}-trace.json")
    found = trace_run(folder, seconds)
    write_trace(path, name, found)
    spans = [span for one in found.values() for span in one.spans]
    steps = sorted({span.step for span in spans})
    covered = f"steps {steps[0]} to {steps[-1]}" if steps else "no step: watch longer with --seconds"
    counted = f"{count(len(spans), 'span')} of {count(len(found), 'process', 'processes')}"
    typer.echo(f"{path}: {counted}, {covered}; open it at https://ui.perfetto.dev")
