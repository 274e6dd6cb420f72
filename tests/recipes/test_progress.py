"""What is drawn of a run's steps: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console
from rich.progress import Progress

from rayzero.recipes.progress import ProgressLine, progress_line, show_addresses
from rayzero.recipes.run_log import StepRow


def row(step: int, validation: float | None = None) -> StepRow:
    return StepRow(
        step=step, loss=2.5, grad_norm=1.0, lr=1e-3, tokens=100 * step, tokens_per_second=200.0, step_seconds=0.5,
        fetch_wait_seconds=0.0, optimizer_exposed_seconds=0.0, memory_bytes=1 << 30, validation_loss=validation,
    )  # fmt: skip


def told(steps: list[tuple[float, StepRow]], *, terminal: bool) -> list[str]:
    """The steps that had a line, by rows and the seconds at which they came."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    now = [0.0]
    progress = Progress(console=console, disable=True)
    line = ProgressLine(progress, console, total=100, done=0, clock=lambda: now[0])
    for at, one in steps:
        now[0] = at
        line.show(one)
    assert progress.tasks[0].completed == steps[-1][1].step
    return [text.split()[1] for text in out.getvalue().splitlines() if "step " in text]


@pytest.mark.parametrize(("terminal", "lines"), [(False, ["1/100", "3/100", "4/100", "5/100"]), (True, ["4/100"])])
def test_slow_steps_have_a_line_each_and_validated_ones_always(terminal: bool, lines: list[str]) -> None:
    steps = [(0.0, row(1)), (0.5, row(2)), (1.2, row(3)), (1.3, row(4, 2.4)), (2.4, row(5))]
    assert told(steps, terminal=terminal) == lines


def test_a_long_line_that_is_written_beside_the_bar_is_not_broken_in_two() -> None:
    path = "/a/folder/" + "with a name/" * 9
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40)
    with progress_line(console, total=3, done=0):
        print(f"starting from step 60, with {path}", file=sys.stderr)
    assert f"with {path}\n" in out.getvalue()


@pytest.mark.parametrize("host", ["127.0.0.1", "[fd00:88::1]"])
def test_addresses_are_shown_as_they_are(host: str) -> None:
    out = io.StringIO()
    told = {"http_sd": f"http://{host}:9100/sd", "page": f"http://{host}:9100/"}
    show_addresses(told, Console(file=out, width=20))
    show_addresses(told | {"page": None}, Console(file=out, width=20))
    metrics, page = f"metrics    http://{host}:9100/sd (Prometheus http_sd)\n", f"live page  http://{host}:9100/\n"
    assert out.getvalue() == metrics + page + metrics
