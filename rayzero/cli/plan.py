"""``rayzero plan``: what a run would need and how fast it could be at most, without starting it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayzero.errors import ConfigError
from rayzero.quantities import count, parse_bytes

if TYPE_CHECKING:
    from rayzero.plan.hardware import Hardware
    from rayzero.recipes.planning import RecipePlan, RecipeWork

_SPEEDS = {"flops": 1e12, "link": 1e9, "memory": 1e9}  # that a GPU machine must be described with; option's unit
_SIZES = {"device_bytes": "--gpu-memory", "host_bytes": "--host-memory", "shm_bytes": "--shm"}  # of Hardware -> option


def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE.yaml] [key=value]...", help="As for rayzero train."),
    ] = None,
    hosts: Annotated[int, typer.Option(min=1, help="Hosts, all alike.")] = 1,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs on each host; 0: ranks compute on CPUs.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of one GPU, such as 80GiB.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Memory of one host that the run may take.")] = None,
    shm: Annotated[str | None, typer.Option(help="What slab_dir holds on one host.")] = None,
    flops: Annotated[float | None, typer.Option(help="TFLOP/s at most: of one GPU, or of a host's CPUs.")] = None,
    link: Annotated[float | None, typer.Option(help="GB/s between host and one GPU, each way.")] = None,
    network: Annotated[float | None, typer.Option(help="GB/s between hosts, each way, of one host.")] = None,
    memory: Annotated[float | None, typer.Option(help="GB/s of host memory, read and written.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Bytes per tier and phase, and the least time of a step, on machines given by options.

    What is not given is measured on this host. Exit code 2 where the run cannot fit."""
    from rayzero.plan.tiers import check_budgets, check_fits
    from rayzero.recipes.planning import plan_recipe

    speeds = {"flops": flops, "link": link, "memory": memory, "network": network}
    sizes = dict(zip(_SIZES, (gpu_memory, host_memory, shm), strict=True))
    _require_speeds(speeds)
    large = {name: _size(name, text) for name, text in sizes.items() if text is not None}
    _require_described(hosts, gpus, speeds, gpu_memory)
    work = _work(arguments or [], gpus)
    hardware = _hardware(work, hosts, gpus, speeds, large)
    planned = plan_recipe(work, hardware)
    typer.echo(json.dumps(planned.to_json()) if as_json else format_plan(planned))
    check_budgets(planned.bytes, work.recipe.zero)
    check_fits(planned.bytes, hardware)


def _work(arguments: list[str], gpus: int | None) -> RecipeWork:
    from rayzero.cluster.processes.program_memory import coordinator_memory, imported_memory

    coordinator = coordinator_memory()
    import torch

    from rayzero.cli.train import choose_recipe
    from rayzero.recipes.planning import recipe_work
    from rayzero.recipes.text import make_tokenizer

    imported = imported_memory(coordinator)
    recipe = choose_recipe(arguments, {}, None)
    on_gpu = torch.cuda.is_available() if gpus is None else gpus > 0
    return recipe_work(recipe, make_tokenizer(recipe.tokenizer).vocab_size, imported, on_gpu=on_gpu)


def _require_speeds(speeds: dict[str, float | None]) -> None:
    """Raise ConfigError for a speed that no machine has; seconds are divided by it."""
    for name, speed in speeds.items():
        if speed is not None and not (math.isfinite(speed) and speed > 0):
            raise ConfigError(f"--{name} is {speed:g} but must be a number above 0")


def _size(name: str, text: str) -> int:
    try:
        return int(str(parse_bytes(text)))
    except ValueError as error:
        raise ConfigError(f"{_SIZES[name]} is {text!r} but {error}") from error


def _require_described(hosts: int, gpus: int | None, speeds: dict[str, float | None], gpu_memory: str | None) -> None:
    """Raise ConfigError where machines are asked for that this host cannot be measured for."""
    import torch

    missing = [f"--{name}" for name in _SPEEDS if speeds[name] is None] + ([] if gpu_memory else ["--gpu-memory"])
    if gpus and missing and not torch.cuda.is_available():
        raise ConfigError(
            f"--gpus is {gpus} and this host has none to measure: give {', '.join(missing)} as makers state them"
        )
    if hosts > 1 and speeds["network"] is None:
        raise ConfigError(f"--hosts is {hosts}: give --network, the GB/s that one host sends and receives")


def _hardware(
    work: RecipeWork, hosts: int, gpus: int | None, speeds: dict[str, float | None], large: dict[str, int]
) -> Hardware:
    from rayzero.plan.hardware import Hosts
    from rayzero.recipes.planning import recipe_hardware

    here = recipe_hardware(work)
    fast = {name: value * _SPEEDS.get(name, 1e9) for name, value in speeds.items() if value is not None}
    described: dict[str, Any] = {**fast, **large}
    return replace(
        here, hosts=Hosts(count=hosts, gpus_each=here.hosts.gpus_each if gpus is None else gpus), **described
    )


def format_plan(planned: RecipePlan) -> str:
    """For people: the model, bytes by tier and phase, seconds by stage."""
    from rayzero.quantities import format_bytes

    recipe, device, bound = planned.of.recipe, planned.bytes.device, planned.bound
    where = "GPU" if planned.hardware.hosts.on_gpu else "CPU rank"
    lines = [
        f"{recipe.model}, {planned.of.num_params:,} parameters in {count(len(planned.of.layout.units), 'unit')}, "
        f"{count(recipe.scaling.num_workers, 'rank')}, {count(recipe.scaling.num_optimizers, 'optimizer actor')}, "
        f"{recipe.zero.precision}",
        "",
        f"bytes of each {where}      at rest {format_bytes(device.resting)}, forward "
        f"{format_bytes(device.resting + device.sums + device.forward)}, backward "
        f"{format_bytes(device.resting + device.sums + device.backward)}",
        f"  at most {device.describe()}",
    ]
    lines += [f"optimizer {owner.owner}: {owner.describe()}" for owner in planned.bytes.owners]
    lines += [f"host {host.host}: {host.describe()}" for host in planned.bytes.hosts]
    hosts = planned.hardware.hosts
    if idle := hosts.count - len(planned.bytes.hosts):
        lines.append(f"{count(idle, 'more host', 'more hosts')}: no rank and no optimizer actor is there")
    gpus, ranks = hosts.count * hosts.gpus_each, recipe.scaling.num_workers
    if hosts.on_gpu and gpus > ranks:
        lines.append(f"{gpus - ranks:,} of {count(gpus, 'GPU')} idle: scaling.num_workers is {ranks}, one rank a GPU")
    traffic = planned.traffic
    lines += [
        "",
        f"a step of one rank: {traffic.flops / 1e12:.4g} TFLOP, fetches {format_bytes(traffic.fetch)}, pushes "
        f"{format_bytes(traffic.push)}; all owners walk {format_bytes(traffic.update)}",
        "seconds at least: " + ", ".join(f"{name} {value:.4g}" for name, value in bound.stages.items()),
        f"a step takes at least {bound.seconds:.4g} s (bound by {bound.binds}): at most "
        f"{recipe.tokens_per_step / bound.seconds:,.0f} tokens/s",
    ]
    return "\n".join(lines)
