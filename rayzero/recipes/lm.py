"""The recipe's training loop, run on every rank: a plain PyTorch loop around ``rayzero.prepare``.

Batches are a function of (seed, step, rank, micro-batch), except those of streams, whose place is tracked, and the
learning rate is one of the step, so a resumed run needs nothing but the checkpoint. Each rank reports one
``StepReport`` a step and validates its share of the data.
"""

from __future__ import annotations

import inspect
import logging
import math
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from rayzero.checkpoint import checkpoint_name
from rayzero.concurrency.futures import is_well
from rayzero.engine import OpenCheckpoint, begin_checkpoint, get_context, prepare, save_checkpoint, track
from rayzero.engine.context import RankContext
from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
from rayzero.engine.start.unit_init import empty_parameters
from rayzero.engine.stats import count_tokens
from rayzero.errors import ConfigError, DataError
from rayzero.protocol.messages import CheckpointInfo, Decision
from rayzero.recipes.data import recipe_corpus
from rayzero.recipes.data.text import Batch, Corpus, Place, batch_seed
from rayzero.recipes.model import SAMPLES, build_model, logits_of, write_samples
from rayzero.recipes.recipe import RecipeConfig
from rayzero.telemetry.names import ETA_SECONDS, EXPOSED_WAIT_SECONDS, MFU_RATIO, MODEL_FLOPS, STEP_SECONDS
from rayzero.telemetry.recorder import Recorder, Since

log = logging.getLogger(__name__)

STEP_FLOPS = "step_flops"  # key in the ranks' config, besides the recipe's settings

_HALF = ("bf16", "fp16")
_PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}
"""Device name, as the driver reports it -> FLOP/s of dense 16-bit matrix products, from the maker's data sheet."""


@dataclass(slots=True, kw_only=True)
class StepReport:
    """What one rank reports of one step; every value is measured."""

    step: int  # steps done, this one included
    loss: float  # mean over this rank's tokens, nats
    grad_norm: float | None = None  # of the averaged gradients, before clipping; None until it is known
    lr: float
    tokens: int  # tokens that this rank trained on in this step
    total_tokens: int  # all ranks, from the run's first step on; the same on every rank
    step_seconds: float  # the value of rayzero_step_seconds: from the end of one step() to the end of the next
    fetch_wait_seconds: float  # waited for parameters; with overlap="forward" this includes waiting for their update
    optimizer_exposed_seconds: float  # waited inside step(): for the norm, the decision or the update
    memory_bytes: int  # of this rank's process: RSS, or the peak of device memory on a GPU
    validation_loss: float | None = None  # mean over this rank's share of the validation batches, at validated steps
    validation_batches: int = 0  # in that share


def lr_factor(recipe: RecipeConfig, step: int) -> float:
    """The rate of step ``step`` (from 0) as a share of ``lr``: a linear rise, then a cosine to ``min_lr_ratio``."""
    rise = round(recipe.warmup * recipe.steps)
    if step < rise:
        return (step + 1) / rise
    done = min(1.0, (step - rise) / max(1, recipe.steps - 1 - rise))
    return recipe.min_lr_ratio + (1 - recipe.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))


def block_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The matrices of blocks (what is in an nn.ModuleList), embeddings aside. Raises ConfigError if there are none."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = [module for stack in stacks for module in stack.modules() if not isinstance(module, nn.Embedding)]
    found = dict.fromkeys(param for module in inside for param in module.parameters(recurse=False) if param.dim() == 2)
    if matrices := [param for param in found if param.requires_grad]:
        return matrices
    raise ConfigError("optimizer=muon is for the matrices of blocks, and the model has no nn.ModuleList with matrices")


def optimizers(recipe: RecipeConfig, model: nn.Module) -> list[torch.optim.Optimizer]:
    """What ``recipe.optimizer`` says. Muon's updates get AdamW's size, so that one rate serves."""
    muons = block_matrices(model) if recipe.optimizer == "muon" else []
    fused = True if muons else None  # beside Muon owners run torch's code, where AdamW alone has a kernel
    adamw = torch.optim.AdamW(param_groups(recipe, model, but=muons), lr=recipe.lr, betas=recipe.betas, fused=fused)
    if not muons:
        return [adamw]
    decay = recipe.weight_decay
    return [torch.optim.Muon(muons, lr=recipe.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"), adamw]


def param_groups(recipe: RecipeConfig, model: nn.Module, but: Sequence[nn.Parameter] = ()) -> list[dict[str, Any]]:
    """AdamW's groups of all that is trained ``but`` some: matrices decay, vectors and scalars do not."""
    others = set(but)
    params = [param for param in model.parameters() if param.requires_grad and param not in others]
    matrices = [param for param in params if param.dim() >= 2]
    vectors = [param for param in params if param.dim() < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def schedule(recipe: RecipeConfig, optimizer: torch.optim.Optimizer, done: int) -> LambdaLR:
    """The learning rate's schedule, as it stands after ``done`` steps."""
    for group in optimizer.param_groups:
        group["initial_lr"] = recipe.lr
    return LambdaLR(optimizer, lambda step: lr_factor(recipe, step), last_epoch=done - 1)


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
    """Mean cross-entropy in nats over the targets that are learned, computed in fp32. With ``positions``, a
    transformers model keeps the examples of a row apart; it only looks for them when it keeps no cache."""
    apart = {} if positions is None else {"position_ids": positions, "use_cache": False}
    logits = logits_of(model(inputs, **apart))
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def step_costs(since: Since, device: torch.device) -> dict[str, Any]:
    """``StepReport``'s values for the step that has just ended, as Prometheus gets them. Call it once a step."""
    counts = since.read(restart=True)
    waited = {cause: counts.total(EXPOSED_WAIT_SECONDS, cause=cause) for cause in ("fetch", "optimizer", "norm")}
    on_gpu = device.type == "cuda"
    return {
        "step_seconds": counts.total(STEP_SECONDS),
        "fetch_wait_seconds": waited["fetch"],
        "optimizer_exposed_seconds": waited["optimizer"] + waited["norm"],
        "memory_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else int(psutil.Process().memory_info().rss),
    }


@dataclass(slots=True, kw_only=True)
class Unreported:
    """A step that this rank has done but not reported yet.

    It is sent one step later, because the norm is part of the decision, and waiting for that would expose the
    optimizer's time."""

    report: StepReport
    decision: Future[Decision]
    checkpoint: CheckpointInfo | None = None

    def send(self, context: RankContext) -> None:
        """Report the step; waits for its decision."""
        if self.report.grad_norm is None:
            self.report.grad_norm = self.decision.result().norm
        context.report(asdict(self.report), checkpoint=self.checkpoint, exact=True)

    def state_dict(self) -> dict[str, Any]:
        report = asdict(self.report)
        if self.report.grad_norm is None and is_well(self.decision):  # once the next step is committed, it surely is
            report["grad_norm"] = self.decision.result().norm
        return {"report": report, "checkpoint": None if self.checkpoint is None else asdict(self.checkpoint)}


class LateRow:
    """The loss of the step that this rank does, and the step before, which it has not reported: tracked, so that a rank
    that dies reports each step, and none with a loss that it computed again with newer weights."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self._optimizer = optimizer
        self.loss: Tensor | float = math.nan  # set before optimizer.step()
        self.before: Unreported | None = None

    def send(self, context: RankContext) -> None:
        """Report the step before, if there is one."""
        if self.before is not None:
            self.before.send(context)
            self.before = None

    def state_dict(self) -> dict[str, Any]:
        return {"loss": float(self.loss), "before": self.before and self.before.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where an earlier life of this rank has kept its state."""
        self.loss, self.before, kept = state["loss"], None, state["before"]
        if kept is not None:
            self.before = Unreported(
                report=StepReport(**kept["report"]),
                decision=self._optimizer.last_decision(),
                checkpoint=kept["checkpoint"] and CheckpointInfo(**kept["checkpoint"]),
            )


@dataclass(slots=True)
class TrainedTokens:
    """Tokens that all ranks have trained on, those before a resume included."""

    total: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on counting from a saved number."""
        self.total = state["total"]


def report_flops(recorder: Recorder, rate: float, device: torch.device, precision: str) -> None:
    """Report a rank's model FLOP/s, and their share of its device's peak if that is known. fp32 has none, because the
    user's matmul precision decides which of two speeds applies."""
    recorder.set(MODEL_FLOPS, rate)
    if device.type == "cuda" and precision in _HALF and (peak := _PEAKS.get(torch.cuda.get_device_name(device))):
        recorder.set(MFU_RATIO, rate / peak)


def _corpus_here(recipe: RecipeConfig, context: RankContext) -> Corpus:
    """What the rank trains on. The process that started the run has read the same, so an error names the host."""
    try:
        return recipe_corpus(recipe, context.rank, context.world_size)
    except (DataError, ConfigError) as error:
        where = f"on host {socket.gethostname()}; every host needs the files of the recipe at the same paths"
        raise type(error)(f"{error} ({where})") from error


class LanguageModelRun:
    """One rank's training: model, optimizer, schedule and text, and the loop over them.

    Knows one rank; not how many processes there are, who draws the progress or who writes metrics.jsonl."""

    def __init__(self, recipe: RecipeConfig, context: RankContext, step_flops: int | None = None) -> None:
        """``step_flops``: the model's operations in one step of this rank; None: not known."""
        self.recipe = recipe
        self.context = context
        self.step_flops = step_flops
        self.corpus = _corpus_here(recipe, context)
        streamed = recipe.init_from is not None or context.resume is not None
        with empty_parameters() if streamed else nullcontext():
            model = build_model(recipe, self.corpus.vocab_size)
        given = optimizers(recipe, model)
        groups = [group for each in given for group in each.param_groups]
        settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        torch.manual_seed(
            batch_seed(recipe.seed, 0, context.rank, 0)
        )  # dropout; prepare() puts back a checkpoint's state
        self.model, self.optimizer = prepare(model, given, recipe.zero_config, weights=recipe.init_from)
        for group, options in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(options)  # the recipe's settings override the checkpoint's in a resumed run
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.done = context.step
        self.tokens = TrainedTokens()
        track(tokens=self.tokens, **self.corpus.states())
        scales = recipe.zero_config.precision == "fp16"  # bf16 and fp32 gradients do not overflow
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=scales)
        if scales:
            track(scaler=self.scaler)
        self.saving: OpenCheckpoint | None = None  # the last checkpoint that was begun
        self.late = LateRow(self.optimizer)
        if context.tracked is not None:  # a resumed run has the rows of its checkpoint's steps
            context.tracked.add({"late row": self.late}, in_checkpoints=False)
        self.scheduler = schedule(recipe, self.optimizer, self.done)

    def train(self) -> None:
        """Run to the recipe's last step: train, then validate and save where the recipe says so, and report."""
        since, began = Since(self.context.recorder), time.perf_counter()
        for step in range(self.done, self.recipe.steps):
            lr = float(self.optimizer.param_groups[0]["lr"])
            self._train_step(step)
            report = StepReport(
                step=step + 1,
                loss=float(self.late.loss),
                lr=lr,
                tokens=self._tokens,
                total_tokens=self.tokens.total,
                **step_costs(since, self.context.device),
            )
            done = Unreported(report=report, decision=self.optimizer.last_decision())
            if self.step_flops:
                rate = self.step_flops / report.step_seconds
                report_flops(self.context.recorder, rate, self.context.device, self.recipe.zero_config.precision)
            left = (time.perf_counter() - began) / (step + 1 - self.done) * (self.recipe.steps - step - 1)
            self.context.recorder.set(ETA_SECONDS, left)
            self.late.send(self.context)  # before a save: a checkpoint's steps are reported before it exists
            self._after_step(done)
            self.late.before = done
            if self._saves_after(step + 1):  # a run that starts again from there would not make this row
                self.late.send(self.context)
        self.late.send(self.context)
        if self.context.rank == 0 and self.context.run_dir is not None and self.recipe.sample_tokens:
            self._write_samples(self.context.run_dir)

    def _write_samples(self, run_dir: Path) -> None:
        """Rank 0 alone: no other rank has to take part in a forward."""
        path = run_dir / SAMPLES
        self.model.eval()
        try:
            write_samples(path, self.model, self.corpus, self.recipe, self.context.device)
        except OSError as error:  # the training itself has succeeded
            log.warning("%s is not written: %s", path, error.strerror)
        self.model.train()

    def _train_step(self, step: int) -> None:
        """One optimizer step. Its loss is the mean of this rank's micro-batches."""
        micro_batches = self.recipe.zero.gradient_accumulation_steps
        total = torch.zeros((), device=self.context.device, dtype=torch.float32)
        for micro_batch in range(micro_batches):
            loss = self._loss(self._batch(step, micro_batch)) / micro_batches
            torch.autograd.backward(self.scaler.scale(loss))
            total += loss.detach()
        self.late.loss = total
        count_tokens(self.model, self._tokens, self._tokens // self.recipe.seq_len)
        self.tokens.total += self.context.world_size * self._tokens
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def _after_step(self, done: Unreported) -> None:
        """Validate and save a checkpoint if they are due."""
        step = done.report.step
        if step == self.recipe.steps or step % self.recipe.eval_every == 0:
            done.report.validation_loss, done.report.validation_batches = self.validate()
        if self._saves_after(step):
            saved = self._save(step)
            done.checkpoint = saved if self.context.rank == 0 else None

    def _saves_after(self, step: int) -> bool:
        every = self.recipe.run.checkpoint_every
        return step == self.recipe.steps or (every is not None and step % every == 0)

    def _batch(self, step: int, micro_batch: int) -> Batch:
        place = Place(
            step=step,
            rank=self.context.rank,
            world_size=self.context.world_size,
            micro_batch=micro_batch,
            micro_batches=self.recipe.zero.gradient_accumulation_steps,
        )
        return self.corpus.train_batch(place)

    def _loss(self, batch: Batch) -> Tensor:
        there = batch.to(self.context.device)
        positions = there.positions if self._takes_positions else None
        return next_token_loss(self.model, there.inputs, there.targets, positions)

    @property
    def _tokens(self) -> int:
        """Tokens this rank trains on in one step."""
        recipe = self.recipe
        return recipe.seq_len * recipe.batch_size * recipe.zero.gradient_accumulation_steps

    @torch.no_grad()
    def validate(self) -> tuple[float | None, int]:
        """Mean loss over this rank's share of the validation batches (None: it has none), in nats, and their number.

        Ranks divide the batches by index, so no rank waits for another; the driver joins the means."""
        share = range(self.context.rank, self.recipe.eval_batches, self.context.world_size)
        self.model.eval()
        total = sum(float(self._loss(self.corpus.eval_batch(index))) for index in share)
        self.model.train()
        return (total / len(share) if share else None), len(share)

    def _save(self, done: int) -> CheckpointInfo | None:
        """Take part in a checkpoint, which is written while training goes on, or at the end of the run before it ends.
        Every rank calls it. Returns the newest one that is complete, as far as this call knows: the one before, at the
        end this one. None: there is none, or the run has no directory."""
        if self.context.run_dir is None:
            return None
        directory = self.context.run_dir / "checkpoints" / checkpoint_name(done)
        run = self.recipe.run
        kept: dict[str, Any] = {"keep_last": run.keep_last, "keep_every": run.keep_every}
        if done == self.recipe.steps:
            return save_checkpoint(self.optimizer, directory, **kept, upload_to=run.upload_to)
        before = None if self.saving is None else self.saving.result()
        self.saving = begin_checkpoint(self.optimizer, directory, **kept, upload_to=run.upload_to)
        return before


def train_loop(config: dict[str, Any]) -> None:
    """The loop of every rank. ``config``: a recipe as plain values, and STEP_FLOPS if the driver has counted them."""
    recipe = {key: value for key, value in config.items() if key != STEP_FLOPS}
    LanguageModelRun(RecipeConfig.from_mapping(recipe), get_context(), config.get(STEP_FLOPS)).train()
