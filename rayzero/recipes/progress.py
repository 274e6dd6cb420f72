"""What the driver shows of a run's rows: a line with step, loss, speed, memory and time left; the curve of losses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rayzero.recipes.run_log import StepRow

LOSS_PICTURE = "loss.png"

GIB = 1 << 30
_LINES_S = 1.0  # without a terminal, at most one line in this many seconds


def describe_row(row: StepRow) -> str:
    """``loss 2.31  val 2.40  12.3k tok/s  0.61 GiB``."""
    validation = "" if row.validation_loss is None else f"  val {row.validation_loss:.3f}"
    return f"loss {row.loss:.3f}{validation}  {row.tokens_per_second:,.0f} tok/s  {row.memory_bytes / GIB:.2f} GiB/rank"


def show_addresses(telemetry: Mapping[str, Any], console: Console) -> None:
    """Print where the numbers of a run are, as ``run.json`` has it."""
    lines = [f"metrics    {telemetry['http_sd']} (Prometheus http_sd)"]
    lines += [] if telemetry["page"] is None else [f"live page  {telemetry['page']}"]
    console.print("\n".join(lines), soft_wrap=True, markup=False)  # the brackets of an IPv6 address are no markup


class ProgressLine:
    """Shows rows as they come: on a terminal a live bar, and a line for each validated step; without a terminal, lines
    for other steps too, at most one a second.

    Knows rows; not ranks, files or Ray."""

    def __init__(
        self, progress: Progress, console: Console, total: int, done: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress = progress
        self._console = console
        self._total = total
        self._clock = clock
        self._written = -math.inf  # when the last line was
        self._task = progress.add_task("starting", total=total, completed=done)

    def show(self, row: StepRow) -> None:
        """Draw one more step."""
        self._progress.update(self._task, completed=row.step, description=describe_row(row))
        quiet = self._console.is_terminal or self._clock() - self._written < _LINES_S
        if row.validation_loss is not None or not quiet:
            self._written = self._clock()
            self._console.print(f"step {row.step}/{self._total}  {describe_row(row)}", highlight=False)


@contextmanager
def progress_line(console: Console, total: int, done: int) -> Iterator[ProgressLine]:
    """A progress line from step ``done`` to ``total``, cleared at the end."""
    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    console.soft_wrap = True  # also of lines that others write meanwhile: nobody can copy a path that is broken in two
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with progress:
        yield ProgressLine(progress, console, total, done)


def draw_losses(rows: Sequence[StepRow], unigram: float, path: Path) -> None:
    """Draw training and validation losses over steps into ``path`` (PNG). ``unigram``: validation loss in nats of a
    model that only counts tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([row.step for row in rows], [row.loss for row in rows], color="tab:blue", lw=1, label="train")
    validated = [(row.step, row.validation_loss) for row in rows if row.validation_loss is not None]
    if validated:
        steps, losses = zip(*validated, strict=True)
        axes.plot(steps, losses, color="tab:orange", marker="o", label="validation")
    axes.axhline(unigram, color="gray", ls="--", lw=1, label=f"unigram baseline ({unigram:.2f})")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=path.parent.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
