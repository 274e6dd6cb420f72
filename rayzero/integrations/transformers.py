"""Runs transformers' Trainer on RayZero. One line changes: the import of the class.

::

    from rayzero.integrations.transformers import Trainer     # was: from transformers import Trainer

    trainer = Trainer(model=model, args=TrainingArguments(...), train_dataset=...)
    trainer.train()                                            # alone, or in a ZeroTrainer's loop on every rank

For any other Trainer, make :class:`ZeroTraining` the first base: ``class Mine(ZeroTraining, SFTTrainer)``.

[Note: data of several ranks] Every rank runs the same script over the same dataset. The Trainer's sampler is split
by rank: rank r of R reads batches r, r + R, ... of one order that all ranks shuffle by the same seed, as under
torchrun. Evaluation has no collectives to add up parts, so every rank evaluates all data, and all get the same
metrics. What the Trainer adds up over ranks in training (the tokens of a step, which its losses are divided by, the
logged loss, tokens seen, flos) is added up through the lead.

[Note: Trainer's checkpoints] A ``checkpoint-N`` has the fp32 model, which ``from_pretrained`` reads, the Trainer's own
files, and ``rayzero/`` with the masters and moments that the owners wrote. ``train(resume_from_checkpoint=...)``
continues from it with any number of owners.

[Note: a rank that dies] The loop is kept with every step (``TrainerProgress``), so that a rank that dies repeats only
its last one. In its next life, the Trainer runs from its top: callbacks get ``on_train_begin`` and ``on_epoch_begin``
again, and epochs and batches that were used are skipped. Callbacks of your own keep what ``ExportableState`` says, as
in the Trainer's checkpoints. Only a Trainer whose model is the run's first can do this, and only if its dataset draws
no random numbers when an example is read; otherwise, the rank's next life is refused by name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from rayzero.config import ZeroConfig
from rayzero.convert.formats.safetensors_folder import INDEX_FILE, WHOLE_FILE
from rayzero.convert.weights import Weights, misfits
from rayzero.engine.checkpoint import save_checkpoint
from rayzero.engine.context import get_context, mean_over_ranks
from rayzero.engine.full_values import full_state_dict
from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
from rayzero.engine.prepare import is_prepared
from rayzero.engine.start.initial_values import require_fit, wanted_by
from rayzero.engine.units.partition import UnitRule
from rayzero.errors import CheckpointWriteError, ConfigError, UnsupportedError
from rayzero.integrations.accelerate import ZeroAccelerator
from rayzero.integrations.several_ranks import sum_over_ranks
from rayzero.integrations.trainer_progress import TrainerProgress
from rayzero.kernels.optimizer_class import Optimizers

__all__ = ["Seq2SeqTrainer", "Trainer", "ZeroTraining", "save_pretrained"]

_OURS = "rayzero"  # folder of a Trainer's checkpoint that the owners write
_SCHEDULER = "scheduler.pt"  # the Trainer's own name for it
_TRACKED_AS = "transformers.Trainer"  # no name that rayzero.track() takes
_KEPT = "what was kept with the last step"  # stands for a checkpoint's folder


def save_pretrained(model: Any, directory: Path | str, **settings: Any) -> None:
    """Save a prepared model's fp32 masters as ``model.save_pretrained(directory)`` does, with a config that says fp32.

    Frozen parameters keep their own dtype. ``settings``: as transformers' (``max_shard_size``, ...)."""
    model.save_pretrained(directory, state_dict=full_state_dict(model), **settings)
    _say_masters_dtype(model, directory)


def _say_masters_dtype(model: Any, directory: Path | str) -> None:
    """Make the saved config name the masters' dtype; transformers wrote the dtype of the computation."""
    trained = any(param.requires_grad for param in model.parameters())
    before, model.config.dtype = model.config.dtype, torch.float32 if trained else model.dtype
    model.config.save_pretrained(directory)
    model.config.dtype = before


def _owners_files(checkpoint: str) -> Path:
    return Path(checkpoint).absolute() / _OURS  # owners may work in other directories


class ZeroTraining:
    """Makes a ``transformers.Trainer`` train with RayZero. A class names it before the Trainer among its bases.

    Takes the Trainer's own arguments, and ``zero_config`` and ``units`` as in ``rayzero.prepare``. In ``optimizers``, a
    list may take the optimizer's place: several over the one model, as ``rayzero.prepare`` takes them. Knows where the
    Trainer uses the model, the optimizer and their files; the Trainer keeps its loop."""

    accelerator: _TrainersAccelerator
    args: TrainingArguments
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    control: Any
    current_flos: float
    _globalstep_last_logged: int
    _get_output_dir: Any

    def __init__(
        self, *args: Any, zero_config: ZeroConfig | None = None, units: UnitRule | None = None, **kwargs: Any
    ) -> None:
        self._zero_config = zero_config
        self._units = units
        self._progress = TrainerProgress(self)
        super().__init__(*args, **kwargs)
        if isinstance(self.optimizer, list | tuple):
            self.optimizer = Optimizers.of(self.optimizer, {id(p): name for name, p in self.model.named_parameters()})

    def create_accelerator_and_postprocess(self) -> None:
        """Let the Trainer make an ``Accelerator``, and turn it into a ``ZeroAccelerator``. Raises its errors."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.__class__ = _TrainersAccelerator
        self.accelerator.join_run(self._zero_config, self._units)
        self.accelerator.planned = self.args.gradient_accumulation_steps
        if self.args.data_seed is None and get_context().world_size > 1:
            self.accelerator.dataloader_config.data_seed = self.args.seed
        self._refuse_settings()

    def _refuse_settings(self) -> None:
        self.args._n_gpu = min(self.args.n_gpu, 1)  # a rank has one device; DataParallel would copy the model
        if not self._lacks_collectives:
            return
        for kind in type(self).__mro__:
            used = vars(sys.modules[kind.__module__]).values()
            for function in (accelerate.utils.gather, accelerate.utils.gather_object):
                if any(each is function for each in used):
                    raise UnsupportedError(
                        f"{kind.__name__} calls accelerate.utils.{function.__name__}(), which returns a rank's own "
                        "values where there is no torch.distributed group; call torch.distributed.init_process_group("
                        "'gloo', ...) on every rank before the trainer is made"
                    )

    @property
    def _lacks_collectives(self) -> bool:
        return get_context().world_size > 1 and not self.accelerator.has_collectives

    # ---- data and steps

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """On a trainer's rank, the engine moves units to the device, because the whole model may not fit there."""
        if get_context().connect is None:
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        with nullcontext() if is_training else self.accelerator.whole_data():
            return super()._get_dataloader(*args, is_training=is_training, **kwargs)  # type: ignore[misc]

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # the Trainer would read every .grad to find out, and the owners have the gradients

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        resume = get_context().resume
        if resume is not None and resume_from_checkpoint is None and not is_prepared(self.model):
            raise ConfigError(
                f"the run resumes from {resume}, but trainer.train() would count its steps from 0; call "
                "trainer.train(resume_from_checkpoint=...) and leave RunConfig's resume out"
            )
        made = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)  # type: ignore[misc]
        self._progress.begin_train()
        return made

    # ---- the loop. [Note: a rank that dies]

    def _run_epoch(
        self,
        *,
        epoch: int,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
        resume_from_checkpoint: str | None,
        **rest: Any,
    ) -> None:
        """As the Trainer's; in a rank that has come back, only from its last step on."""
        context, micro_batches = get_context(), self.args.gradient_accumulation_steps
        if context.tracked is not None and context.engine is self.zero_optimizer.engine:
            context.tracked.add({_TRACKED_AS: self._progress}, in_checkpoints=False)
        skips = resume_from_checkpoint is not None and epoch == epochs_trained and not self.args.ignore_data_skip
        back = self._progress.begin_epoch(epoch, steps_trained_in_current_epoch // micro_batches if skips else 0)
        if back is not None:
            if epoch < back["epoch"]:
                return
            epochs_trained, steps_trained_in_current_epoch = epoch, back["updates"] * micro_batches
            resume_from_checkpoint = _KEPT if back["updates"] else None
            self.args.ignore_data_skip = False  # that is for resumes, of which there is no other in a train()
        super()._run_epoch(  # type: ignore[misc]
            epoch=epoch,
            epochs_trained=epochs_trained,
            steps_trained_in_current_epoch=steps_trained_in_current_epoch,
            resume_from_checkpoint=resume_from_checkpoint,
            **rest,
        )

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's."""
        before = self._progress.generators()
        self._progress.takes_batches()
        taken = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._progress.took_batches(before)
        return taken

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint == _KEPT:
            self._progress.restore_generators()
        else:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
            self._progress.generators_changed()

    # ---- what is added up over ranks

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self.accelerator.sums():
            return super()._get_num_items_in_batch(*args, **kwargs)  # type: ignore[misc]

    def _track_num_input_tokens(self, *args: Any, **kwargs: Any) -> None:
        with self.accelerator.sums():
            super()._track_num_input_tokens(*args, **kwargs)  # type: ignore[misc]

    def store_flos(self) -> None:
        """As the Trainer's."""
        if self._lacks_collectives:
            self.current_flos = mean_over_ranks(float(self.current_flos)) * get_context().world_size
        super().store_flos()  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        logs = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        if logs and self._lacks_collectives:
            tr_loss.copy_(mean_over_ranks(tr_loss))
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)  # type: ignore[misc]

    # ---- checkpoints. [Note: Trainer's checkpoints]

    @property
    def zero_optimizer(self) -> ZeroOptimizer:
        """The optimizer that ``rayzero.prepare`` made. Raises UnsupportedError before ``train()``."""
        optimizer = getattr(self.optimizer, "optimizer", None)
        if not isinstance(optimizer, ZeroOptimizer):
            raise UnsupportedError("the Trainer has no prepared optimizer before train()")
        return optimizer

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As the Trainer's, which looks for the best checkpoint's folder although rank 0 may not have made it yet.
        Here, every rank looks again after rank 0 has made it."""
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        if not (self.state.best_global_step and self._lacks_collectives):
            return
        if self.args.save_only_model:  # otherwise the ranks have saved together, after rank 0 made the folder
            mean_over_ranks(0.0)
        best = os.path.join(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
        if os.path.isdir(best):
            self.state.best_model_checkpoint = best

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is not None or not is_prepared(self.model) or not self.args.should_save:
            super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]
            return
        super()._save(output_dir, state_dict=full_state_dict(self.model))  # type: ignore[misc]
        if isinstance(self.model, transformers.PreTrainedModel):
            _say_masters_dtype(self.model, output_dir or self.args.output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = self.zero_optimizer
        os.makedirs(output_dir, exist_ok=True)
        if save_checkpoint(optimizer, _owners_files(output_dir)) is None:
            # the Trainer would count the folder as a checkpoint, and delete older ones because of it
            raise CheckpointWriteError(
                f"{output_dir} lacks the masters and moments, which the storage did not take; make room and resume"
            )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The owners read their own files when the model is prepared; a plain Trainer's checkpoint is loaded before."""
        ours = _owners_files(resume_from_checkpoint)
        if not ours.is_dir():
            if not self._load_published(Path(resume_from_checkpoint)):
                super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            return
        if is_prepared(self.model):
            raise UnsupportedError(
                f"this Trainer has trained already and cannot go back to {resume_from_checkpoint}; make a new one, "
                "in a new run"
            )
        get_context().resume = ours

    def _load_best_model(self) -> None:
        if not self._load_published(Path(self.state.best_model_checkpoint)):
            super()._load_best_model()  # type: ignore[misc]

    def _load_published(self, folder: Path) -> bool:
        """Load a folder of ``save_pretrained`` into the model. Returns False if it is something else, such as an
        adapter's.

        The Trainer's own methods pass over names that the model lacks, and published ones often differ from those of
        its parameters: experts would stay as they are. Raises CheckpointError if a shape does not fit."""
        held = any((folder / name).is_file() for name in (WHOLE_FILE, INDEX_FILE))
        if not held or not isinstance(self.model, transformers.PreTrainedModel):
            return False
        names = list(self.model.state_dict())
        wanted = wanted_by(self.model)
        weights = Weights(folder).open(self.model, wanted)
        require_fit(weights, self.model, misfits(wanted, weights.decls, strict=False))
        values = {name: weights.read(name) for name in names if name in weights}
        self.model.load_state_dict(values, strict=False)
        return True

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _owners_files(checkpoint).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))


class _TrainersAccelerator(ZeroAccelerator):
    """The accelerator of a Trainer, which counts micro-batches itself and tells Accelerate that there is one."""

    planned = 1  # number of backwards between two steps
    _sums = False

    @contextmanager
    def sums(self) -> Iterator[None]:
        """Inside, the Trainer adds up what it gathers: ``gather`` may return the sum over ranks in one number, which
        costs the lead less than every rank's."""
        self._sums = True
        try:
            yield
        finally:
            self._sums = False

    def gather(self, tensor: Any) -> Any:
        """As ``ZeroAccelerator``'s; see ``sums``."""
        if self._sums and self._exchanges("gather"):
            return sum_over_ranks(tensor)
        return super().gather(tensor)

    @property
    def num_micro_batches(self) -> int:
        return self.planned


class Trainer(ZeroTraining, transformers.Trainer):
    """``transformers.Trainer`` on RayZero."""


class Seq2SeqTrainer(ZeroTraining, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` on RayZero: also evaluates by generating."""
