"""``rayzero scale`` and ``rayzero trace``: change a run, and watch its processes, while it trains."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from rayzero.cli.runs import RunName, find_run
from rayzero.files import to_json
from rayzero.quantities import count, format_bytes

if TYPE_CHECKING:
    from rayzero.config.zero import Placement


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
    from rayzero.cluster.scale_call import scale as ask

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
