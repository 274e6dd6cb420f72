"""A recipe's plan, made before anything starts: what its run needs, and what bounds its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.activations.attach import match_modules
from rayzero.activations.group import OffloadPolicy
from rayzero.cluster.processes.program_memory import Imported
from rayzero.config import ScalingConfig
from rayzero.engine.prepare import COMPUTE_DTYPES, plan_units
from rayzero.engine.stats import ModelParameterStats
from rayzero.engine.units.partition import ROOT
from rayzero.kernels import adam_states, splits_masters
from rayzero.kernels.moments import moment_bytes
from rayzero.layout.model_layout import ModelLayout, Shard
from rayzero.memory.process_memory import ProcessMemory, process_memory
from rayzero.plan.bound import StepBound, StepTraffic, bound_step, step_traffic
from rayzero.plan.hardware import Hardware, Hosts, measure_here
from rayzero.plan.tiers import Programs, RunBytes, plan_bytes
from rayzero.plan.work import Offload, Work, measure_work
from rayzero.protocol.products import product_work, shard_work
from rayzero.recipes.lm import block_matrices, next_token_loss, optimizers
from rayzero.recipes.model import build_model
from rayzero.recipes.recipe import RecipeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeWork:
    """A recipe's model, and the cost of one micro-batch."""

    recipe: RecipeConfig
    parameters: ModelParameterStats
    layout: ModelLayout
    root: frozenset[int]  # units of the root module
    state_bytes: float  # of the optimizer's states, per element
    update_work: Sequence[int] | None  # operations of each shard's update; None: its bytes say it
    product_work: Sequence[int]  # operations of each shard that ranks multiply (matrix_updates="rank")
    work: Work
    programs: Programs

    @property
    def splits(self) -> bool:
        """Whether owners keep masters split, if their hosts have the kernels that this one has."""
        zero = self.recipe.zero_config
        return self.recipe.optimizer == "adamw" and splits_masters(zero.kernel, zero.moments)

    def bytes_of_shard(self, shard: Shard) -> int:
        """Of the states that torch classes keep of a shard: as if all were alike."""
        return round(self.state_bytes * shard.numel)

    def with_optimizers(self, number: int) -> RecipeWork:
        """The same, with so many optimizer actors."""
        scaling = self.recipe.scaling.replace(num_optimizers=number, max_optimizers=None)
        return replace(self, recipe=self.recipe.replace(scaling=scaling))

    @property
    def step_flops(self) -> int:
        """The model's operations in one step of one rank, forward and backward, attention included, as
        torch.utils.flop_counter counts them: matrix products, convolutions, and attention as a whole square, whose
        scores backward recomputes."""
        one = self.work.forward_flops + self.work.backward_flops + self.work.cpu_attention_flops
        return one * self.recipe.zero.gradient_accumulation_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipePlan:
    """The needs of a recipe's run on given machines."""

    of: RecipeWork
    hardware: Hardware
    bytes: RunBytes
    traffic: StepTraffic
    bound: StepBound

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "parameters": self.of.parameters.total_elements,
            "inventory": asdict(self.of.parameters),
            "units": len(self.of.layout.units),
            "bytes": self.bytes.to_json(),
            "bound": self.bound.to_json(),
            "tokens_per_second_at_most": self.of.recipe.tokens_per_step / self.bound.seconds,
        }


def recipe_work(recipe: RecipeConfig, vocab_size: int, imported: Imported, *, on_gpu: bool) -> RecipeWork:
    """Lay out the recipe's model and run one micro-batch of it without data. imported: see ``imported_memory``. on_gpu:
    ranks will compute on GPUs."""

    def build() -> nn.Module:
        return build_model(recipe, vocab_size)

    def loss(model: nn.Module) -> Tensor:
        tokens = torch.zeros(recipe.batch_size, recipe.seq_len, dtype=torch.long)
        return next_token_loss(model, tokens, tokens)

    with torch.device("meta"):
        model = build()
        parameters = ModelParameterStats.of(model)
        units = plan_units(model, recipe.zero_config, whole_parameters=recipe.optimizer == "muon")
        states = state_bytes(recipe, model)
        updates, products = update_work(recipe, model, units.layout)
    match_modules([model], recipe.zero_config.offload_activations, "offload_activations")
    offload, modules = None, recipe.zero_config.offload_activations
    if modules:
        offload = Offload(modules=modules, policy=OffloadPolicy.of(recipe.zero_config))
    work = measure_work(build, loss, units.layout, gathers=on_gpu, offload=offload)
    programs = programs_between(imported, process_memory())
    return RecipeWork(
        recipe=recipe,
        parameters=parameters,
        layout=units.layout,
        root=frozenset(units.units_of_module.get(ROOT, ())),
        state_bytes=states,
        update_work=updates,
        product_work=products,
        work=work,
        programs=programs,
    )


def programs_between(imported: Imported, used: ProcessMemory) -> Programs:
    """From measurements of one process: after it had ``imported`` what programs import, and after it had ``used`` that
    as a rank does, on a model without values."""
    compiler = imported.compiler.anonymous - imported.owner.anonymous
    return Programs(
        rank=used.anonymous - compiler,
        owner=imported.owner.anonymous,
        coordinator=imported.coordinator.anonymous,
        files=_files(used) - (_files(imported.compiler) - _files(imported.owner)),
    )


def _files(memory: ProcessMemory) -> int:
    return memory.rss - memory.anonymous - memory.shm


def recipe_hardware(work: RecipeWork, *, on_gpu: bool | None = None) -> Hardware:
    """This host's limits, for the recipe's dtype and working set. on_gpu: of GPUs; None: if this host has some."""
    traffic = _traffic(work)
    recipe = work.recipe
    return measure_here(COMPUTE_DTYPES[recipe.zero.precision], traffic.update // 2, Path(recipe.zero.slab_dir), on_gpu)


def plan_recipe(work: RecipeWork, hardware: Hardware) -> RecipePlan:
    """Plan the recipe's run on these machines: its bytes and its least step time."""
    recipe, traffic = work.recipe, _traffic(work)
    return RecipePlan(
        of=work,
        hardware=hardware,
        bytes=recipe_bytes(work, hardware.hosts),
        traffic=traffic,
        bound=bound_step(traffic, recipe.zero_config, recipe.scaling, hardware),
    )


def reserve(work: RecipeWork) -> ScalingConfig:
    """The recipe's scaling. Where it sets no memory for Ray: the least that each process needs, if all share a host."""
    scaling, run = work.recipe.scaling, bytes_on_one_host(work)
    (host,) = run.hosts
    rank, owner = work.programs.of_host(1, 0), work.programs.of_host(0, 1)
    return scaling.replace(
        memory_per_worker=scaling.memory_per_worker or rank + host.of_ranks // host.ranks,
        memory_per_optimizer=scaling.memory_per_optimizer or owner + max(plan.total for plan in run.owners),
    )


def bytes_on_one_host(work: RecipeWork) -> RunBytes:
    """The bytes if all processes are on one host, which is the least that each of them needs."""
    return recipe_bytes(work, Hosts(gpus_each=int(work.recipe.scaling.use_gpu)))


def recipe_bytes(work: RecipeWork, hosts: Hosts) -> RunBytes:
    """The bytes of the recipe's run on these hosts; no speeds are needed."""
    recipe, telemetry = work.recipe, work.recipe.run.telemetry
    return plan_bytes(
        work.layout,
        work.work,
        recipe.zero_config,
        recipe.scaling,
        hosts,
        state_bytes=work.state_bytes if recipe.optimizer == "adamw" else work.bytes_of_shard,
        splits=work.splits,
        update_work=work.update_work,
        products=[shard for shard, operations in enumerate(work.product_work) if operations],
        programs=work.programs,
        measures_norms=telemetry.enabled and telemetry.norms_every is not None,
    )


def state_bytes(recipe: RecipeConfig, model: nn.Module) -> float:
    """Bytes of the optimizer's states, per element: Muon keeps one moment of its matrices, in fp32."""
    adams = len(adam_states(amsgrad=False)) * moment_bytes(recipe.zero_config.moments)
    if recipe.optimizer == "adamw":
        return adams
    share = sum(map(Tensor.numel, block_matrices(model))) / sum(map(Tensor.numel, model.parameters()))
    return 4 * share + adams * (1 - share)


def update_work(recipe: RecipeConfig, model: nn.Module, layout: ModelLayout) -> tuple[list[int] | None, Sequence[int]]:
    """See ``shard_work``; where ranks multiply, None, and ``product_work``."""
    if recipe.optimizer == "adamw":
        return None, ()
    groups = [group for each in optimizers(recipe, model) for group in each.param_groups]
    group_of = {id(param): at for at, group in enumerate(groups) for param in group["params"]}
    of_name = {name: group_of.get(id(param), -1) for name, param in model.named_parameters()}
    by_slot = [[of_name[slot.name] for slot in unit.slots] for unit in layout.units]
    if recipe.zero.matrix_updates == "rank":
        return None, product_work(layout, groups, by_slot)
    return shard_work(layout, groups, by_slot), ()


def _traffic(work: RecipeWork) -> StepTraffic:
    recipe = work.recipe
    return step_traffic(
        work.layout,
        work.work,
        recipe.zero_config,
        recipe.scaling,
        state_bytes=work.state_bytes,
        splits=work.splits,
        update_work=work.update_work,
        product_work=work.product_work,
    )
