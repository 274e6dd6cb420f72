"""``rayzero trace``: records what every process of a run does at each moment, as a file for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayzero.cli.run_choice import RunName, find_run
from rayzero.quantities import count


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
