"""``rayzero plan``: computes how much memory a run needs and how fast it can be at most, without starting it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayzero.errors import ConfigError
from rayzero.files import to_json
from rayzero.quantities import count, parse_bytes

if TYPE_CHECKING:
    from rayzero.memory.process_memory import ProcessMemory
    from rayzero.plan.hardware import Hardware
    from rayzero.recipes.planning import RecipePlan, RecipeWork
    from rayzero.recipes.recipe import RecipeConfig

_SPEEDS = {"flops": 1e12, "link": 1e9, "memory": 1e9}  # the options that describe a GPU machine, with their units
_UNITS = _SPEEDS | {"host_flops": 1e12}  # others: 1e9
_SIZES = {"device_bytes": "--gpu-memory", "host_bytes": "--host-memory", "shm_bytes": "--shm"}  # Hardware's -> option


def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE.yaml] [key=value]...", help="The same as for rayzero train."),
    ] = None,
    hosts: Annotated[int, typer.Option(min=1, help="Hosts, all of the same kind.")] = 1,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs on each host; 0: ranks compute on CPUs.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of one GPU, such as 80GiB.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Memory of one host that the run may take.")] = None,
    shm: Annotated[str | None, typer.Option(help="Size of slab_dir on one host.")] = None,
    flops: Annotated[float | None, typer.Option(help="Peak TFLOP/s of one GPU, or of one host's CPUs.")] = None,
    link: Annotated[float | None, typer.Option(help="GB/s between a host and one GPU, each way.")] = None,
    network: Annotated[float | None, typer.Option(help="GB/s that one host sends and receives, each way.")] = None,
    memory: Annotated[float | None, typer.Option(help="GB/s of one host's memory, reads plus writes.")] = None,
    host_flops: Annotated[
        float | None, typer.Option(help="Peak TFLOP/s of one host's CPUs in bf16, which Muon's updates need.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show a run's bytes by tier and phase, and the least time of a step, on the machines that the options describe.

    Options that are left out are measured on this host. The exit code is 2 if the run cannot fit."""
    planned = make_plan(
        arguments,
        hosts=hosts,
        gpus=gpus,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        shm=shm,
        flops=flops,
        link=link,
        network=network,
        memory=memory,
        host_flops=host_flops,
    )
    typer.echo(to_json(planned.to_json()) if as_json else format_plan(planned))
    check_plan(planned)


def make_plan(
    arguments: Sequence[str] | None,
    *,
    hosts: int,
    gpus: int | None,
    gpu_memory: str | None,
    host_memory: str | None,
    shm: str | None,
    **speeds: float | None,
) -> RecipePlan:
    """The plan that the command's options ask for; ``speeds``: flops, link, network, memory, host_flops. Raises
    ConfigError for options that describe no machine."""
    from rayzero.cluster.processes.program_memory import coordinator_memory

    coordinator = coordinator_memory()  # before anything imports torch
    from rayzero.recipes.planning import plan_recipe

    for name, speed in speeds.items():  # bytes are divided by it
        if speed is not None and not (math.isfinite(speed) and speed > 0):
            raise ConfigError(f"--{name.replace('_', '-')} is {speed:g} but must be a number above 0")
    sizes = dict(zip(_SIZES, (gpu_memory, host_memory, shm), strict=True))
    large = {name: _size(name, text) for name, text in sizes.items() if text is not None}
    _require_described(hosts, gpus, speeds, gpu_memory)
    work = _work(list(arguments or ()), gpus, coordinator)
    return plan_recipe(work, _hardware(work, hosts, gpus, speeds, large))


def check_plan(planned: RecipePlan) -> None:
    """Raise MemoryPlanError or ConfigError if the planned run cannot fit."""
    from rayzero.plan.tiers import check_budgets, check_fits, check_window

    work, zero = planned.of, planned.of.recipe.zero
    check_window(work.layout, work.root, zero)
    check_budgets(planned.bytes, zero)
    check_fits(planned.bytes, planned.hardware)


def _work(arguments: list[str], gpus: int | None, coordinator: ProcessMemory) -> RecipeWork:
    import torch

    from rayzero.cli.train import choose_recipe
    from rayzero.cluster.processes.program_memory import imported_memory
    from rayzero.recipes.data.text import make_tokenizer
    from rayzero.recipes.planning import recipe_work

    imported = imported_memory(coordinator)
    recipe = choose_recipe(arguments, {}, None)
    on_gpu = torch.cuda.is_available() if gpus is None else gpus > 0
    return recipe_work(recipe, make_tokenizer(recipe.tokenizer).vocab_size, imported, on_gpu=on_gpu)


def _size(name: str, text: str) -> int:
    try:
        return int(str(parse_bytes(text)))
    except ValueError as error:
        raise ConfigError(f"{_SIZES[name]} is {text!r} but {error}") from error


def _require_described(hosts: int, gpus: int | None, speeds: dict[str, float | None], gpu_memory: str | None) -> None:
    """Raise ConfigError if the options leave out what this host cannot measure: GPUs, or a network."""
    import torch

    missing = [f"--{name}" for name in _SPEEDS if speeds[name] is None] + ([] if gpu_memory else ["--gpu-memory"])
    if gpus and missing and not torch.cuda.is_available():
        raise ConfigError(
            f"--gpus is {gpus} but this host has no GPU to measure; give {', '.join(missing)} as its maker states them"
        )
    if hosts > 1 and speeds["network"] is None:
        raise ConfigError(f"--hosts is {hosts}, so give --network: the GB/s that one host sends and receives")


def _hardware(
    work: RecipeWork, hosts: int, gpus: int | None, speeds: dict[str, float | None], large: dict[str, int]
) -> Hardware:
    from rayzero.plan.hardware import Hosts
    from rayzero.recipes.planning import recipe_hardware

    here = recipe_hardware(work)
    fast = {name: value * _UNITS.get(name, 1e9) for name, value in speeds.items() if value is not None}
    described: dict[str, Any] = {**fast, **large}
    return replace(
        here, hosts=Hosts(count=hosts, gpus_each=here.hosts.gpus_each if gpus is None else gpus), **described
    )


def format_plan(planned: RecipePlan) -> str:
    """Describe a plan for people: the model, bytes by tier and phase, seconds by stage."""
    from rayzero.quantities import format_bytes

    recipe, device, bound = planned.of.recipe, planned.bytes.device, planned.bound
    tensors = planned.of.parameters
    where = "GPU" if planned.hardware.hosts.on_gpu else "CPU rank"
    lines = [
        f"{recipe.model}, {tensors.total_elements:,} parameters in {count(len(planned.of.layout.units), 'unit')}, "
        f"{count(recipe.scaling.num_workers, 'rank')}, {count(recipe.scaling.num_optimizers, 'optimizer actor')}, "
        f"{recipe.zero.precision}",
        f"  {count(tensors.total_parameters, 'tensor')} of {tensors.min_parameter_size:,} to "
        f"{tensors.max_parameter_size:,} elements, median {tensors.median_parameter_size:,.0f}",
        "",
        f"bytes of each {where}      at rest {format_bytes(device.resting)}, forward "
        f"{format_bytes(device.resting + device.sums + device.forward)}, backward "
        f"{format_bytes(device.resting + device.sums + device.backward)}",
        f"  at most {device.describe()}",
    ]
    lines += [
        f"optimizer {owner.owner}: {owner.describe()}; for followers on other hosts up to "
        f"{format_bytes(owner.followers)}"
        for owner in planned.bytes.owners
    ]
    owners, doors = len(planned.bytes.owners), planned.bytes.doors
    lines += [f"optimizer {owners + i}: no shards, for the ranks of host {host}" for i, host in enumerate(doors)]
    lines += [f"host {host.host}: {host.describe()}" for host in planned.bytes.hosts]
    hosts = planned.hardware.hosts
    if idle := hosts.count - len(planned.bytes.hosts):
        lines.append(f"{count(idle, 'more host', 'more hosts')}: without a rank or an optimizer actor")
    gpus, ranks = hosts.count * hosts.gpus_each, recipe.scaling.num_workers
    if hosts.on_gpu and gpus > ranks:
        lines.append(f"{gpus - ranks:,} of {count(gpus, 'GPU')} idle: scaling.num_workers is {ranks}, one rank a GPU")
    traffic = planned.traffic
    lines += [
        "",
        f"a step of one rank: {traffic.flops / 1e12:.4g} TFLOP, fetches {format_bytes(traffic.fetch)}, pushes "
        f"{format_bytes(traffic.push)}; all owners together read and write {format_bytes(traffic.update)}",
        *_describe_products(planned),
        "seconds at least: " + ", ".join(f"{name} {value:.4g}" for name, value in bound.stages.items()),
        f"a step takes at least {bound.seconds:.4g} s (bound by {bound.binds}): at most "
        f"{recipe.tokens_per_step / bound.seconds:,.0f} tokens/s",
    ]
    lines += ["", _describe_files(recipe, hosts.count, len(doors))]
    return "\n".join(lines)


def _describe_products(planned: RecipePlan) -> list[str]:
    """What Muon's updates cost, for people."""
    from rayzero.plan.bound import products_by_host, seconds_on_ranks

    products, speed, zero = planned.traffic.products, planned.hardware.host_flops, planned.of.recipe.zero_config
    if planned.traffic.multiplied:
        seconds = seconds_on_ranks(planned.traffic, zero, planned.of.recipe.scaling, planned.hardware)
        most = planned.traffic.multiplied / 1e12
        return [f"Muon's products: at most {most:.4g} TFLOP a rank, at least {seconds:.4g} s of its device"]
    if not products:
        return []
    by_host = products_by_host(planned.traffic, zero, planned.of.recipe.scaling, planned.hardware.hosts)
    said = f"Muon's updates: {min(products) / 1e12:.4g} to {max(products) / 1e12:.4g} TFLOP an optimizer actor"
    busiest = max(by_host.values()) / speed
    said += f", at least {busiest:.4g} s of the CPUs of the host with most"
    if planned.bound.binds == "update":
        ranks = "let the ranks' GPUs multiply (zero.matrix_updates=rank), " if planned.hardware.hosts.on_gpu else ""
        said += f"; these CPUs bound the step: {ranks}spread the optimizer actors over more hosts, or train with AdamW"
    return [said]


def _describe_files(recipe: RecipeConfig, hosts: int, doors: int) -> str:
    """How many files the run's processes may have open, for people. ``doors``: optimizer actors without shards."""
    from rayzero.cluster.nodes.resources import files_of_owner, files_of_rank
    from rayzero.protocol.ownership import device_owners

    ranks, alone = recipe.scaling.num_workers, recipe.scaling.num_optimizers + doors
    beside = device_owners(ranks, recipe.zero.host_fraction)
    neighbours = -(-(ranks + alone) // hosts) - 1
    of_owner = files_of_owner(ranks, alone + beside, neighbours, doors, -(-ranks // hosts))
    of_rank = files_of_rank(alone + beside, neighbours, doors) + (of_owner if beside else 0)
    return f"files and connections open at most (ulimit -n): {of_rank:,} of a rank, {of_owner:,} of an optimizer actor"
