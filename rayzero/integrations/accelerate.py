"""Runs loops of Hugging Face Accelerate on RayZero. One line changes: the class of the accelerator.

::

    accelerator = ZeroAccelerator(gradient_accumulation_steps=2)          # was: Accelerator(...)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    ...                                                                   # backward, clip_grad_norm_, step as before

[Note: Accelerate's world] Accelerate must see the world that the rank context says. It learns the rank's place, and
that there are no collectives: loaders give each rank its part, shuffled by a seed and the epoch's number, and only rank
0 is the main process. Accelerate counts an epoch once its loader is exhausted: a loop that leaves one early calls
``loader.set_epoch(epoch)``, or it sees the same samples again (findings/accelerate_epoch_left_early_comes_again.sh).
After ``prepare``, gather and reduce exchange small tensors through the lead (several_ranks.py); larger ones, objects,
and what is called before, are refused by name. If the user made a torch.distributed group of the same ranks, Accelerate
uses it for those calls; gradients and weights never go through it.

[Note: Accelerate's checkpoints] ``save_state(directory)`` writes ``directory/rayzero``, a checkpoint like those of
``rayzero.save_checkpoint``, instead of ``model.safetensors`` and ``optimizer.bin``: no process gathers the model.
Accelerate writes schedulers, random states and registered objects into its own files beside it.
``load_state`` reads both into the prepared objects; it also reads what a plain ``Accelerator`` wrote.

[Note: a rank that dies] The loop is the user's, so it says itself what it needs: ``rayzero.track(scheduler=scheduler)``
after ``prepare``. It begins at step ``rayzero.get_context().step``, which counts calls of ``optimizer.step()`` that
synchronise: with ``loader.set_epoch(epoch)``, then ``accelerator.skip_first_batches(loader, n)`` in the first epoch,
where n counts micro-batches. A loader that shuffles must be prepared by an accelerator with a seedable sampler, which
ranks of several have; a rank alone passes ``DataLoaderConfiguration(use_seedable_sampler=True)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from accelerate import Accelerator, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, recursively_apply
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rayzero.config import ZeroConfig
from rayzero.engine.checkpoint import save_checkpoint
from rayzero.engine.context import RankContext, get_context, mean_over_ranks
from rayzero.engine.full_values import full_state_dict, load_checkpoint
from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
from rayzero.engine.prepare import is_prepared, prepare
from rayzero.engine.units.partition import UnitRule
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.integrations.several_ranks import claim_process, values_of_ranks
from rayzero.kernels.optimizer_class import Optimizers
from rayzero.quantities import count

__all__ = ["ZeroAccelerator"]

_OURS = "rayzero"  # folder of a saved state that the owners write
_WITH_THE_OWNERS: dict[str, Any] = {}  # stands for the weights of a model that its owners write

_ONE_MACHINE = (DistributedType.NO,)
_WITH_COLLECTIVES = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class ZeroAccelerator(Accelerator):
    """An ``Accelerator`` whose ``prepare(model, optimizer, ...)`` is ``rayzero.prepare``.

    Takes Accelerate's own arguments, and:

    zero_config: by default the run's, or else ``ZeroConfig()``; its ``gradient_accumulation_steps`` is raised to
        Accelerate's. units: as in ``rayzero.prepare``.

    Raises UnsupportedError for settings that RayZero does not support (fp16 loss scaling, DeepSpeed, FSDP), and
    ConfigError if Accelerate sees another world than the rank context."""

    def __init__(
        self, *args: Any, zero_config: ZeroConfig | None = None, units: UnitRule | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.join_run(zero_config, units)

    def join_run(self, zero_config: ZeroConfig | None, units: UnitRule | None) -> None:
        """Take the rank context's place. To convert an existing ``Accelerator``, set its class to this one, then call
        this. Raises the same errors as the constructor."""
        self._zero_config = zero_config
        self._units = units
        self._reads_all = False
        self._with_the_owners = False  # True while Accelerate saves or loads: owners write the prepared models
        self._whole_loaders: WeakSet[Any] = WeakSet()
        context = get_context()
        self._refuse_other_engines()
        self.has_collectives = self.distributed_type in _WITH_COLLECTIVES
        if self.has_collectives:
            _check_same_world(context, self.state.num_processes, self.state.process_index)
        elif context.world_size > 1:
            claim_process(context, "Accelerate")
            self._take_place(context)

    def _refuse_other_engines(self) -> None:
        if self.distributed_type not in _ONE_MACHINE + _WITH_COLLECTIVES:
            raise UnsupportedError(
                f"Accelerate is set up for {self.distributed_type.value}, which shards the model itself; run it "
                "without that, because RayZero shards the model"
            )
        if self.mixed_precision not in ("no", "bf16"):
            raise UnsupportedError(
                f"mixed_precision={self.mixed_precision!r} is not supported yet; use 'bf16' (autocast over fp32 "
                "weights), or 'no' with ZeroConfig(precision='bf16')"
            )

    def _take_place(self, context: RankContext) -> None:
        """See [Note: Accelerate's world]. All ranks must shuffle alike: by a seed, not by their generators' state."""
        for state in (PartialState(), self.state):
            state.num_processes = context.world_size
            state.process_index = state.local_process_index = context.rank
        if self.dataloader_config.dispatch_batches:
            raise UnsupportedError(
                "dispatch_batches=True sends batches between processes, which have no collectives here; leave it out, "
                "and each rank reads its own part"
            )
        self.dataloader_config.dispatch_batches = False
        self.dataloader_config.use_seedable_sampler = True
        if self.dataloader_config.data_seed is None:
            self.dataloader_config.data_seed = 0

    # ---- model and optimizer

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """As Accelerate's. The model and its optimizer must be passed in one call, or UnsupportedError is raised.
        Several optimizers over the model are one argument, a list, for which one optimizer comes back."""
        models = [x for x in args if isinstance(x, nn.Module) and not is_prepared(x)]
        args = tuple(Optimizers.of(x, _names(models)) if _is_several(x) else x for x in args)
        optimizers = [x for x in args if isinstance(x, torch.optim.Optimizer) and _zero_of(x) is None]
        if not models and not optimizers:
            return super().prepare(*args, device_placement=device_placement)
        if (len(models), len(optimizers)) != (1, 1):
            raise UnsupportedError(
                f"accelerator.prepare() was given {count(len(models), 'model')} and "
                f"{count(len(optimizers), 'optimizer')}; RayZero prepares one model with its one "
                "optimizer, or a list of its optimizers, in one call. For a model that is not trained, use "
                "accelerator.prepare_model(model, evaluation_mode=True)"
            )
        (model,), (plain,) = models, optimizers
        config = self._zero_config or get_context().config or ZeroConfig()
        planned = max(config.gradient_accumulation_steps, self.num_micro_batches)
        config = config.replace(gradient_accumulation_steps=planned)
        model, optimizer = prepare(model, plain, config, units=self._units)
        return super().prepare(*(optimizer if x is plain else x for x in args), device_placement=device_placement)

    @property
    def num_micro_batches(self) -> int:
        """How many backwards there are between two steps."""
        return int(self.gradient_accumulation_steps)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """As Accelerate's: autocast and compile, but no replication. The engine decides where the weights are."""
        if is_prepared(model):
            device_placement, evaluation_mode = False, True
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """As Accelerate's, but moves nothing, because the owners hold the moments."""
        return super().prepare_optimizer(optimizer, device_placement=False)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float | str = 2
    ) -> Tensor:
        """Clip the global norm of the prepared model's gradients; returns the norm before the clip, a 0-dim fp32
        tensor.

        ``parameters`` must be all parameters that the optimizer trains, because owners compute no norm of a part.
        Raises UnsupportedError otherwise, and for a ``norm_type`` other than 2."""
        optimizer = self._optimizer_of(parameters)
        if norm_type != 2:
            raise UnsupportedError(f"clip_grad_norm_ with norm_type={norm_type!r} is not supported; use 2")
        return optimizer.clip_grad_norm_(float(max_norm))

    def _optimizer_of(self, parameters: Tensor | Iterable[Tensor]) -> ZeroOptimizer:
        given = {id(p) for p in ((parameters,) if isinstance(parameters, Tensor) else parameters)}
        optimizers = [zero for x in self._optimizers if (zero := _zero_of(x)) is not None]
        for optimizer in optimizers:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            missing = [p for p in trained if id(p) not in given]
            if trained and not missing:
                return optimizer
        raise UnsupportedError(
            f"clip_grad_norm_ was given {len(given)} parameters, which are not all that a prepared optimizer trains; "
            "pass model.parameters(), because only the norm of all gradients together can be clipped"
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """A prepared model's fp32 masters (``rayzero.full_state_dict``); for other models, what Accelerate returns."""
        if is_prepared(model):
            return _WITH_THE_OWNERS if self._with_the_owners else dict(full_state_dict(model))
        return dict(super().get_state_dict(model, unwrap=unwrap))

    # ---- checkpoints. [Note: Accelerate's checkpoints]

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **settings: Any) -> Any:
        """As Accelerate's; every rank calls it between two steps, with the same directory."""

        def save(_: list[Any], weights: list[Any], directory: str) -> None:
            weights[:] = [state for state in weights if state is not _WITH_THE_OWNERS]
            self._optimizers.clear()
            for optimizer, place in zip(optimizers, _places(optimizers, directory), strict=True):
                save_checkpoint(optimizer, place)

        optimizers = self._zero_optimizers()
        with self._around(self.register_save_state_pre_hook(save)):
            return super().save_state(output_dir, safe_serialization, **settings)

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **settings: Any) -> None:
        """As Accelerate's, after ``prepare``; every rank calls it between two steps, with the same directory. It
        also reads what a plain ``Accelerator`` saved."""

        def load(models: list[Any], directory: str) -> None:
            places = _places(optimizers, directory)
            if not any(place.is_dir() for place in places):  # a plain Accelerator saved it, and Accelerate reads it
                return
            models[:] = [model for model in models if not is_prepared(model)]
            self._optimizers.clear()
            for optimizer, place in zip(optimizers, places, strict=True):
                load_checkpoint(optimizer, place)

        optimizers = self._zero_optimizers()
        with self._around(self.register_load_state_pre_hook(load)):
            super().load_state(input_dir, load_kwargs, **settings)

    @contextmanager
    def _around(self, hook: Any) -> Iterator[None]:
        """Around Accelerate's save or load: it gathers no prepared models, and ``hook`` may empty its optimizers."""
        optimizers, self._with_the_owners = list(self._optimizers), True
        try:
            yield
        finally:
            self._with_the_owners, self._optimizers[:] = False, optimizers
            hook.remove()

    def _zero_optimizers(self) -> list[ZeroOptimizer]:
        return list(dict.fromkeys(zero for x in self._optimizers if (zero := _zero_of(x)) is not None))

    # ---- data

    @contextmanager
    def whole_data(self) -> Iterator[None]:
        """Loaders that are prepared inside give every rank all data, so that all ranks get the same evaluation."""
        before, self._reads_all = self._reads_all, not self.has_collectives
        try:
            yield
        finally:
            self._reads_all = before

    @property
    def num_processes(self) -> int:
        """How many ranks share the data of the loader that is read, or of those being prepared."""
        return 1 if self._reads_all or self._reads_whole else int(self.state.num_processes)

    @property
    def process_index(self) -> int:
        """This rank's index among those that share the data."""
        return 0 if self._reads_all else int(self.state.process_index)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's: gives each rank its part of the batches, or inside ``whole_data()`` all batches."""
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if self._reads_all:
            self._whole_loaders.add(prepared)
        return prepared

    # ---- other ranks' values

    def gather(self, tensor: Any) -> Any:
        """As Accelerate's. Without collectives, ranks exchange small tensors through the lead, after ``prepare``; while
        every rank reads all data (see ``whole_data``), a rank's own values are all. Raises UnsupportedError before
        ``prepare``, and for large tensors."""
        if self._exchanges("gather"):
            return recursively_apply(_gathered, tensor, error_on_other_type=True)
        return super().gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As ``gather``. Raises UnsupportedError for objects other than tensors, too."""
        if self._exchanges("gather_for_metrics"):
            use_gather_object |= any(not isinstance(x, Tensor) for x in tree_leaves(input_data))
            self._refuse_exchange("gather_for_metrics", "objects of the other ranks", use_gather_object)
        return super().gather_for_metrics(input_data, use_gather_object=use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As ``gather``."""
        if self._exchanges("reduce"):
            return recursively_apply(_reduced, tensor, reduction, error_on_other_type=True)
        return super().reduce(tensor, reduction=reduction, scale=scale)

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's. Raises UnsupportedError if other ranks' shapes are needed, without collectives."""
        self._refuse_exchange(
            "pad_across_processes", "the other ranks' shapes", self._exchanges("pad_across_processes")
        )
        return super().pad_across_processes(tensor, *args, **kwargs)

    def wait_for_everyone(self) -> None:
        """As Accelerate's. On several ranks without collectives, raises UnsupportedError before ``prepare``."""
        context = get_context()
        if context.world_size > 1 and context.engine is not None and not self.has_collectives:
            mean_over_ranks(0.0)
        elif not self._exchanges("wait_for_everyone"):
            super().wait_for_everyone()

    @property
    def _reads_whole(self) -> bool:
        """Whether the loader that is read gives every rank all data."""
        return self.gradient_state.active_dataloader in self._whole_loaders

    def _exchanges(self, call: str) -> bool:
        """Whether a call must ask the other ranks through the lead. Raises UnsupportedError before ``prepare``."""
        if self.has_collectives or get_context().world_size == 1 or self._reads_whole:
            return False
        self._refuse_exchange(call, "the other ranks", get_context().engine is None)
        return True

    def _refuse_exchange(self, call: str, what: str, wrong: bool) -> None:
        if wrong:
            raise UnsupportedError(
                f"accelerator.{call}() needs {what}, and RayZero's ranks have no collectives; after "
                "accelerator.prepare(model, optimizer), gather and reduce exchange small tensors. To evaluate, have "
                "every rank read all data (with accelerator.whole_data(): loader = accelerator.prepare(loader)); or "
                "make a torch.distributed group of the ranks before the accelerator"
            )


def _gathered(tensor: Tensor) -> Tensor:
    values = values_of_ranks(tensor)
    return values.flatten(0, 1) if tensor.dim() else values


def _reduced(tensor: Tensor, reduction: str) -> Tensor:
    values = values_of_ranks(tensor)
    if reduction == "max":
        return values.amax(0)
    total = values.sum(0, dtype=tensor.dtype)
    return total / len(values) if reduction == "mean" else total


def _places(optimizers: Sequence[ZeroOptimizer], directory: str) -> list[Path]:
    """The folder of each optimizer's checkpoint. A run's further models are in the first one's checkpoint; without a
    run, each model has its own owners and its own checkpoint."""
    folder = Path(directory).absolute()  # owners may work in other directories
    own = [optimizer for optimizer in optimizers if not optimizer.engine.number]
    names = {id(optimizer): f"{_OURS}_{i}" if i else _OURS for i, optimizer in enumerate(own)}
    return [folder / names.get(id(optimizer), _OURS) for optimizer in optimizers]


def _names(models: Sequence[nn.Module]) -> dict[int, str]:
    """The names of Parameters, by id."""
    return {id(param): name for model in models for name, param in model.named_parameters()}


def _is_several(given: Any) -> bool:
    """Whether an argument is a list of optimizers."""
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(x, torch.optim.Optimizer) for x in given)


def _zero_of(optimizer: Any) -> ZeroOptimizer | None:
    """RayZero's optimizer inside Accelerate's wrapper, if there is one."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, ZeroOptimizer) else None


def _check_same_world(context: RankContext, num_processes: int, process_index: int) -> None:
    if (num_processes, process_index) != (context.world_size, context.rank):
        raise ConfigError(
            f"Accelerate is process {process_index} of {num_processes} (torch.distributed), but RayZero's context is "
            f"rank {context.rank} of {context.world_size}: start the loop under rayzero.ZeroTrainer, or with a "
            "torch.distributed group of its ranks in their order"
        )
