"""``rayzero train``: trains a language model on text, with optimizer actors on Ray. ``rayzero init``: writes a recipe
for it, with every setting, what it means and its default."""

from __future__ import annotations

import difflib
import math
import os
import shlex
import sys
import time
from collections.abc import Collection
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayzero.cli.status import newest_run, plain
from rayzero.concurrency.processes import uncollected
from rayzero.errors import ConfigError, RunFailedError
from rayzero.quantities import count, format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from rayzero.recipes.planning import RecipePlan
    from rayzero.recipes.recipe import RecipeConfig
    from rayzero.recipes.training import PreparedRecipe, Training

_STOPPED, _TERMINATED = 130, 143  # the shell's codes for a command that Ctrl-C or SIGTERM ended


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE.yaml] [key=value]...", help="A recipe, and settings that override it."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of the whole run.")] = None,
    workers: Annotated[int | None, typer.Option(help="Rank workers.")] = None,
    optimizers: Annotated[int | None, typer.Option(help="Optimizer actors.")] = None,
    run_dir: Annotated[str | None, typer.Option(help="Folder of the run's files; default: a new one in runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --run-dir (default: newest).")] = False,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    report_to: Annotated[
        list[str] | None, typer.Option(help="tensorboard, wandb, mlflow, csv, all or none; may be given again.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and plan everything; start nothing and write nothing.")
    ] = False,
    help_config: Annotated[
        bool, typer.Option("--help-config", help="List every setting, with its unit and default, and exit.")
    ] = False,
) -> None:
    """Train a language model on text. Without arguments, train a small GPT on the Python standard library's sources."""
    if help_config:
        from rayzero.config import describe_settings
        from rayzero.recipes.recipe import RecipeConfig

        typer.echo("\n".join(describe_settings(RecipeConfig)))
        return
    options = {
        "steps": steps,
        "scaling.num_workers": workers,
        "scaling.num_optimizers": optimizers,
        "run.checkpoint_every": checkpoint_every,
        "run.report_to": report_to or None,
        "run.resume": resume or None,
    }
    if run_dir == "":
        raise ConfigError("--run-dir is '' but must be a folder with a plain name")
    chosen = {key: value for key, value in options.items() if value is not None}
    recipe = choose_recipe(arguments or [], chosen, None if run_dir is None else Path(run_dir))
    if dry_run:
        _try(recipe)
    else:
        _train(recipe)


def choose_recipe(arguments: list[str], options: dict[str, Any], run_dir: Path | None) -> RecipeConfig:
    """The recipe of a command line: a file or the resumed run's config.yaml, changed by overrides and then by
    options. Raises ConfigError."""
    with uncollected():
        from rayzero.config import apply_overrides, read_yaml, set_value
        from rayzero.recipes.recipe import RecipeConfig

    path, overrides = _split_arguments(arguments, RecipeConfig.model_fields)
    settings = apply_overrides(read_yaml(path) if path is not None else {}, overrides)
    if options.get("run.resume"):
        run_dir = run_dir or _named_run(settings) or newest_run()
        if path is None and (config := run_dir / "config.yaml").exists():
            settings = apply_overrides(read_yaml(config), overrides)
    if run_dir is not None:
        options |= _place_of(run_dir)
    for dotted, value in options.items():
        set_value(settings, dotted, value)
    run = settings.get("run")
    if run is None or (isinstance(run, dict) and "name" not in run):
        set_value(settings, "run.name", time.strftime("train-%Y%m%d-%H%M%S"))
    return RecipeConfig.from_mapping(settings)


def _named_run(settings: dict[str, Any]) -> Path | None:
    """The folder of the run that a recipe and its overrides name; None if they name none."""
    from rayzero.config import RunConfig

    run = settings.get("run")
    if not isinstance(run, dict) or "name" not in run:
        return None
    return Path(str(run.get("storage_path", RunConfig().storage_path))) / str(run["name"])


def _place_of(run_dir: Path) -> dict[str, Any]:
    """The two settings that --run-dir stands for. Raises ConfigError if it is no folder's name."""
    path = Path(os.path.abspath(run_dir))
    if not path.name or "\\" in path.name:
        raise ConfigError(f"--run-dir is {str(run_dir)!r} but must be a folder with a plain name")
    return {"run.storage_path": str(path.parent), "run.name": path.name}


def _split_arguments(arguments: list[str], settings: Collection[str]) -> tuple[Path | None, list[str]]:
    overrides = [argument for argument in arguments if "=" in argument]
    paths = [argument for argument in arguments if "=" not in argument]
    for name in paths:
        if Path(name).exists():
            continue
        if name.partition(".")[0] in settings:
            raise ConfigError(f"{name} is a setting and has no value: write {name}=VALUE")
        if near := difflib.get_close_matches(name, settings, n=1):
            raise ConfigError(f"{name} is neither a recipe nor a setting; did you mean {near[0]}=VALUE?")
    if len(paths) > 1:
        raise ConfigError(f"give one recipe at a time, not {' and '.join(paths)}; settings look like key=value")
    return (Path(paths[0]) if paths else None), overrides


def _try(recipe: RecipeConfig) -> None:
    """Check all that can be checked without starting a process of the run, and show the plan."""
    from rich.console import Console

    from rayzero.cluster.processes.program_memory import coordinator_memory

    coordinator = coordinator_memory()  # before anything imports torch
    from rayzero.cluster.nodes.ray_address import find_ray
    from rayzero.recipes.training import plan_prepared, prepare_run

    console = Console()
    prepared = prepare_run(recipe, coordinator)
    ray = find_ray()
    announce(prepared, plan_prepared(prepared), console)
    where = "a Ray of its own on this host" if ray.joined is None else f"the Ray at {ray.joined}"
    _say(console, f"dry run    it would use {where} and write to {recipe.run.path}; nothing was started or written")


def _train(recipe: RecipeConfig) -> None:
    from rich.console import Console

    from rayzero.cluster.nodes.local_ray import begin_ray
    from rayzero.cluster.supervision import interruptible

    console = Console()
    try:
        with interruptible(), begin_ray() or nullcontext() as ray:
            with uncollected():
                from rayzero.cluster.processes.program_memory import coordinator_memory

                coordinator = coordinator_memory()  # before anything imports torch
                from rayzero.recipes.training import plan_prepared, prepare_run, run_prepared
            prepared = prepare_run(recipe, coordinator)
            planned = plan_prepared(prepared)
            announce(prepared, planned, console)
            training = run_prepared(prepared, console, None if planned is None else planned.hardware, ray)
    except (KeyboardInterrupt, SystemExit) as stop:
        print(f"rayzero: {stopped(recipe.run.path)}", file=sys.stderr)
        raise typer.Exit(_STOPPED if isinstance(stop, KeyboardInterrupt) else _TERMINATED) from None
    except RunFailedError as error:
        first, _, rest = str(error).partition("\n")
        details = f" (full text: {recipe.run.path / 'run.json'})" if rest else ""
        raise RunFailedError(f"{first}{details}{_goes_on(recipe.run.path)}\n{rest}") from error
    summarise(prepared, training, console)


def stopped(run_dir: Path) -> str:
    """The message after an interrupted run: how to continue it, if it has a checkpoint."""
    before = f" before its first checkpoint; {run_dir} holds nothing to resume from"
    return f"stopped{_goes_on(run_dir) or before}"


def _goes_on(run_dir: Path) -> str:
    """How to continue a run, as the end of a message; "" if it has no checkpoint."""
    from rayzero.cluster.files.run_dir import checkpoints_of

    if checkpoints_of(run_dir).catalog().newest() is None:
        return ""
    return f"; continue with: rayzero train --resume --run-dir {run_dir}"


def announce(prepared: PreparedRecipe, planned: RecipePlan | None, console: Console) -> None:
    """Print the training that is about to start: the model and its data, bytes by tier, and the least time."""
    recipe = prepared.recipe
    start = f" from step {prepared.resume_step}" if prepared.resume_step else ""
    first = (
        f"{recipe.model}, {prepared.num_params:,} parameters, on {prepared.corpus.about}: "
        f"{count(recipe.steps, 'step')}{start}, "
        f"{count(recipe.scaling.num_workers, 'rank')}, "
        f"{count(recipe.scaling.num_optimizers, 'optimizer actor')}, {recipe.zero.precision}"
    )
    rest = [] if planned is None else plan_lines(planned, max(0, recipe.steps - prepared.resume_step))
    _say(console, "\n".join([first, *rest]))


def plan_lines(planned: RecipePlan, steps: int) -> list[str]:
    """A plan in two lines: bytes by tier, and the least time of a step and of ``steps`` of them."""
    device, owners, (host, *_) = planned.bytes.device, planned.bytes.owners, planned.bytes.hosts
    where = "GPU" if planned.hardware.hosts.on_gpu else "CPU rank"
    bound = planned.bound
    return [
        f"memory     a {where} at most {format_bytes(device.peak)}; an optimizer actor at most "
        f"{format_bytes(max(owner.total for owner in owners))}; on one host all of it {format_bytes(host.total)} of "
        f"{format_bytes(planned.hardware.host_bytes)}",
        f"bound      a step takes at least {bound.seconds:.3g} s (bound by {bound.binds}): "
        f"{count(steps, 'step')} at least {timedelta(seconds=math.ceil(bound.seconds * steps))}",
    ]


def summarise(prepared: PreparedRecipe, training: Training, console: Console) -> None:
    """Print three lines about a training that is done: the result, where its files are, and what to type next."""
    result, last = training.result, training.last
    moved = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in sorted(result.transfers.items()))
    run = shlex.quote(str(result.path))
    kept = [("checkpoint", result.checkpoint), ("curve", training.picture), ("model", training.model)]
    files = ", ".join(f"{name} {path}" for name, path in [*kept, ("samples", training.samples)] if path is not None)
    loss = f"loss {last.loss:.3f}" if last.validation_loss is None else f"validation loss {last.validation_loss:.3f}"
    steps, tokens = training.trained
    whole = f" (in all {count(last.step, 'step')}, {count(last.tokens, 'token')})" if prepared.resume_step else ""
    lines = [
        f"trained    {count(steps, 'step')}, {count(tokens, 'token')}, {result.seconds:.0f} s{whole}; {loss} nats "
        f"per token, unigram baseline {training.unigram:.3f}; moved: {moved}",
        f"files      {result.path}: {files}",
        f"next       rayzero export {run} model.safetensors, or: rayzero train --resume --run-dir {run} --steps "
        f"{2 * prepared.recipe.steps}",
    ]
    if training.samples is not None:
        lines = [*training.samples.read_text(encoding="utf-8").splitlines()[1:], "", *lines]
    _say(console, "\n".join(map(plain, lines)))


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def init(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE.yaml] [key=value]...", help="The file to write, and settings in it."),
    ] = None,
) -> None:
    """Write a commented recipe for rayzero train: recipe.yaml, or the named file. Refuses to replace a file."""
    given = arguments or []
    paths, chosen = [one for one in given if "=" not in one], [one for one in given if "=" in one]
    if len(paths) > 1:
        raise ConfigError(f"give one file to write, not {' and '.join(paths)}; settings look like key=value")
    path = Path(paths[0] if paths else "recipe.yaml")
    text = recipe_text(chosen)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists already; name another file: rayzero init OTHER.yaml") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    then = f"rayzero train {shlex.quote(str(path))} --dry-run"
    typer.echo(f"{path}: every setting with its default; edit it, then: {then}")


def recipe_text(chosen: list[str]) -> str:
    """The recipe's text. ``chosen``: ``key=value`` texts, which are checked. Raises ConfigError."""
    from rayzero import __version__
    from rayzero.config import apply_overrides, commented_settings
    from rayzero.recipes.recipe import RecipeConfig, in_groups

    settings = apply_overrides({}, chosen)
    RecipeConfig.from_mapping(settings)
    head = [
        f"# A recipe of RayZero {__version__}: rayzero train RECIPE.yaml. Every setting is here, with its default.",
        "# To change one, remove the # before its name and edit the value. Longer texts: help(rayzero.ZeroConfig).",
        "",
    ]
    return "\n".join([*head, *commented_settings(RecipeConfig, in_groups(settings))]) + "\n"
