"""The driver's half of ``rayzero train``: check the recipe, run the loop on the cluster, show its rows and write the
results."""

from __future__ import annotations

import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from rayzero.checkpoint import CheckpointReader
from rayzero.cluster.continuation import Successor
from rayzero.cluster.driver import Result, ZeroTrainer
from rayzero.cluster.files.run_dir import RunDirectory, find_start
from rayzero.cluster.files.run_record import RECORD
from rayzero.cluster.nodes.local_ray import LocalRay
from rayzero.cluster.processes.program_memory import Imported, imported_memory
from rayzero.cluster.run import Report
from rayzero.config import ScalingConfig
from rayzero.convert.conversion import convert, export_full
from rayzero.convert.formats import Format
from rayzero.convert.formats.safetensors_folder import WHOLE_FILE
from rayzero.convert.translated_reader import CONFIG_FILE
from rayzero.engine.start.initial_values import require_weights
from rayzero.errors import CheckpointError, ConfigError, UnsupportedError
from rayzero.files import replace_file
from rayzero.memory.process_memory import ProcessMemory
from rayzero.plan.hardware import Hardware
from rayzero.plan.tiers import check_budgets, check_window
from rayzero.recipes.data import recipe_corpus
from rayzero.recipes.data.text import Corpus
from rayzero.recipes.lm import STEP_FLOPS, train_loop
from rayzero.recipes.model import SAMPLES, build_model
from rayzero.recipes.plan_check import PLAN_STEPS, PlanCheck, measure_hardware
from rayzero.recipes.planning import RecipePlan, RecipeWork, bytes_on_one_host, plan_recipe, recipe_work, reserve
from rayzero.recipes.recipe import HF_PREFIX, RecipeConfig
from rayzero.recipes.run_log import StepRow, StepRows, read_rows, trained_since

CONFIG = "config.yaml"
LOSS_PICTURE = "loss.png"
GIB = 1 << 30

_LINES_S = 1.0  # without a terminal, at most one line of progress in this many seconds
_PLACE = "--run-dir"  # the option that chooses the run's directory, for messages

_OF_TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The result of a recipe's run."""

    result: Result
    last: StepRow
    trained: tuple[int, int]  # steps, and tokens of all ranks, since the run was started or resumed
    unigram: float  # nats, on the tokens that validation predicts
    picture: Path
    samples: Path | None  # what the trained model writes
    model: Path | None  # the folder of the exported model


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRecipe:
    """A recipe that can run: everything that can be checked without Ray was checked."""

    recipe: RecipeConfig  # its paths are absolute
    corpus: Corpus
    num_params: int
    work: RecipeWork | None  # None: the model cannot run without data, so nothing is planned
    resume_step: int  # steps that the checkpoint to start from has done; 0: a fresh run


def prepare_run(recipe: RecipeConfig, coordinator: ProcessMemory | None = None) -> PreparedRecipe:
    """Read the text, lay out the model and open the checkpoint to resume from, if any. Writes nothing, except to repair
    what an interrupted save left behind. ``coordinator``: see ``imported_memory``.

    Raises ConfigError, UnsupportedError, DataError or CheckpointError, one line each."""
    imported = imported_memory(coordinator)
    recipe = recipe.at(Path.cwd())
    make_trainer(recipe)
    corpus = recipe_corpus(recipe)
    with torch.device("meta"):
        model = build_model(recipe, corpus.vocab_size)
    if recipe.init_from is not None and recipe.run.resume is False:
        require_weights(model, recipe.init_from)
    resume_step = _resume_step(recipe, model)  # before the work, which runs a step to be measured
    return PreparedRecipe(
        recipe=recipe,
        corpus=corpus,
        num_params=sum(param.numel() for param in model.parameters()),
        work=_work(recipe, corpus, imported),
        resume_step=resume_step,
    )


def _work(recipe: RecipeConfig, corpus: Corpus, imported: Imported) -> RecipeWork | None:
    try:
        work = recipe_work(recipe, corpus.vocab_size, imported, on_gpu=recipe.scaling.use_gpu)
    except UnsupportedError as error:
        log.warning("Ray is not asked to reserve memory: %s", error)
        return None
    check_window(work.layout, work.root, recipe.zero)
    check_budgets(bytes_on_one_host(work), recipe.zero)  # on more hosts, owners need as much
    return work


def _resume_step(recipe: RecipeConfig, model: nn.Module) -> int:
    start = find_start(recipe.run, Successor.of(recipe.zero_config, recipe.scaling), setting=_PLACE)
    if start.checkpoint is not None:
        with CheckpointReader(start.checkpoint) as checkpoint:
            _check_same_model(checkpoint, model)
    if start.step >= recipe.steps and start.continuation is None:
        raise ConfigError(
            f"steps is {recipe.steps} and {start.checkpoint} has done {start.step}: nothing is left to do; "
            "more steps take --steps"
        )
    return start.step


def _check_same_model(checkpoint: CheckpointReader, model: nn.Module) -> None:
    theirs = {slot.name: tuple(slot.shape) for unit in checkpoint.layout.units for slot in unit.slots}
    ours = {name: tuple(param.shape) for name, param in model.named_parameters()}
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise CheckpointError(
                f"{checkpoint.directory} is of another model: {name!r} is {theirs.get(name, 'missing')} there, but "
                f"{ours.get(name, 'missing')} here; use the recipe that it was made with"
            )


def plan_prepared(prepared: PreparedRecipe) -> RecipePlan | None:
    """The plan of the run on this host, whose speed is measured for it (half a second on CPUs). None if nothing can be
    planned, or if this host cannot be measured."""
    hardware = None if prepared.work is None else measure_hardware(prepared.work)
    if prepared.work is None or hardware is None:
        return None
    return plan_recipe(prepared.work, hardware)


def run_prepared(
    prepared: PreparedRecipe, console: Console, hardware: Hardware | None = None, ray: LocalRay | None = None
) -> Training:
    """Train on the cluster, drawing progress on ``console``; leaves config.yaml, metrics.jsonl, loss.png and
    checkpoints/ in the run's directory. ``hardware``: this host, which measured steps are compared with. ``ray``: see
    ``ZeroTrainer.fit``.

    Raises RunFailedError if the run failed and KeyboardInterrupt if it was stopped; the directory then holds what was
    written until then."""
    recipe = prepared.recipe
    successor = Successor.of(recipe.zero_config, recipe.scaling)
    with RunDirectory.open(recipe.run, successor, setting=_PLACE) as directory:
        try:
            # rows are cut, and plans made, for the step to resume from
            if directory.start.step != prepared.resume_step:
                raise ConfigError(
                    f"{directory.path} has changed while this run was starting: the run would have resumed from step "
                    f"{prepared.resume_step}, and now from step {directory.start.step}; another run has used the "
                    "directory, so start this run again"
                )
            return _run_in(directory, prepared, console, hardware, ray)
        except (ConfigError, UnsupportedError, KeyboardInterrupt, SystemExit):  # refused by the cluster, or stopped
            if directory.fresh and not (directory.path / RECORD).exists():  # it never began to start
                (directory.path / CONFIG).unlink(missing_ok=True)
                (directory.path / CONFIG_FILE).unlink(missing_ok=True)
                directory.withdraw()
            raise


def _run_in(
    directory: RunDirectory,
    prepared: PreparedRecipe,
    console: Console,
    hardware: Hardware | None,
    ray: LocalRay | None,
) -> Training:
    recipe, path = prepared.recipe, directory.path
    # as it runs, for --resume or another run; and a transformers model's config, for rayzero convert
    replace_file(path / CONFIG, recipe.replace(run=recipe.run.replace(resume=False)).to_yaml())
    if recipe.model.startswith(HF_PREFIX):
        replace_file(path / CONFIG_FILE, Path(recipe.model.removeprefix(HF_PREFIX)).read_bytes())
    unigram = prepared.corpus.baseline()
    rows = [row for row in read_rows(path) if row.step <= directory.rows_until]
    try:
        result = _fit(prepared, directory, rows, console, hardware, ray)
    finally:
        if rows:
            try:
                draw_losses(rows, unigram, path / LOSS_PICTURE)
            except OSError as error:  # the training itself has succeeded
                log.warning("%s is not drawn: %s", path / LOSS_PICTURE, error.strerror)
    return Training(
        result=result,
        last=rows[-1],
        trained=trained_since(rows, prepared.resume_step),
        unigram=unigram,
        picture=path / LOSS_PICTURE,
        samples=path / SAMPLES if recipe.sample_tokens and (path / SAMPLES).exists() else None,
        model=export_model(recipe, result.checkpoint, path) if recipe.export and result.checkpoint else None,
    )


def _fit(
    prepared: PreparedRecipe,
    directory: RunDirectory,
    rows: list[StepRow],
    console: Console,
    hardware: Hardware | None,
    ray: LocalRay | None,
) -> Result:
    """Train; each step's row is added to ``rows``."""
    recipe, joined = prepared.recipe, StepRows()
    check = None
    if prepared.work is not None and recipe.run.telemetry.enabled and recipe.steps - prepared.resume_step >= PLAN_STEPS:
        check = PlanCheck(prepared.work, hardware, directory.path)
    with progress_line(console, recipe.steps, prepared.resume_step) as line:

        def take(report: Report) -> None:
            row = joined.add(report)
            if row is None or (rows and row.step <= rows[-1].step):  # the last rows of a run that it continues
                return
            rows.append(row)
            line.show(row)
            if check is not None and (compared := check.take(row)) is not None:
                console.print(compared, highlight=False, soft_wrap=True, markup=False)

        def started(record: dict[str, Any]) -> None:
            nonlocal joined
            joined = StepRows()  # a run that starts again from a checkpoint repeats steps
            rows[:] = [row for row in rows if row.step <= directory.rows_until]
            if check is not None:
                check.started(record)
            if record["telemetry"] is not None:
                show_addresses(record["telemetry"], console)

        scaling = recipe.scaling if prepared.work is None else reserve(prepared.work)
        flops = None if prepared.work is None else prepared.work.step_flops
        trainer = make_trainer(recipe, take, scaling, started, flops)
        return trainer.fit(saves_checkpoints=True, directory=directory, ray=ray)  # one after the last step at least


def make_trainer(
    recipe: RecipeConfig,
    on_report: Callable[[Report], None] | None = None,
    scaling: ScalingConfig | None = None,
    on_start: Callable[[dict[str, Any]], None] | None = None,
    step_flops: int | None = None,
) -> ZeroTrainer:
    """The trainer of a recipe. Creating it checks the settings and starts nothing. scaling: overrides the recipe's.
    step_flops: a step's operations, from which ranks report their speed."""
    return ZeroTrainer(
        train_loop,
        train_loop_config=recipe.model_dump(mode="json") | {STEP_FLOPS: step_flops},
        zero_config=recipe.zero_config,
        scaling_config=scaling or recipe.scaling,
        run_config=recipe.run,
        on_report=on_report,
        on_start=on_start,
        make_row=StepRows(),
    )


def export_model(recipe: RecipeConfig, checkpoint: Path, run_dir: Path) -> Path:
    """Write a checkpoint's fp32 masters as ``model/model.safetensors``; of a transformers model under the names that
    transformers publishes, with its config and the files of its tokenizer, so that ``from_pretrained`` reads the
    folder. Replaces an earlier one. Raises CheckpointError if it cannot be written."""
    folder = run_dir / "model"
    if recipe.model.startswith(HF_PREFIX):
        _export_published(checkpoint, Path(recipe.model.removeprefix(HF_PREFIX)), folder)
    else:
        export_full(checkpoint, folder / WHOLE_FILE, overwrite=True)
    tokenizer = Path(recipe.tokenizer)
    if tokenizer.is_dir():
        for name in _OF_TOKENIZERS:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, folder / name)
    elif tokenizer.is_file():
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
    return folder


def _export_published(checkpoint: Path, config: Path, folder: Path) -> None:
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)  # left by a process that was killed
    convert(checkpoint, new, to=Format.HF, max_bytes=sys.maxsize, config=config)
    if not (new / CONFIG_FILE).exists():  # no class has these names as they are: transformers finds out what fits
        shutil.copyfile(config, new / CONFIG_FILE)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


# ---- what is shown of a run's rows: a line with step, loss, speed, memory and time left; the curve of losses --------


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

    def __init__(self, progress: Progress, console: Console, total: int, done: int) -> None:
        self._progress = progress
        self._console = console
        self._total = total
        self._written = -math.inf  # when the last line was
        self._task = progress.add_task("starting", total=total, completed=done)

    def show(self, row: StepRow) -> None:
        """Draw one more step."""
        self._progress.update(self._task, completed=row.step, description=describe_row(row))
        quiet = self._console.is_terminal or monotonic() - self._written < _LINES_S
        if row.validation_loss is not None or not quiet:
            self._written = monotonic()
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
