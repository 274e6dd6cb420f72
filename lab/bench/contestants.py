"""RayZero and plain PyTorch as players of the step benchmarks.

``plain`` uses torch.optim.AdamW(fused=True) and torch's clip_grad_norm_; several ranks run under
DistributedDataParallel (gloo, gradients as bucket views). In bf16 it has bf16 parameters and gradients, an fp32 master
copy of the parameters for Adam and the clip, and a copy back: the same states and the same rounding as RayZero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lab.bench.turns import Entry, Player, Program, Seat, Turn, take_turns
from lab.bench.work import ADAMW, CLIP, Work, loss_of, lower_precision
from rayzero.config import ZeroConfig
from rayzero.engine.context import RankContext, get_context
from rayzero.engine.prepare import prepare
from rayzero.telemetry.names import EXPOSED_WAIT_SECONDS
from rayzero.telemetry.recorder import MemoryRecorder
from rayzero.testing import Transport, run_ranks

CAUSES = ("fetch", "push", "norm", "optimizer")
Overlap = Literal["none", "forward"]


class TrainingPlayer:
    """A rank of any contestant. ``step(tokens)`` does one whole training step and returns its loss, a 0-dim tensor,
    without waiting for it."""

    def __init__(self, work: Work, seat: Seat, step: Callable[[Tensor], Tensor]) -> None:
        self._work, self._seat, self._step = work, seat, step

    def play(self, turn: Turn) -> dict[str, Any]:
        """Play the steps; returns ``seconds`` of the timed ones, and this rank's loss of every step."""
        losses = [self._one(turn.first)]
        self._settle()
        waits = _waits()
        start = perf_counter()
        losses += [self._one(turn.first + i) for i in range(1, turn.steps + 1)]
        self._settle()
        seconds = perf_counter() - start
        waits = {cause: after - waits[cause] for cause, after in _waits().items()}
        return {"seconds": seconds, "losses": [loss.item() for loss in losses], "waits": waits} | self._device_bytes()

    def _one(self, step: int) -> Tensor:
        return self._step(self._work.batch_of(step, self._seat.rank).to(self._seat.device)).detach()

    def _settle(self) -> None:
        if self._seat.device != "cpu":
            torch.cuda.synchronize()

    def _device_bytes(self) -> dict[str, int]:
        return {} if self._seat.device == "cpu" else {"device_bytes": torch.cuda.max_memory_allocated()}


def _waits() -> dict[str, float]:
    """Seconds that the loop has waited so far, by cause; all 0 if the player is not RayZero."""
    recorder = get_context().recorder
    assert isinstance(recorder, MemoryRecorder)
    return {cause: recorder.total(EXPOSED_WAIT_SECONDS, cause=cause) for cause in CAUSES}


# ---- plain PyTorch ----------------------------------------------------------------------------------------------


def plain(work: Work, name: str = "plain") -> Entry:
    """The entry of plain PyTorch, with DistributedDataParallel if there are several ranks."""
    return Entry(name=name, programs=partial(one_process_a_rank, partial(build_plain, work)))


def one_process_a_rank(build: Callable[[Seat], Player], seats: Sequence[Seat]) -> list[Program]:
    """The programs of most entries: a process for each rank."""
    return [partial(take_turns, build, seat) for seat in seats]


def build_plain(work: Work, seat: Seat) -> Player:
    """Build plain PyTorch's player, with model, masters and moments on the seat's device."""
    torch.set_num_threads(seat.threads)
    model: nn.Module = work.model(seat.device)
    lower_precision(model, work.dtype)
    params = list(model.parameters())
    masters = params if work.precision == "fp32" else [_master_of(p) for p in params]
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)  # type: ignore[arg-type]
    if seat.world_size > 1:
        meet(seat)
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        if masters is not params:
            torch._foreach_copy_(_grads(masters), _grads(params))
        nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        if masters is not params:
            with torch.no_grad():
                torch._foreach_copy_([*params], [*masters])
        model.zero_grad()
        return loss

    return TrainingPlayer(work, seat, step)


def _master_of(param: nn.Parameter) -> nn.Parameter:
    master = nn.Parameter(param.detach().float())
    master.grad = torch.zeros_like(master)
    return master


def _grads(params: Sequence[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def meet(seat: Seat) -> None:
    """Make the torch.distributed group that peers need, over gloo (CPU) or NCCL."""
    torch.distributed.init_process_group(
        "gloo" if seat.device == "cpu" else "nccl",
        init_method=f"file://{seat.meeting}",
        rank=seat.rank,
        world_size=seat.world_size,
    )


# ---- RayZero ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OursOptions:
    """How RayZero takes part. ``transport``: None for the best one for that many ranks."""

    transport: Transport | None = None
    owners: int = 1
    overlap: Overlap = "forward"
    tls: bool = False


def best_transport(world_size: int) -> Transport:
    """The fastest transport of this version: shared memory; without it, in-process for one rank and gRPC for more."""
    there: tuple[Transport, ...] = get_args(Transport)
    wanted = ("shm", "inproc", "grpc") if world_size == 1 else ("shm", "grpc")
    return next(transport for name in wanted for transport in there if transport == name)


def ours(work: Work, options: OursOptions, name: str = "rayzero") -> Entry:
    """The entry of RayZero: rank processes, and one process with all owners. With the transport "inproc" the owners are
    in the rank's process."""
    return Entry(name=name, programs=partial(_ours_programs, partial(build_ours, work, options.overlap), options))


def _ours_programs(build: Callable[[Seat], Player], options: OursOptions, seats: Sequence[Seat]) -> list[Program]:
    transport = options.transport or best_transport(len(seats))
    return [partial(host_ranks, build, replace(options, transport=transport), tuple(seats))]


def host_ranks(build: Callable[[Seat], Player], options: OursOptions, seats: tuple[Seat, ...]) -> None:
    """The program of the owners' process: it holds the owners and runs the ranks."""
    assert options.transport is not None
    run_ranks(
        partial(_rank, build, seats),
        len(seats),
        options.owners,
        options.transport,
        options.transport != "inproc",
        threads=seats[0].threads,
        stall_timeout=3600.0,  # a rank may wait long for its turn
        tls=options.tls,
    )


def _rank(build: Callable[[Seat], Player], seats: tuple[Seat, ...], context: RankContext) -> None:
    context.device = torch.device(seats[context.rank].device)
    take_turns(build, seats[context.rank])


def build_ours(work: Work, overlap: Overlap, seat: Seat) -> Player:
    """Build RayZero's player: the same loop with rayzero.prepare."""
    torch.set_num_threads(seat.threads)
    model = work.model()
    config = ZeroConfig(precision=work.precision, overlap=overlap, max_grad_norm=CLIP)
    model, optimizer = prepare(model, torch.optim.AdamW(model.parameters(), **ADAMW), config)  # type: ignore[arg-type]

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return TrainingPlayer(work, seat, step)
