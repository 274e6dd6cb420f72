"""``rayzero top``: shows a running run in a terminal, from the metrics that its processes serve to Prometheus."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep, time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayzero.cli.status import (
    RunName,
    change_lines,
    describe_run,
    find_run,
    format_status,
    planned_steps,
    recovery_lines,
)
from rayzero.cluster.supervision import postponed
from rayzero.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from rayzero.telemetry.scrape import Scrape, Target, Viewer

_WINDOW_S = 10.0  # a picture covers so long, and at least one step
_ANSWER_S = 2.0  # an exporter that has not answered by then is shown as silent
_LEAST_S = 1.0  # exporters do not make their pages more often
_PIPE_COLUMNS = 120  # width if the output is not a terminal

Show = Callable[["RenderableType"], None]


def top(
    run: RunName = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture of an interval and exit.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between scrapes, at least 1.")] = 2.0,
) -> None:
    """Watch a running run: steps, phases, waits, prefetches, owners and memory. Ctrl-C leaves.

    Waits for a run that is still starting. Reads the metrics of its processes; needs neither Ray nor Prometheus."""
    if not (math.isfinite(interval) and interval >= _LEAST_S):
        raise ConfigError(f"--interval is {interval:g} but must be at least {_LEAST_S:g} second")
    from rich.console import Console

    path, console = find_run(run), Console()
    if not console.is_terminal:
        console.width = _PIPE_COLUMNS
    with suppress(KeyboardInterrupt):
        _wait_until_started(path, interval)
        live = console.is_terminal and not once
        ended = _watch_live(path, interval, console) if live else _watch(path, interval, console.print, once=once)
        if ended:
            typer.echo(format_status(describe_run(path)))


def _wait_until_started(path: Path, interval: float) -> None:
    """Wait until a starting run's processes are up, or the run has ended."""
    from rayzero.cluster.files.run_record import run_status
    from rayzero.cluster.run import RunState

    waited = False
    while (record := run_status(path))["state"] == RunState.STARTING:
        if not waited:
            typer.echo(f"run {record['run']!r} is starting: its processes are not up yet", err=True)
        waited = True
        sleep(interval)


def _watch_live(path: Path, interval: float, console: Console) -> bool:
    """Watch on the terminal's alternate screen; the last picture stays when the user leaves it."""
    last: list[RenderableType] = []
    try:
        with _screen(console) as update:

            def show(picture: RenderableType) -> None:
                with postponed():  # a Ctrl-C in the middle of drawing would leave the terminal in that state
                    last[:] = [picture]
                    update(picture)

            return _watch(path, interval, show, once=False)
    finally:
        for picture in last:
            console.print(picture)


@contextmanager
def _screen(console: Console) -> Iterator[Show]:
    from rich.live import Live

    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda picture: live.update(picture, refresh=True)


def _watch(path: Path, interval: float, show: Show, *, once: bool) -> bool:
    """Scrape and show until the run has ended (True) or, with ``once``, until one picture was shown (False)."""
    from rayzero.cli.top_view import render
    from rayzero.cluster.files.key_files import read_viewer
    from rayzero.cluster.files.run_record import run_status, why_over
    from rayzero.cluster.run import RunState
    from rayzero.telemetry.picture import draw_from, keep
    from rayzero.telemetry.scrape import scrape

    kept: tuple[Scrape, ...] = ()
    steps, mute = planned_steps(path), 0
    while why_over(record := run_status(path)) is None:
        if record["state"] == RunState.STARTING:  # again, from a checkpoint: other processes, which count from 0
            kept, mute = (), 0
            sleep(interval)
            continue
        viewer = read_viewer(path)
        kept = keep((*kept, scrape(_targets(record, viewer), timeout_s=_ANSWER_S, viewer=viewer)), _WINDOW_S)
        mute = 0 if any(one.series for one in kept[-1].processes) else mute + 1
        before = kept[0] if len(kept) > 1 else None
        if mute != 1 and (before is not None or not once):  # a run that ends is silent before its record says so
            picture = draw_from(record["run"], before, kept[-1])
            now = time()
            recoveries, changes = recovery_lines(record, now), change_lines(record, now)
            show(render(picture, state=record["state"], steps=steps, recoveries=recoveries, changes=changes))
            if once:
                return False
        sleep(interval)
    return True


def _targets(record: dict[str, Any], viewer: Viewer) -> tuple[Target, ...]:
    """The run's processes as its coordinator lists them now; if it does not answer, as they were at the start."""
    from rayzero.telemetry.scrape import Target, discover

    told = record["telemetry"]
    if told is None:
        raise ConfigError(
            f"run {record['run']!r} serves no metrics (run.telemetry.enabled is false), so there is nothing to watch; "
            "rayzero status shows its record"
        )
    with suppress(OSError, ValueError):
        return discover(told["http_sd"], timeout_s=_ANSWER_S, viewer=viewer)
    try:
        return tuple(Target.of(one["address"], one["labels"]) for one in told["targets"])
    except ValueError as error:
        raise ConfigError(f"the record of run {record['run']!r} is damaged: {error}") from error
