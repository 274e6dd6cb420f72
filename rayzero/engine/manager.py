"""``rayzero.OffloadManager``: a prepared model behind a few calls, for loops that do not want to hold an optimizer.

[Note: two forms] Each call has a twin whose name ends in ``_async``: a coroutine that makes the same call in the
manager's own thread, so that the event loop goes on. It keeps the caller's context variables and grad mode, not an
autocast or a CUDA stream. The calls of a manager run one at a time, in the order in which they were made. A plain call
while a twin is still running is refused, because nobody could say which of them comes first. ``close`` has no twin.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn

from rayzero.config import ZeroConfig
from rayzero.convert.weights import WeightSource
from rayzero.engine.context import RankContext, get_context, inside
from rayzero.engine.prepare import prepare
from rayzero.engine.start.unit_init import Init
from rayzero.engine.stats import ModelParameterStats, as_count, measured_link, read_stats, restart_stats
from rayzero.engine.units.partition import UnitRule
from rayzero.errors import ConfigError, GradientAccessError, UnsupportedError
from rayzero.layout.shard_map import RankMapping
from rayzero.telemetry.stats import Freed, MemoryStats, PrefetchStats, Stats

P = ParamSpec("P")
T = TypeVar("T")
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_LR = 1e-3  # of AdamW where no optimizer is given; torch's own default


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation:
    """What ``adapt_performance`` measured and chose."""

    pressure: float  # 0 to 1
    depth_before: int  # units prefetched ahead of the one in use
    depth_allowed: int  # what memory pressure leaves of prefetch_buffer_size
    depth: int  # from now on: as many of these as recent fetches and compute times need
    link_to_device: float | None  # bytes per second, measured by the first call; None over gRPC on a CPU
    link_to_host: float | None


class OffloadManager:
    """Trains a model whose parameters and optimizer states are with the owners: forward, backward, step.

    ::

        with rayzero.OffloadManager(rayzero.ZeroConfig(precision="bf16"), None, model, lr=3e-4) as manager:
            for x, y in batches:
                loss = torch.nn.functional.cross_entropy(manager.forward_pass(x), y)
                manager.backward_pass(loss)
                manager.optimizer_step()
            print(manager.get_performance_stats())

    It is a thin face of ``rayzero.prepare``, with the bits of the plain loop over what that returns: ``manager.model``
    and ``manager.optimizer``, for evaluation, clipping, schedulers and checkpoints. Each call has an ``async`` twin.
    [Note: two forms]"""

    def __init__(
        self,
        config: ZeroConfig | None,
        context: RankContext | RankMapping | None,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | OptimizerFactory | None = None,
        *,
        lr: float | None = None,
        units: UnitRule | None = None,
        weights: WeightSource | None = None,
        init: Init | None = None,
        resume: Path | str | bool | None = None,
    ) -> None:
        """Prepare the model; inside a trainer every rank makes its manager.

        config, units, weights, init, resume: as for ``rayzero.prepare``.
        context: the rank's; or its rank and world size, which must be the run's; None: the calling loop's. Outside a
            run, a context that is not given is the manager's own, and ends with it.
        optimizer: over parameters of ``model``, not yet stepped, or a list of such; or a function of the parameters
            that makes one; None: ``torch.optim.AdamW`` with ``lr`` (default 1e-3).

        Raises what ``rayzero.prepare`` raises, and ConfigError for arguments of another type and for a context that is
        not this rank's."""
        if not isinstance(model, nn.Module):
            raise ConfigError(f"OffloadManager: model must be a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(context, RankContext | RankMapping | None):
            raise ConfigError(
                f"OffloadManager: context must be a RankContext, a RankMapping or None, got {type(context).__name__}"
            )
        chosen = context if isinstance(context, RankContext) else get_context()
        self._owns = not isinstance(context, RankContext) and chosen.connect is None
        self.context = RankContext(device=chosen.device, config=chosen.config) if self._owns else chosen
        if isinstance(context, RankMapping):
            _check_place(context, self.context)
        self.parameters = ModelParameterStats.of(model)
        made = _make_optimizer(model, optimizer, lr)
        try:
            with inside(self.context):
                self.model, self.optimizer = prepare(
                    model, made, config, units=units, weights=weights, init=init, resume=resume
                )
        except BaseException:
            if self._owns:
                self.context.close("the model could not be prepared")
            raise
        self._engine = self.optimizer.engine
        self._output: Any = None  # of the last forward that can still have its backward
        self._forwards = 0  # with a graph, since the last step
        self._waiting = 0  # of them, without a backward
        self._backwards = 0  # since the last step
        self._closed = False
        self._calls = threading.Lock()
        self._running: set[int] = set()  # async calls that were made and have not ended
        self._made = 0  # async calls
        self._thread: ThreadPoolExecutor | None = None

    # ---- training

    def forward_pass(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the model; returns its output. Under ``torch.no_grad()`` no backward can follow, as in PyTorch."""
        return self._call(self._forward, *inputs, **keywords)

    async def forward_pass_async(self, *inputs: Any, **keywords: Any) -> Any:
        return await self._call_async(self._forward, *inputs, **keywords)

    def _forward(self, *inputs: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.model(*inputs, **keywords)
        found = self.num_tokens(*inputs, **keywords)
        tokens = as_count(found)
        if tokens is None:
            raise ConfigError(f"OffloadManager: num_tokens() must return a whole number >= 0, got {found!r}")
        output = self.model(*inputs, **keywords)
        self._engine.clock.count(tokens, 0)
        self._output = output
        self._forwards += 1
        self._waiting += 1
        return output

    def num_tokens(self, *inputs: Any, **keywords: Any) -> int:
        """The tokens in one forward's inputs: the elements of the first tensor of integers, as token ids are, and 0
        where there is none. A subclass may count otherwise."""
        tensors = (value for value in (*inputs, *keywords.values()) if isinstance(value, Tensor))
        ids = (value for value in tensors if value.dtype in (torch.int64, torch.int32))
        first = next(ids, None)
        return 0 if first is None else first.numel()

    def backward_pass(self, loss_or_grad: Tensor) -> None:
        """Run backward; gradients leave for the owners as they are complete.

        loss_or_grad: a tensor with a graph is the loss, a scalar. One without is the gradient of the last forward's
            output, in its shape; that output must then be one tensor.

        Several forwards and backwards before a step add up (under bf16 and fp16 say so by
        ``gradient_accumulation_steps``). Raises GradientAccessError for a backward without a forward before it, and for
        a second one of the same forward: add losses, and call it once. If an exception ends autograd's backward, the
        open step is discarded, all its forwards and gradients, because some of these may have left: begin it again."""
        self._call(self._backward, loss_or_grad)

    async def backward_pass_async(self, loss_or_grad: Tensor) -> None:
        await self._call_async(self._backward, loss_or_grad)

    def _backward(self, loss_or_grad: Tensor) -> None:
        if not isinstance(loss_or_grad, Tensor):
            raise ConfigError(f"backward_pass() takes a loss or a gradient, got {type(loss_or_grad).__name__}")
        if not self._forwards:
            raise GradientAccessError("backward_pass() was called before forward_pass(); run a forward with grad first")
        if not self._waiting:
            raise GradientAccessError(
                "backward_pass() was called again for a forward that has had its backward; add the losses and call it "
                "once, or run another forward_pass()"
            )
        root, grad = loss_or_grad, None
        if not loss_or_grad.requires_grad:
            root, grad = self._output_for(loss_or_grad), loss_or_grad
        elif loss_or_grad.numel() != 1:
            shape = tuple(loss_or_grad.shape)
            raise ConfigError(
                f"backward_pass() got a loss of shape {shape}, but a loss is one number; take its mean or sum"
            )
        try:
            torch.autograd.backward(root, grad)
        except BaseException:
            self._forget_step()
            self.optimizer.zero_grad()
            raise
        self._output = None
        self._waiting -= 1
        self._backwards += 1

    def _output_for(self, grad: Tensor) -> Tensor:
        output = self._output
        if not isinstance(output, Tensor):
            kind = "used already" if output is None else f"a {type(output).__name__}"
            raise ConfigError(f"backward_pass() got a gradient, but the last output is {kind}; pass the loss instead")
        if output.shape != grad.shape:
            raise ConfigError(
                f"backward_pass() got a gradient of shape {tuple(grad.shape)} for an output of {tuple(output.shape)}"
            )
        return output

    def optimizer_step(self, lr: float | None = None) -> None:
        """Apply the step and zero its gradients; returns once the owners have all they need (``overlap="forward"``).

        lr: the learning rate of all parameter groups, for this step and those after it; None: as it is. Raises
        UnsupportedError without a backward since the last step, and what ``ZeroOptimizer.step`` raises."""
        self._call(self._step, lr)

    async def optimizer_step_async(self, lr: float | None = None) -> None:
        await self._call_async(self._step, lr)

    def _step(self, lr: float | None) -> None:
        if not self._backwards:
            raise UnsupportedError("optimizer_step() was called without a backward_pass() since the last step")
        if lr is not None:
            rate = _checked_rate(lr)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._forget_step()

    def _forget_step(self) -> None:
        self._output = None
        self._forwards = self._waiting = self._backwards = 0

    # ---- what was measured

    def get_performance_stats(self) -> Stats:
        """Everything that was measured on this rank since the start or the last ``reset_state``."""
        return self._call(read_stats, self._engine)

    async def get_performance_stats_async(self) -> Stats:
        return await self._call_async(read_stats, self._engine)

    def get_memory_stats(self) -> MemoryStats:
        """Parameters and bytes by tier, and peaks."""
        return self._call(lambda: read_stats(self._engine).memory)

    async def get_memory_stats_async(self) -> MemoryStats:
        return await self._call_async(lambda: read_stats(self._engine).memory)

    def get_prefetch_status(self) -> PrefetchStats:
        """What is queued and on its way, and what became of earlier prefetches."""
        return self._call(lambda: read_stats(self._engine).prefetch)

    async def get_prefetch_status_async(self) -> PrefetchStats:
        return await self._call_async(lambda: read_stats(self._engine).prefetch)

    # ---- memory and prefetch

    def force_memory_optimization(self) -> dict[str, Freed]:
        """Free what nothing uses, at any moment of a step; returns the bytes and seconds of each action.

        The actions are ``garbage``, ``units``, ``buffers``, ``malloc`` and, on CUDA, ``device``; ``EngineMemory.free``
        says what each counts. Weights, moments and gradients stay as they are; the next pass fetches again. A model
        that stays up as a whole keeps the units whose parameters autograd has saved."""
        return self._call(self._free)

    async def force_memory_optimization_async(self) -> dict[str, Freed]:
        return await self._call_async(self._free)

    def _free(self) -> dict[str, Freed]:
        return self._engine.memory.free(self._engine.cache, self._engine.activations)

    def adapt_performance(self) -> Adaptation:
        """Measure memory pressure and set the prefetch depth by it.

        The first call also measures the link between host and device, for a few tens of milliseconds."""
        return self._call(self._adapt)

    async def adapt_performance_async(self) -> Adaptation:
        return await self._call_async(self._adapt)

    def _adapt(self) -> Adaptation:
        engine = self._engine
        before, pressure = engine.cache.depth, engine.strategy.measure().share
        engine.cache.adapt(engine.strategy.depth)
        link = measured_link(engine)
        return Adaptation(
            pressure=pressure,
            depth_before=before,
            depth_allowed=engine.cache.allowed,
            depth=engine.cache.depth,
            link_to_device=None if link is None else link.to_device,
            link_to_host=None if link is None else link.to_host,
        )

    def reset_state(self) -> None:
        """Forget what was measured and learned: counters, the order of use and pace that prefetches follow, prefetches
        on their way, kept buffers. Weights, moments, learning rates and the open step's gradients stay."""
        self._call(self._reset)

    async def reset_state_async(self) -> None:
        await self._call_async(self._reset)

    def _reset(self) -> None:
        self._free()
        self._engine.cache.forget()
        restart_stats(self._engine)

    # ---- end

    def close(self) -> None:
        """Leave the run; in a run, its context does so too. Parameters that are not up can then no longer be read.
        Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown()
        self._output = None
        if self._owns:
            self.context.close("the manager was closed")
        else:
            self._engine.close("the manager was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- calls. [Note: two forms]

    def _call(self, act: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        self._require_open()
        if self._running:
            raise UnsupportedError("an async call of this OffloadManager is still running; await it first")
        with self._calls:
            return act(*args, **kwargs)

    async def _call_async(self, act: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        self._require_open()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="rayzero-manager")
        context, grad = contextvars.copy_context(), torch.is_grad_enabled()
        device = self._engine.device
        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()

        def run() -> T:
            with self._calls, torch.set_grad_enabled(grad), on_device:
                return act(*args, **kwargs)

        self._made += 1
        made = self._made
        self._running.add(made)
        call = self._thread.submit(partial(context.run, run))
        call.add_done_callback(lambda _: self._running.discard(made))
        return await asyncio.wrap_future(call)

    def _require_open(self) -> None:
        if self._closed:
            raise UnsupportedError("this OffloadManager was closed; make another one with a model of its own")


def _check_place(mapping: RankMapping, context: RankContext) -> None:
    if (mapping.rank, mapping.world_size) != (context.rank, context.world_size):
        raise ConfigError(
            f"OffloadManager got rank {mapping.rank} of {mapping.world_size}, but this loop runs as rank "
            f"{context.rank} of {context.world_size}; start it on that many ranks (ZeroTrainer, run_ranks, Ray Train)"
        )


def _make_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | OptimizerFactory | None,
    lr: float | None,
) -> torch.optim.Optimizer | Sequence[torch.optim.Optimizer]:
    if next(model.parameters(), None) is None:
        raise ConfigError(f"{type(model).__name__} has no parameters to train")
    if optimizer is None:
        return torch.optim.AdamW(model.parameters(), lr=_LR if lr is None else _checked_rate(lr))
    if lr is not None:
        raise ConfigError("OffloadManager: lr is that of the default AdamW; give it to the optimizer instead")
    if isinstance(optimizer, torch.optim.Optimizer | list | tuple):
        return optimizer
    if not callable(optimizer):
        raise ConfigError(
            "OffloadManager: optimizer must be a torch.optim.Optimizer, a function that makes one of the parameters, "
            f"or None, got {type(optimizer).__name__}"
        )
    return optimizer(model.parameters())


def _checked_rate(lr: object) -> float:
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 <= lr < float("inf"):
        raise ConfigError(f"lr must be a finite number >= 0, got {lr!r}")
    return float(lr)
