"""The driver's checks before Ray: a recipe is either found able to run, or refused by name."""

from __future__ import annotations

import io
import json
import re
import socket
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from clock import Clock
from rich.console import Console
from rich.progress import Progress
from saved import save_checkpoint

from rayzero.cluster.files.run_dir import RunLock
from rayzero.errors import ConfigError, DataError, MemoryPlanError
from rayzero.recipes.lm import train_loop
from rayzero.recipes.model import build_model
from rayzero.recipes.recipe import RecipeConfig
from rayzero.recipes.run_log import StepRow
from rayzero.recipes.training import ProgressLine, prepare_run, progress_line, run_prepared, show_addresses
from rayzero.testing import run_ranks


@pytest.fixture
def recipe(tmp_path: Path) -> RecipeConfig:
    (tmp_path / "text.txt").write_bytes(b"to be or not to be. " * 100)
    run = {"storage_path": str(tmp_path / "runs")}
    return RecipeConfig(data=str(tmp_path / "text.txt"), dim=16, num_layers=1, num_heads=2, seq_len=16, run=run)


def test_a_transformers_model_is_measured_without_allocating_it(recipe, tmp_path):
    pytest.importorskip("transformers")
    huge = {"model_type": "gpt2", "n_layer": 6, "n_head": 96, "n_embd": 49152, "n_positions": 64, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(huge))
    roomy = {"cpu_memory_budget": "4TiB", "gpu_param_memory_budget": "4TiB", "max_cpu_memory_mb": 1 << 23}
    assert prepare_run(recipe.replace(model=f"hf:{tmp_path / 'config.json'}", zero=roomy)).num_params > 170e9


def test_a_budget_without_room_for_the_root_and_one_more_unit_is_refused_with_the_least_that_has(recipe, tmp_path):
    """The least is what the engine itself asks for when it has too little."""
    tight = recipe.replace(zero={"gpu_param_memory_budget": 47_103}, scaling={"num_workers": 1, "num_optimizers": 1})
    said = r"the root unit \(33,280 bytes\) and one more \(up to 13,824\) at once; set it to at least 47,104$"
    with pytest.raises(MemoryPlanError, match=said):
        prepare_run(tight)
    prepare_run(tight.replace(zero={"gpu_param_memory_budget": 47_104}))
    with pytest.raises(MemoryPlanError, match=r"no room for unit 'blocks.0' .*; set it to at least 47,104"):
        run_ranks(lambda _: train_loop(tight.model_dump(mode="json")), world_size=1, run_dir=tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "error"), [({"data": "/nowhere"}, DataError), ({"tokenizer": "/nowhere.json"}, ConfigError)]
)
def test_a_file_that_a_rank_does_not_find_is_told_with_its_host(recipe, tmp_path, change, error):
    said = f"/nowhere.* \\(on host {re.escape(socket.gethostname())}; every host needs the files of the recipe"
    with pytest.raises(error, match=said):
        run_ranks(lambda _: train_loop(recipe.replace(**change).model_dump(mode="json")), 1, run_dir=tmp_path / "run")


def test_a_run_that_goes_on_is_not_resumed_even_if_it_has_no_checkpoint_yet(recipe, tmp_path):
    resuming = recipe.replace(run={"resume": True, "storage_path": str(tmp_path / "runs")})
    resuming.run.path.mkdir(parents=True)
    with (
        closing(RunLock.take(resuming.run.path)),
        pytest.raises(ConfigError, match="in use by a run that is still running"),
    ):
        prepare_run(resuming)


def save_run(recipe: RecipeConfig, step: int) -> Path:
    with torch.device("meta"):
        params = build_model(recipe, 256).named_parameters()
    return save_checkpoint(recipe.run.path, step, {name: tuple(param.shape) for name, param in params})


def resumed(recipe: RecipeConfig, resume: bool | str = True) -> RecipeConfig:
    return recipe.replace(run=recipe.run.replace(resume=resume))


def test_a_run_whose_directory_has_changed_since_it_was_looked_at_starts_nothing(recipe):
    save_run(recipe, 10)
    prepared = prepare_run(resumed(recipe))
    save_run(recipe, 20)
    with pytest.raises(
        ConfigError, match=r"would have resumed from step 10, and now from step 20; another run has used"
    ):
        run_prepared(prepared, Console())
    assert sorted(path.name for path in recipe.run.path.iterdir()) == [".lock", "checkpoints"]


# ---- What is drawn of a run's steps: a bar on a terminal, lines in a file.


def row(step: int, validation: float | None = None) -> StepRow:
    return StepRow(
        step=step, loss=2.5, grad_norm=1.0, lr=1e-3, tokens=100 * step, tokens_per_second=200.0, step_seconds=0.5,
        fetch_wait_seconds=0.0, optimizer_exposed_seconds=0.0, memory_bytes=1 << 30, validation_loss=validation,
    )  # fmt: skip


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("rayzero.recipes.training.monotonic", clock)
    return clock


def told(clock: Clock, steps: list[tuple[float, StepRow]], *, terminal: bool) -> list[str]:
    """The steps that had a line, by rows and the seconds at which they came."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    progress = Progress(console=console, disable=True)
    line = ProgressLine(progress, console, total=100, done=0)
    for at, one in steps:
        clock.now = at
        line.show(one)
    assert progress.tasks[0].completed == steps[-1][1].step
    return [text.split()[1] for text in out.getvalue().splitlines() if "step " in text]


@pytest.mark.parametrize(("terminal", "lines"), [(False, ["1/100", "3/100", "4/100", "5/100"]), (True, ["4/100"])])
def test_slow_steps_have_a_line_each_and_validated_ones_always(clock: Clock, terminal: bool, lines: list[str]) -> None:
    steps = [(0.0, row(1)), (0.5, row(2)), (1.2, row(3)), (1.3, row(4, 2.4)), (2.4, row(5))]
    assert told(clock, steps, terminal=terminal) == lines


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
