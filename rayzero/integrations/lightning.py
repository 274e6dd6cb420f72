"""Runs Lightning's Trainer on RayZero. One setting changes: ``Trainer(strategy=ZeroStrategy(), devices=1, ...)``.

[Note: Lightning's world] A Trainer runs alone, or in a ZeroTrainer's loop on every rank. Lightning's sampler gives each
rank its part of the training data. Every rank evaluates and predicts from all data, so that metrics and whatever
depends on them (EarlyStopping) are the same on all. Values logged in training are the rank's own. Calls that need a
collective are refused by name. A checkpoint is Lightning's file with fp32 masters and all moments, like a plain
Trainer's.

[Note: a rank that dies] Lightning keeps what a fit() has counted and averaged in its loops, its logger connector, the
metrics and the module, and cannot begin between two of its steps. So a rank that dies is started again only if no step
was decided yet. Otherwise its fit() is refused by name, before it trains, and the run ends: go on in a new run with
``fit(ckpt_path=...)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core import optimizer as lightning_optimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from rayzero.config import ZeroConfig
from rayzero.engine.context import get_context
from rayzero.engine.full_values import full_state_dict
from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
from rayzero.engine.prepare import is_prepared, prepare
from rayzero.engine.units.partition import UnitRule
from rayzero.errors import StateLostError, UnsupportedError, UntrackedError
from rayzero.integrations.several_ranks import claim_process

__all__ = ["ZeroStrategy"]


class _OwnersClip(Precision):
    """Lets the owners clip the gradients, because they hold them."""

    clip_grad_by_norm = staticmethod(ZeroOptimizer.clip_grad_norm_)
    clip_grad_by_value = staticmethod(ZeroOptimizer.clip_grad_value_)


class _Root(nn.Sequential):
    """Makes Lightning run the module's steps inside the module's own call, from which the engine recognises a pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self[0](*args, **kwargs)


class ZeroStrategy(ParallelStrategy):
    """A strategy whose ``fit()`` passes the module and its optimizers to ``rayzero.prepare``, and trains the result:
    several that ``configure_optimizers()`` returns are one from there on, with one step for all.

    zero_config: by default the run's, or else ``ZeroConfig()``; its ``gradient_accumulation_steps`` is raised to the
        Trainer's. units: as in ``rayzero.prepare``. Raises UnsupportedError, which names the setting, for settings that
        RayZero does not support."""

    num_nodes = 1  # the Trainer overwrites it with its own
    global_rank = local_rank = property(lambda self: get_context().rank)
    world_size = property(lambda self: get_context().world_size)
    is_distributed = property(lambda self: get_context().world_size > 1)
    root_device = property(lambda self: get_context().device if get_context().connect else self.parallel_devices[0])
    _setup_model = staticmethod(_Root)
    barrier = SingleDeviceStrategy.barrier  # does nothing: the engine's steps keep ranks together
    reduce_boolean_decision = SingleDeviceStrategy.reduce_boolean_decision  # returns the rank's own; see the note

    def __init__(self, zero_config: ZeroConfig | None = None, *, units: UnitRule | None = None) -> None:
        super().__init__()
        self._zero_config, self._units = zero_config, units

    def set_world_ranks(self) -> None:  # the Trainer has written its settings by now
        devices, here = self.parallel_devices, self.root_device
        wrong = len(devices) * self.num_nodes != 1 or devices[0].type != here.type
        _refuse(wrong, f"devices={devices}, num_nodes={self.num_nodes}", f"a rank has one ({here}); see ZeroTrainer")
        plugin, self.precision_plugin = self._precision_plugin, _OwnersClip()
        wrong = type(plugin) not in (Precision, _OwnersClip)
        _refuse(wrong, f"precision={plugin.precision!r}", "set ZeroConfig(precision='bf16'), with fp32 masters")
        _refuse(self._layer_sync is not None, "sync_batchnorm=True", "leave it out")
        claim_process(get_context(), "Lightning")
        rank_zero_only.rank = self.global_rank

    def setup_environment(self) -> None:
        super().setup_environment()
        trainer, module = self.lightning_module.trainer, self.lightning_module
        prepares = is_overridden("prepare_data", module) or is_overridden("prepare_data", trainer.datamodule)
        _refuse(self.is_distributed and prepares, "prepare_data() on one of several ranks", "prepare before they start")
        writing = ModelPruning | StochasticWeightAveraging | WeightAveraging
        writers = [type(callback).__name__ for callback in trainer.callbacks if isinstance(callback, writing)]
        _refuse(writers, f"callbacks that write weights, {', '.join(writers)},", "leave them out")

    def model_to_device(self) -> None:  # in fit() on a trainer's rank, the engine moves unit by unit
        module, device = self.lightning_module, self.root_device
        whole = not (get_context().connect and module.trainer.training)
        for part in () if is_prepared(module) else module.modules():
            if whole or next(part.parameters(), None) is None:  # a module without parameters, such as a metric
                part.to(device)
        module._device = device  # what users read as self.device

    def setup_optimizers(self, trainer: Any) -> None:
        module = self.lightning_module
        _refuse(is_prepared(module), "second fit() of a module", "continue in a new run, with fit(ckpt_path=...)")
        with _several_allowed():
            super().setup_optimizers(trainer)
        plain, *others = trainer.optimizers
        _refuse(not plain.param_groups, "configure_optimizers() without an optimizer", "return one or several")
        config = self._zero_config or get_context().config or ZeroConfig()
        planned = [config.gradient_accumulation_steps, trainer.accumulate_grad_batches]
        for callback in trainer.callbacks:
            if isinstance(callback, GradientAccumulationScheduler):  # in later epochs
                planned += callback.scheduling.values()
        config = config.replace(gradient_accumulation_steps=max(planned))
        finetunes = [callback for callback in trainer.callbacks if isinstance(callback, BaseFinetuning)]
        for callback in finetunes:  # a resumed one gives the plain optimizer its groups, before the states are loaded
            callback.on_fit_start(trainer, module)
        with _trainable(module if finetunes else None):
            optimizer: Any = self._prepared(module, [plain, *others] if others else plain, config)
        self.optimizers = [optimizer]

    def _prepared(self, module: Any, plain: Any, config: ZeroConfig) -> ZeroOptimizer:
        """See [Note: a rank that dies]."""
        context = get_context()
        refusal = StateLostError(
            f"rank {context.rank} has died and come back, but Lightning's fit() cannot go on in the middle; resume in "
            "a new run, with fit(ckpt_path=...)"
        )
        try:
            optimizer = prepare(module, plain, config, units=self._units)[1]
        except UntrackedError as error:
            raise refusal from error
        if context.tracked is not None and context.tracked.comes_back:  # a hook of the user's tracks something
            raise refusal
        return optimizer

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:  # rank 0 may still be writing it
        racing = self.is_distributed and is_prepared(self.lightning_module)
        _refuse(racing, "ckpt_path after fit() on several ranks", "evaluate it in another run")
        return super().load_checkpoint(*args, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:  # rank 0 writes the file
        if not is_prepared(self.lightning_module):
            return dict(super().lightning_module_state_dict())
        return full_state_dict(self.lightning_module) if self.is_global_zero else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return dict(super().optimizer_state(optimizer)) if self.is_global_zero else {}

    def teardown(self) -> None:  # does not call Lightning's, which moves the model to the CPU
        for part in (self.precision_plugin, self.accelerator, self.checkpoint_io):
            part.teardown()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        split = self.lightning_module.trainer.training
        return {"num_replicas": self.world_size if split else 1, "rank": self.global_rank if split else 0}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        own = self.is_distributed and self.lightning_module.trainer.training
        own &= isinstance(tensor, Tensor) and tensor.is_floating_point()  # other values are the lengths of loaders
        _refuse(own, "sync_dist=True in training", "log without, or in validation, where every rank has all data")
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        _refuse(self.is_distributed, "all_gather()", "work in validation, where every rank has all data")
        return tensor

    def broadcast(self, obj: Any, src: int = 0) -> Any:  # paths are the same on ranks of one script
        decision = self.is_distributed and not isinstance(obj, str | None)
        _refuse(decision, f"broadcast of {obj!r} (Timer, train_time_interval, ...)", "stop by steps or epochs")
        return obj


@contextmanager
def _several_allowed() -> Iterator[None]:
    """Inside, Lightning takes several optimizers also where it steps itself: they become one."""
    check = lightning_optimizer._validate_multiple_optimizers_support
    lightning_optimizer._validate_multiple_optimizers_support = lambda *_: None
    try:
        yield
    finally:
        lightning_optimizer._validate_multiple_optimizers_support = check


@contextmanager
def _trainable(module: nn.Module | None) -> Iterator[None]:
    """Prepare inside what a callback has frozen and may unfreeze later: the owners must hold it as they hold what is
    trained. Which of the module's frozen parameters these are, only the callback knows."""
    frozen = [p for p in module.parameters() if not p.requires_grad and p.is_floating_point()] if module else []
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


def _refuse(wrong: object, what: str, instead: str) -> None:
    if wrong:
        raise UnsupportedError(f"Lightning's {what} is not supported on RayZero: {instead}")
