"""``rayzero.prepare``: hands a model's parameters to the owners and connects the training loop to an engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn

from rayzero.activations.attach import match_modules
from rayzero.activations.group import OffloadPolicy
from rayzero.activations.offload import ActivationOffload
from rayzero.concurrency.threads import with_index
from rayzero.config import ZeroConfig
from rayzero.convert.weights import Weights, WeightSource
from rayzero.engine.autograd.hooks import CallingHook, CastInputs, CopyEntries, UnitCalls, hook_units
from rayzero.engine.autograd.touch import ShardedParameter, guard_classes, require_keepable, route_zero_grad
from rayzero.engine.checkpoint import (
    check_resume,
    chosen_resume,
    of_model,
    restore_rank,
    resumed_groups,
    still_there,
)
from rayzero.engine.context import RankContext, get_context
from rayzero.engine.engine import Engine
from rayzero.engine.loop.comeback import comeback_of, keep_began
from rayzero.engine.optimizer.param_groups import hyper_of, maker_of
from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
from rayzero.engine.private_torch import has_memory, self_test
from rayzero.engine.rank_products import RankProducts
from rayzero.engine.rank_step import RankStep
from rayzero.engine.start.buffers import refuse_buffers
from rayzero.engine.start.initial_values import InitialValues, refuse_apart, refuse_codes
from rayzero.engine.start.plan_notes import tell_plan
from rayzero.engine.start.unit_init import Init, materialise
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.engine.units.partition import UnitPlan, UnitRule, build_layout
from rayzero.engine.units.residency import Residency, mapped_units, stays_up
from rayzero.engine.units.transfers import has_all_cores, make_transfers
from rayzero.engine.values import BeforeStateDictLoad
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.kernels import ADAMS, check_moments
from rayzero.kernels.newton_schulz import require_divided
from rayzero.kernels.optimizer_class import OptimizerMaker, Optimizers, parts_of, path_of
from rayzero.kernels.optimizer_trial import refuse_vectors, require_owned
from rayzero.layout.model_layout import UnitLayout
from rayzero.memory.process_memory import give_back_freed, keep_some_buffers
from rayzero.protocol.messages import Hyper, ModelSpec
from rayzero.protocol.ownership import device_owners
from rayzero.protocol.store import ParameterStore
from rayzero.telemetry.recorder import LaterModelRecorder, Recorder
from rayzero.tensor_metadata import plain

log = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
_NO_GROUP = -1  # the group of a slot that no parameter group has; it is never updated

_engines: WeakKeyDictionary[nn.Module, ReferenceType[Engine]] = WeakKeyDictionary()
"""The model's own hooks hold the engine. A strong value here would refer to its key and keep both alive for ever."""


def prepare(
    model: M,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    config: ZeroConfig | None = None,
    *,
    units: UnitRule | None = None,
    weights: WeightSource | None = None,
    init: Init | None = None,
    resume: Path | str | bool | None = None,
) -> tuple[M, ZeroOptimizer]:
    """Hand the model's parameters and the optimizer's state to the owners. Returns the same model, with hooks, and the
    optimizer to use from here on.

    model: the same on every rank; rank 0's values are used. Its Parameters stay the same objects, but their bytes come
        and go. They may be on the meta device (``rayzero.empty_parameters``): on rank 0 only if ``weights``, ``init``
        or a checkpoint to resume from gives them values, on the other ranks always.
    optimizer: a torch optimizer over parameters of ``model`` that has not stepped yet, or a list of such, each over
        other parameters. Of a list, too, one optimizer is returned, which has all groups: one norm, one step.
    config: by default the run's, or ``ZeroConfig()`` without a run.
    units: what is gathered together; overrides ``config.units``. A list of class names, or a function (name, module).
    weights: a safetensors file, a Hugging Face directory or its index, a checkpoint of RayZero, torch DCP or DeepSpeed
        (docs/checkpoints.md), a mapping of named tensors, an iterable of (name, tensor), or ``rayzero.Weights`` of one
        of these. Rank 0 reads them unit by unit, so that no process holds the model; the other ranks read buffers. They
        must contain every parameter and persistent buffer.
    init: called with every module, on the CPU, in the order of ``model.apply(init)`` and so with the same random
        numbers; only the parameters of one unit need to exist at a time. Every rank that gets one runs it, so that
        their random generators agree afterwards.
    resume: the checkpoint to continue from, a path or URL; True: the newest one in the run's directory, or a fresh
        start if there is none; by default the trainer's setting. Every rank passes the same. Restores weights, moments,
        step counts, the options of every parameter group, buffers and random number generators. Afterwards
        ``get_context().step`` is the step to go on with, ``rayzero.track`` loads the states of schedulers and other
        objects of the loop, and ``get_context().loop_state`` has what this rank gave to ``save_checkpoint``.

    Inside a trainer the run's owners are used; in a plain script, an in-process store with one owner. Prepare several
    models of a run one after the other, in the same order on every rank. Another order is refused, except for models
    with the same names, shapes and dtypes and equal optimizers: these cannot be told apart, and would train each
    other's values. A run that resumes needs neither weights nor init, and ignores both. Raises UnsupportedError,
    ConfigError or CheckpointError, naming the parameter or setting, before anything is changed (for an iterable of
    tensors: when it yields a wrong one).
    """
    _check_arguments(model, optimizer, config)
    names = {id(param): name for name, param in model.named_parameters()}
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = Optimizers.of(optimizer, names)
    kind = optimizer.kind if isinstance(optimizer, Optimizers) else type(optimizer)
    self_test()
    route_zero_grad()
    context = get_context()
    _refuse_torn(context)
    config = config or context.config or ZeroConfig()
    check_moments(config.moments, kind, optimizer.param_groups)
    _check_fraction(config, context)
    _refuse_prepared(model, optimizer)
    refuse_buffers(model)
    hyper = hyper_of(optimizer, kind)
    make = maker_of(optimizer, hyper)
    verdicts = [] if make.cls in ADAMS else [require_owned(make, options) for options in hyper]
    if config.matrix_updates == "rank":
        require_divided(make, hyper)
    number = context.prepared if context.connect is not None else 0  # without a run, each model has owners of its own
    chosen = chosen_resume(context, resume)
    began = None if chosen is None else of_model(chosen, number)
    recorder = LaterModelRecorder(context.recorder) if number else context.recorder
    whole = any(verdict.whole for verdict in verdicts)
    plan = plan_units(model, config, units, whole_parameters=whole)
    if any(verdict.matrices for verdict in verdicts):
        refuse_vectors(make, optimizer.param_groups, verdicts, names)
    stays_up(plan.layout, config)
    match_modules([model], config.offload_activations, "offload_activations")
    if context.rank == 0:
        tell_plan(plan.layout, config, dict(model.named_parameters()))
    start = None if context.life else _start(model, plan, context, began, weights, init)
    params = {name: p for name, p in model.named_parameters()}
    spec = _spec(plan, params, optimizer, make, hyper, config, context, number, began)
    groups = None if context.life else resumed_groups(context.rank, began, model)
    if groups is not None:
        groups.require_classes(optimizer.param_groups)
    device = _device(model, context)
    refuse_apart(plan, params, device)
    refuse_codes(plan, params)
    if context.handing_over is not None and not number:
        context.handing_over(_host_bytes(model))
    store = context.connect(number) if context.connect is not None else _alone(config, context, device)
    try:
        page_lock = with_index(device) if device.type == "cuda" and config.pin_cpu_memory else None
        attached = store.attach(spec, page_lock=page_lock, all_cores=has_all_cores(device))
    except BaseException as exc:
        store.close(f"prepare failed: {exc}")
        raise
    with _whole_or_torn(store, context):
        comeback, version = None, attached.version
        if context.life:
            comeback = comeback_of(store, attached, began, rank=context.rank, number=number, repeats=context.repeats)
            if comeback.state is None:
                check_resume(comeback.began, model)  # it needs all of it again
            began = comeback.began
            version, context.decided = comeback.step, comeback.decided
            store.repeat(comeback.decided)
        checkpoint = still_there(context, began)
        if start is None:
            start = _start(model, plan, context, checkpoint, weights, init)
            groups = resumed_groups(context.rank, checkpoint, model)
        if context.connect is not None and not number:
            keep_began(store, attached, began)
        start.bring(store.load if attached.needs_load and context.rank == 0 else None)
        engine = _engine(model, params, store, plan, spec, config, context, device, version, number, recorder)
        if config.matrix_updates == "rank":
            engine.products = RankProducts(store, spec, context.rank, device, recorder)
        engine.activations = _offload_activations(model, engine, config, context, recorder)
        _hook(model, plan, engine, config)
        _engines[model] = ref(engine)
        tracked, source = restore_rank(context, checkpoint, model, device), str(checkpoint)
        if comeback is not None and comeback.state is not None:
            comeback.restore(store, model, device, engine.cache.writes)
            tracked, source = comeback.state["tracked"], f"what was kept at step {comeback.step}"
            groups = comeback.groups(optimizer, model)
        _move_buffers(model, device)
    context.on_close(engine.close)
    context.prepared += 1
    give_back_freed()  # the model's own memory, which is no longer needed
    if not store.in_process:
        keep_some_buffers(alone=spec.world_size == 1)  # this process is a rank's alone
    writes_groups = any(verdict.writes for verdict in verdicts)
    returned = ZeroOptimizer(optimizer, engine, make, writes_groups=writes_groups, resumed=groups)
    context.begin(returned, tracked, source, comeback, began)
    return model, returned


def engine_of(model: nn.Module) -> Engine:
    """The engine of a prepared model. Raises UnsupportedError for any other model."""
    engine = _engines[model]() if model in _engines else None
    if engine is None:
        raise UnsupportedError(
            f"this {type(model).__name__} was not prepared; call rayzero.prepare() on it, and pass that same object"
        )
    return engine


def is_prepared(model: nn.Module) -> bool:
    """Whether ``prepare`` was called on this very object."""
    return model in _engines


def _start(
    model: nn.Module,
    plan: UnitPlan,
    context: RankContext,
    checkpoint: Path | None,
    weights: WeightSource | None,
    init: Init | None,
) -> InitialValues:
    """The sources of the model's first values, checked. Raises what ``InitialValues`` and ``check_resume`` raise."""
    check_resume(checkpoint, model)
    return InitialValues(model, plan, context.rank, checkpoint, _as_weights(weights), init, held=context.life > 0)


# ---- checks and plans -------------------------------------------------------------------------------------------


def _check_arguments(model: object, optimizer: object, config: object) -> None:
    several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    kinds: list[tuple[str, object, Any, str]] = [
        ("model", model, nn.Module, "torch.nn.Module"),
        *(("optimizer", one, torch.optim.Optimizer, "torch.optim.Optimizer") for one in several),
        ("config", config, ZeroConfig | None, "ZeroConfig"),
    ]
    for name, value, kind, whole in kinds:
        if not isinstance(value, kind):
            raise ConfigError(f"rayzero.prepare: {name} must be a {whole}, got {type(value).__name__}")


def _refuse_torn(context: RankContext) -> None:
    if context.torn is not None:
        raise UnsupportedError(
            f"an earlier rayzero.prepare() of this run failed after the owners had begun to take its model "
            f"({context.torn}), and they cannot give it back; end this run and start another"
        )


@contextmanager
def _whole_or_torn(store: ParameterStore, context: RankContext) -> Iterator[None]:
    """Record a prepare() that failed midway. Owners take a model's values only once, so a second prepare() would
    silently train the first one's."""
    try:
        yield
    except BaseException as exc:
        store.close(f"prepare failed: {exc}")
        if context.connect is not None:  # without a run, each model has owners of its own
            context.torn = f"{type(exc).__name__}: {exc}".partition("\n")[0]
        raise


def _check_fraction(config: ZeroConfig, context: RankContext) -> None:
    """Raise ConfigError if the fraction differs from the run's: owners beside ranks are started with the run."""
    ours, started = config.host_fraction, (context.config or ZeroConfig()).host_fraction
    if context.connect is not None and device_owners(1, ours) != device_owners(1, started):
        raise ConfigError(
            f"offload_fraction={ours:g} was given to rayzero.prepare(), but the run was started with {started:g}; "
            f"set it in the run's config (ZeroTrainer: zero_config, run_ranks: config)"
        )


def _refuse_prepared(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    given = parts_of(optimizer)
    if any(isinstance(part, ZeroOptimizer) for part in given) or any(module in _engines for module in model.modules()):
        raise UnsupportedError("the model is prepared already; call rayzero.prepare() once, on the whole model")
    for name, param in model.named_parameters():
        if isinstance(param, ShardedParameter):
            raise UnsupportedError(f"parameter {name!r} belongs to another prepared model; give this one its own")
        if type(param) is not nn.Parameter and has_memory(param):  # else the layout refuses it
            require_keepable(name, param)
    _refuse_made_anew(model)
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise UnsupportedError(
            "a torch.jit.ScriptModule cannot be prepared, because it reads parameters without going through Python; "
            "pass the model that it was compiled from"
        )
    for kind in (kind for module in model.modules() for kind in type(module).__mro__):
        if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
            raise UnsupportedError(
                f"the model has a {kind.__name__} in it, which would keep its gradients from the owners, who average "
                "them over the ranks; give rayzero.prepare() the model that it wraps"
            )
    if any(_has_stepped(state) for part in given for state in part.state.values()):
        raise UnsupportedError(
            "the optimizer has stepped already, and prepare() would lose its state; pass a new optimizer, and load "
            "this one's state_dict() into the optimizer that prepare() returns"
        )


def _refuse_made_anew(model: nn.Module) -> None:
    """Raise UnsupportedError for a module that has another Parameter each time the model's Parameters are listed."""
    first, again = dict(model.named_parameters()), dict(model.named_parameters())
    for name, param in first.items():
        if again.get(name) is not param:
            holder = name.rpartition(".")[0]
            kind = type(model.get_submodule(holder))
            raise UnsupportedError(
                f"module {holder!r}, a {kind.__module__}.{kind.__qualname__}, makes another Parameter {name!r} each "
                "time its Parameters are listed, so there is none that the owners could train (PEFT's LoRA on "
                "nn.MultiheadAttention does that); leave the module out, in PEFT by target_modules or exclude_modules"
            )


def _as_weights(given: WeightSource | None) -> Weights | None:
    return given if given is None or isinstance(given, Weights) else Weights(given)


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's state comes from a step; Adagrad, for example, creates its state before the first one."""
    return bool(state) and float(state.get("step", 1)) > 0


def plan_units(
    model: nn.Module, config: ZeroConfig, units: UnitRule | None = None, *, whole_parameters: bool = False
) -> UnitPlan:
    """The unit plan of a model under a config. ``units``: overrides the config's. ``whole_parameters``: see
    ``build_layout``."""
    return build_layout(
        model,
        units=config.units if units is None else units,
        min_unit_bytes=config.min_unit_bytes,
        shard_bytes=config.shard_bytes,
        compute_dtype=COMPUTE_DTYPES[config.precision],
        keep_fp32=config.keep_fp32,
        frozen_codec=config.cpu_compression.value,
        whole_parameters=whole_parameters,
    )


def _spec(
    plan: UnitPlan,
    params: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    make: OptimizerMaker,
    hyper: tuple[Hyper, ...],
    config: ZeroConfig,
    context: RankContext,
    number: int,
    resume: Path | None,
) -> ModelSpec:
    on_device = not config.offload_grads  # summed before they are pushed
    return ModelSpec(
        run=f"{context.run} model {number}" if number else context.run,  # shared memory is named after it too
        layout=plan.layout,
        world_size=context.world_size,
        optimizer=path_of(make.cls),
        attributes=make.attributes,
        hyper=hyper,
        group_of=_groups(plan, params, optimizer),
        accumulation_steps=1 if on_device else config.gradient_accumulation_steps,
        nonfinite=config.nonfinite,
        shard_map=config.shard_map,
        kernel=config.kernel,
        moments=config.moments,
        checkpoint_moments=config.checkpoint_moments,
        checkpoint_copies=config.checkpoint_copies,
        matrix_updates=config.matrix_updates,
        offload_fraction=config.host_fraction,
        restore_from=None if resume is None else str(resume),
        lineage=context.lineage,
    )


def _groups(
    plan: UnitPlan, params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[tuple[int, ...], ...]:
    group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    ours = {id(p) for p in params.values()}
    for i, group in enumerate(optimizer.param_groups):
        for position, p in enumerate(group["params"]):
            if id(p) not in ours:
                raise UnsupportedError(
                    f"parameter {position} of the optimizer's group {i} (shape {tuple(p.shape)}) is not in the model"
                )
    return tuple(
        tuple(group_of.get(id(params[slot.name]), _NO_GROUP) if unit.trainable else _NO_GROUP for slot in unit.slots)
        for unit in plan.layout.units
    )


def _device(model: nn.Module, context: RankContext) -> torch.device:
    """The trainer's device; in a plain script, the model's device, or the CPU if the model is on meta."""
    devices = {p.device for p in model.parameters() if not p.is_meta}
    if context.connect is not None or not devices:
        return context.device
    if len(devices) > 1:
        raise UnsupportedError(f"the model's parameters are on several devices ({', '.join(map(str, devices))})")
    return devices.pop()


def _host_bytes(model: nn.Module) -> int:
    """Bytes of the model's parameters in host memory."""
    memory = [param.untyped_storage() for param in model.parameters() if param.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in memory}.values())


# ---- store, engine, units ---------------------------------------------------------------------------------------


def _alone(config: ZeroConfig, context: RankContext, device: torch.device) -> ParameterStore:
    """A store with one owner in this process, and with another on ``device`` if the config asks for it; closed with the
    context."""
    from rayzero.store.inprocess import LocalConnection, LocalOwners
    from rayzero.store.rank.rank_store import RankStore

    if config.transport not in ("auto", "inproc"):
        raise UnsupportedError(
            f"transport={config.transport!r} needs the owners of a trainer, but this script has one owner in its own "
            f"process; use transport='auto'"
        )
    owners = LocalOwners(
        1,
        threads=torch.get_num_threads(),
        memory_budget=config.cpu_memory_budget,
        recorder=context.recorder,
        devices=[device] * device_owners(1, config.host_fraction),
    )
    context.on_close(lambda _: owners.close())
    return RankStore(LocalConnection(0, owners, stall_timeout=config.stall_timeout, recorder=context.recorder))


def _engine(
    model: nn.Module,
    params: Mapping[str, nn.Parameter],
    store: ParameterStore,
    plan: UnitPlan,
    spec: ModelSpec,
    config: ZeroConfig,
    context: RankContext,
    device: torch.device,
    version: int,
    number: int,
    recorder: Recorder,
) -> Engine:
    units, poison = plan.layout.units, os.environ.get("RAYZERO_DEBUG") == "1"
    transfers = make_transfers(store, device, units, pinned=config.pin_cpu_memory)
    step = RankStep(
        transfers,
        recorder,
        rank=context.rank,
        world_size=context.world_size,
        num_units=len(units),
        step=version,
        life=context.life,
    )
    return Engine(
        model,
        plan,
        _make_units(plan, params, device),
        spec.group_of,
        step=step,
        residency=Residency(
            units,
            budget=config.gpu_param_memory_budget,
            device=device,
            poison=poison,
            mapped={} if poison or device.type != "cpu" else mapped_units(store, units),
        ),
        config=config,
        recorder=recorder,
        number=number,
    )


def _make_units(plan: UnitPlan, params: Mapping[str, nn.Parameter], device: torch.device) -> list[ParamUnit]:
    units = []
    for layout in plan.layout.units:
        ours = [params[slot.name] for slot in layout.slots]
        for param in ours:
            _convert(param, layout, device)
        units.append(ParamUnit(layout, ours, guard_classes(ours)))
    return units


def _convert(param: nn.Parameter, unit: UnitLayout, device: torch.device) -> None:
    """Give a Parameter the dtype and device it has from here on. Its values are already at the owners."""
    with plain():
        param.grad = None
        empty = torch.empty(param.shape, dtype=unit.dtype, device=device)
        if param.is_meta:
            materialise(param, empty)
        else:
            param.data = empty


def _offload_activations(
    model: nn.Module, engine: Engine, config: ZeroConfig, context: RankContext, recorder: Recorder
) -> ActivationOffload | None:
    """Install ``config.offload_activations``; returns None if it is not set. The context's end uninstalls it.

    [Note: on top of each other] The offload and the engine both push saved-tensor hooks, in any order. The offload's
    hooks first pass a tensor to the engine; the engine's hooks pass a tensor that is no weight to the hooks below. Call
    this before the engine hooks modules: then a module's offload group opens after its unit and closes before it."""
    if not config.offload_activations:
        return None
    offload = ActivationOffload(
        model,
        OffloadPolicy.of(config, rank=context.rank, poison=engine.residency.poisons),
        offload_modules=config.offload_activations,
        recorder=recorder,
        weights=None if engine.resident else engine.saved,
    )
    context.on_close(lambda _: offload.close())
    return offload


def _hook(model: nn.Module, plan: UnitPlan, engine: Engine, config: ZeroConfig) -> None:
    modules = dict(model.named_modules())
    for name, needed in ({"": ()} | dict(plan.units_of_module)).items():
        calls = UnitCalls(engine, [engine.units[unit] for unit in needed], is_root=name == "")
        engine.calls.append(calls)
        hook_units(modules[name], calls)
    for module in model.modules():
        module.register_load_state_dict_pre_hook(BeforeStateDictLoad(module, engine.loading))  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(CallingHook(module, partial(engine.end_load, module)))  # type: ignore[no-untyped-call]
        if any(True for _ in module.parameters(recurse=False)):
            module.register_state_dict_post_hook(CopyEntries(module))  # type: ignore[no-untyped-call]
    _cast_inputs(model, engine, config)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                setattr(module, name, buffer.to(device))


def _cast_inputs(model: nn.Module, engine: Engine, config: ZeroConfig) -> None:
    """Cast floating inputs of the root, and under keep_fp32 those of every module whose parameters share one dtype,
    opaque ones aside."""
    compute = COMPUTE_DTYPES[config.precision]
    if compute is torch.float32:
        return
    model.register_forward_pre_hook(CastInputs(model, compute), with_kwargs=True, prepend=True)
    opaque = {id(param) for unit in engine.units if unit.layout.opaque for param in unit.params}
    for module in model.modules() if config.keep_fp32 else ():
        dtypes = {p.dtype for p in module.parameters(recurse=False) if id(p) not in opaque}
        if len(dtypes) == 1 and module is not model:
            module.register_forward_pre_hook(CastInputs(module, dtypes.pop()), with_kwargs=True, prepend=True)
