"""Measures what the simulation of a step needs to know of this machine: speeds of memory and kernels, costs of code.

Nothing here is fitted to a training step of real size. Speeds are of the real kernels and of the store's streams; what
the code itself takes is measured on a GPT with almost no parameters: per unit from the difference between a deep and a
shallow one, per step and message from the shallow one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter, process_time, thread_time
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from lab.bench.adam import OPTIONS, make_memory
from lab.bench.contestants import OursOptions, host_ranks, one_process_a_rank
from lab.bench.figures import timed
from lab.bench.store import StorePlayer, spec_of
from lab.bench.turns import Contestant, Entry, Player, Program, Seat, Turn, contest
from lab.bench.work import ADAMW, CLIP, Work, loss_of, lower_precision
from lab.simulation.cluster import Run, simulate
from lab.simulation.machines import Costs, Machine, Moving, MovingCosts, Options, Stream, Transport
from lab.simulation.ranks import Compute
from rayzero.concurrency.threads import use_torch_threads
from rayzero.config import ZeroConfig
from rayzero.engine.context import get_context
from rayzero.engine.prepare import plan_units, prepare
from rayzero.errors import RunFailedError, UnsupportedError
from rayzero.kernels import Segment, choose_adder
from rayzero.kernels.native import NativeKernel, NativeSquareSum, measure_bandwidth
from rayzero.kernels.rank_sum import GROUP
from rayzero.lead.decide import total_norm
from rayzero.protocol.messages import NormParts

__all__ = [
    "MESSAGES",
    "Profile",
    "measure_costs",
    "measure_machine",
    "measure_parts",
    "profile_entry",
    "profile_of",
    "run_of",
]

_LARGE = 16 << 20  # elements: more than caches hold
_SEVERAL = 4  # ranks whose gradients are added up
_ROUNDS = 5
_STREAM = 64 << 20  # bytes
_PARTS = 20_000
_TINY = Work(dim=32, layers=4, vocab=64, seq=8, batch=1)
_DEEPER = 24  # layers
_TINY_STEPS = 60
MESSAGES = 2 + 4  # that a lead takes and sends in a step with one rank and one owner
_UNITS: dict[str, Any] = {"min_unit_bytes": 1024}
"""Settings with which each block of a tiny model is a unit."""


# ---- speeds -----------------------------------------------------------------------------------------------------


def measure_machine(cores: int, owner_threads: int) -> Machine:
    """This host's speeds, each the best of a few rounds: two seconds in all. Raises UnsupportedError without the native
    library."""
    memory = measure_bandwidth(cores)
    if memory is None:
        raise UnsupportedError(
            "the native library is missing, so this machine cannot be calibrated; see rayzero doctor"
        )
    before = torch.get_num_threads()
    use_torch_threads(1)
    try:
        gradient, state = torch.randn(_LARGE, dtype=torch.float32, device="cpu").to(torch.bfloat16), make_memory(_LARGE)
        segments = [Segment(offset=0, length=_LARGE, ranks=(0,), options=OPTIONS, step=10)]
        kernel, squares = NativeKernel(), NativeSquareSum()
        out = torch.zeros_like(gradient)
        adam = _best(lambda: kernel.update(state, [gradient], segments, 1.0))
        several = [gradient, *(gradient.clone() for _ in range(_SEVERAL - 1))]
        of_all = [replace(segments[0], ranks=tuple(range(_SEVERAL)))]
        summing = _best(lambda: kernel.update(state, several, of_all, 1.0))
        summing_here = _best(partial(_add_up, [gradient, *(gradient.clone() for _ in range(GROUP - 1))], state.master))
        norm = _best(lambda: squares.parts([gradient], [0], [(0, _LARGE)]))
        copy = _best(lambda: out.copy_(gradient))
    finally:
        use_torch_threads(before)
    adam_core = 28 * _LARGE / adam  # gradient and parameter 2, master and moments 8 each
    alone = 26 * _LARGE / adam_core  # of the same update, all but its gradient
    return Machine(
        cores=cores,
        memory=memory,
        adam_core=adam_core,
        norm_core=2 * _LARGE / norm,
        sum_core=2 * _SEVERAL * _LARGE / max(summing - alone, 0.1 * summing),  # a busy machine may turn it round
        host_sum_core=2 * GROUP * _LARGE / summing_here,
        copy_core=2 * _LARGE / copy,
        owner_threads=owner_threads,
    )


def _add_up(gradients: Sequence[Tensor], out: Tensor) -> None:
    """As a rank does it for its host. ``out``: 1D, fp32, as long as each."""
    choose_adder().sum_group(out, gradients)


def measure_parts() -> float:
    """Seconds that the lead takes to add up one part of a norm."""
    parts = [NormParts(step=0, parts=tuple((i, 0, 1.0) for i in range(_PARTS)))]
    return _best(lambda: total_norm(0, parts, 1)) / _PARTS


def _best(act: Callable[[], object]) -> float:
    act()
    return min(timed(act) for _ in range(_ROUNDS))


# ---- players ----------------------------------------------------------------------------------------------------


class _Counted:
    """A rank that trains, and says what its process has computed. ``step(tokens)`` does one step."""

    def __init__(self, work: Work, seat: Seat, step: Callable[[Tensor], object]) -> None:
        self._work, self._seat, self._step = work, seat, step

    def play(self, turn: Turn) -> dict[str, Any]:
        """Returns ``seconds`` of the timed steps, and ``cpu`` seconds of the process and of the ``thread`` in them."""
        batches = [self._work.batch_of(turn.first + i, self._seat.rank) for i in range(turn.steps + 1)]
        self._step(batches[0])
        start, cpu, thread = perf_counter(), process_time(), thread_time()
        for batch in batches[1:]:
            self._step(batch)
        return {"seconds": perf_counter() - start, "cpu": process_time() - cpu, "thread": thread_time() - thread}


def build_tiny(work: Work, seat: Seat) -> Player:
    """RayZero on a model with almost no parameters."""
    torch.set_num_threads(seat.threads)
    model = work.model()
    adam = torch.optim.AdamW(model.parameters(), **ADAMW)  # type: ignore[arg-type]
    model, optimizer = prepare(model, adam, ZeroConfig(max_grad_norm=CLIP, **_UNITS))

    def step(tokens: Tensor) -> None:
        loss_of(model, tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return _Counted(work, seat, step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a micro-batch of a model computes by plain PyTorch; seconds."""

    forward: tuple[float, ...]  # by unit
    backward: tuple[float, ...]

    @property
    def compute(self) -> Compute:
        """As the simulation wants it."""
        return Compute(forward=self.forward, backward=self.backward)

    @property
    def total(self) -> float:
        """Forward and backward."""
        return sum(self.forward) + sum(self.backward)


class _Profiled:
    """Computes forward and backward alone, and times each unit's forward. A unit's backward is taken to be the same
    share of the whole backward; what no unit computes, such as the loss, counts with the root's."""

    def __init__(self, work: Work, settings: dict[str, Any], seat: Seat) -> None:
        torch.set_num_threads(seat.threads)
        self._work, self._seat, self._model = work, seat, work.model()
        plan = plan_units(self._model, ZeroConfig(precision=work.precision, **settings))
        lower_precision(self._model, work.dtype)
        self._units = [0.0] * len(plan.layout.units)
        self._root = plan.units_of_module[""][0]
        for index, name in enumerate(plan.modules):
            if name:
                self._time(index, self._model.get_submodule(name))

    def _time(self, unit: int, module: nn.Module) -> None:
        began: list[float] = []
        module.register_forward_pre_hook(lambda *_: began.append(perf_counter()))

        def ended(*_: Any) -> None:
            self._units[unit] += perf_counter() - began.pop()

        module.register_forward_hook(ended)

    def play(self, turn: Turn) -> dict[str, Any]:
        """Returns ``forward`` and ``backward`` seconds of each step, seconds by unit, and ``cpu`` seconds in all."""
        self._one(turn.first)
        self._units = [0.0] * len(self._units)
        cpu = process_time()
        steps = [self._one(turn.first + 1 + i) for i in range(turn.steps)]
        forward, backward = zip(*steps, strict=True)
        return {"forward": forward, "backward": backward, "units": self._units, "cpu": process_time() - cpu}

    def _one(self, step: int) -> tuple[float, float]:
        tokens = self._work.batch_of(step, self._seat.rank)
        start = perf_counter()
        loss = loss_of(self._model, tokens)
        middle = perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        end = perf_counter()
        self._model.zero_grad()
        return middle - start, end - middle


def build_profiled(work: Work, settings: dict[str, Any], seat: Seat) -> Player:
    """See ``_Profiled``."""
    return _Profiled(work, settings, seat)


def profile_entry(work: Work, settings: dict[str, Any]) -> Entry:
    """Plain PyTorch's forward and backward, by as many processes as there are seats."""
    return Entry(name="computing", programs=partial(one_process_a_rank, partial(build_profiled, work, settings)))


def profile_of(accounts: Sequence[dict[str, Any]], root: int) -> Profile:
    """The slowest process' medians, spread over the units by their share of the forward."""
    forward = max(median(account["forward"]) for account in accounts)
    backward = max(median(account["backward"]) for account in accounts)
    slowest = max(accounts, key=lambda account: sum(account["forward"]))
    of_all = sum(slowest["forward"])
    shares = [seconds / of_all for seconds in slowest["units"]]
    shares[root] += 1 - sum(shares)
    return Profile(
        forward=tuple(share * forward for share in shares), backward=tuple(share * backward for share in shares)
    )


class _Fetching(StorePlayer):
    """Fetches, or pushes and steps, the one unit again and again."""

    def play(self, turn: Turn) -> dict[str, Any]:
        """``what``: "fetch" or "push". Returns what each of these took alone: ``seconds``, the process' ``cpu``, and
        the CPU seconds of each of the owners' ``threads``."""
        unit, found = self._units[0], []
        self._fetch(unit, self._out[0])
        for _ in range(turn.steps):
            if turn.what == "fetch":
                found.append(_moved(partial(self._fetch, unit, self._out[0]), turn.pids))
            else:
                found.append(_moved(partial(self._push, unit, self._grads[0]), turn.pids))
                self._commit()
                self._fetch(unit, self._out[0])
        return {"moved": found}


def _moved(act: Callable[[], object], pids: Sequence[int]) -> dict[str, Any]:
    before, cpu = _thread_seconds(pids), process_time()
    seconds = timed(act)
    cpu = process_time() - cpu
    threads = {thread: after - before.get(thread, 0.0) for thread, after in _thread_seconds(pids).items()}
    return {"seconds": seconds, "cpu": cpu, "threads": threads}


def _thread_seconds(pids: Sequence[int]) -> dict[int, float]:
    """CPU seconds of each thread so far. The kernel counts in ticks of 10 ms, so that only sums of many are exact."""
    found = [thread for pid in pids for thread in psutil.Process(pid).threads()]
    return {thread.id: thread.user_time + thread.system_time for thread in found}


def build_fetching(size: int, seat: Seat) -> Player:
    """Build the player of the calling rank's store."""
    torch.set_num_threads(seat.threads)
    connect = get_context().connect
    assert connect is not None
    return _Fetching(connect(0), spec_of([size]))


def _programs(build: Any, options: OursOptions, seats: Sequence[Seat]) -> list[Program]:
    return [partial(host_ranks, build, options, tuple(seats))]


# ---- costs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiny:
    """A step of a tiny model; seconds."""

    wall: float
    thread: float  # CPU of the computing thread, without what the model computes
    aside: float  # of the rank's other threads; with owners in its process, theirs too
    owners: float  # of the owners' process
    units: int
    run: Run  # the same, to be simulated


def measure_costs(transport: Transport, machine: Machine) -> Costs:
    """What RayZero's code takes over a transport: half a minute. One rank and one owner, one thread each."""
    shallow, deep = (_tiny(replace(_TINY, layers=layers), transport, machine) for layers in (_TINY.layers, _DEEPER))
    apart = deep.units - shallow.units
    alone = transport == "inproc"  # then the rank's process is the owner's, too
    unit_s = max(0.0, (deep.thread - shallow.thread) / apart)
    beside = max(0.0, (deep.aside - shallow.aside) / apart)
    shard_s = beside if alone else max(0.0, (deep.owners - shallow.owners) / apart)
    rest = 0.0 if alone else max(0.0, shallow.owners - shallow.units * shard_s)
    costs = replace(
        _FREE,
        unit_s=unit_s,
        aside_s=0.0 if alone else beside,
        step_s=max(0.0, shallow.thread - shallow.units * unit_s),
        shard_s=shard_s,
        message_s=rest / MESSAGES,
        moving=_measure_moving(machine) if transport == "grpc" else {},
    )
    at_least = simulate(replace(shallow.run, costs=costs)).seconds
    hops = 0 if alone else 5  # from a finish to a publication
    return replace(costs, latency_s=max(0.0, shallow.wall - at_least) / hops if hops else 0.0)


def _tiny(work: Work, transport: Transport, machine: Machine) -> _Tiny:
    options = OursOptions(transport=transport, owners=1)
    entries = [
        profile_entry(work, _UNITS),
        Entry(name="tiny", programs=partial(_programs, partial(build_tiny, work), options)),
    ]
    turn = Turn(steps=_TINY_STEPS)
    with tempfile.TemporaryDirectory() as folder, contest(entries, 1, 1, folder=folder) as (there, absent):
        _require(absent)
        computing, ours = there
        ours.play(turn)
        found = [
            (computing.play(turn)[0], _owners_cpu(ours), ours.play(turn)[0], _owners_cpu(ours)) for _ in range(_ROUNDS)
        ]
    plan = plan_units(work.model("meta"), ZeroConfig(**_UNITS))
    root = plan.units_of_module[""][0]
    middle = sorted(found, key=lambda each: each[2]["seconds"])[len(found) // 2]
    computed = median(each[0]["cpu"] for each in found)
    return _Tiny(
        wall=median(each[2]["seconds"] for each in found) / turn.steps,
        thread=(median(each[2]["thread"] for each in found) - computed) / turn.steps,
        aside=median(each[2]["cpu"] - each[2]["thread"] for each in found) / turn.steps,
        owners=median(after - before for _, before, _, after in found) / turn.steps,
        units=len(plan.layout.units),
        run=run_of(work, profile_of([middle[0]], root), transport, 1, 1, machine, _FREE, **_UNITS),
    )


_FREE = Costs(
    unit_s=0.0, aside_s=0.0, step_s=0.0, shard_s=0.0, message_s=0.0, latency_s=0.0, moving={}
)  # fmt: skip


def _owners_cpu(contestant: Contestant) -> float:
    """CPU seconds of the processes that are not ranks, so far."""
    times = [psutil.Process(pid).cpu_times() for pid in contestant.owner_pids]
    return sum(each.user + each.system for each in times)


_MOVING: dict[Moving, OursOptions] = {
    "plain": OursOptions(transport="grpc"),
    "encrypted": OursOptions(transport="grpc", tls=True),
}


def _measure_moving(machine: Machine) -> dict[Moving, MovingCosts]:
    """What bytes take that travel over loopback in each of the ways there are."""
    return {moving: _streams(options, machine) for moving, options in _MOVING.items()}


def _streams(options: OursOptions, machine: Machine) -> MovingCosts:
    entry = Entry(name="streams", programs=partial(_programs, partial(build_fetching, _STREAM), options))
    with tempfile.TemporaryDirectory() as folder, contest([entry], 1, 1, folder=folder) as (there, absent):
        _require(absent)
        fetches, pushes = (there[0].play(Turn(steps=4 * _ROUNDS, what=way))[0]["moved"] for way in ("fetch", "push"))
    return MovingCosts(
        fetch=costs_of_stream(fetches, _STREAM),
        push=costs_of_stream(pushes, _STREAM, beside_s=1 / machine.norm_core),
    )


def costs_of_stream(moves: Sequence[dict[str, Any]], size: int, *, beside_s: float = 0.0) -> Stream:
    """What moving ``size`` bytes takes, for each byte.

    moves: what each of them took; see ``_moved``. beside_s: what the owner did beside moving, for each byte: the norm
    of what was pushed."""
    moved = size * len(moves)
    of_owner = sum(sum(each["threads"].values()) for each in moves) / moved
    return Stream(
        speed=size / median(each["seconds"] for each in moves),
        rank_byte_s=sum(each["cpu"] for each in moves) / moved,
        owner_byte_s=max(0.0, of_owner - beside_s),
    )


def _require(absent: dict[str, str]) -> None:
    if absent:
        raise RunFailedError("; ".join(f"{name}: {why}" for name, why in absent.items()))


def run_of(
    work: Work,
    found: Profile,
    transport: Transport,
    ranks: int,
    owners: int,
    machine: Machine,
    costs: Costs,
    *,
    threads: int = 1,
    **settings: Any,
) -> Run:
    """The run of a benchmark's model on this host. ``threads``: of each rank and of each owner."""
    zero = ZeroConfig(precision=work.precision, max_grad_norm=CLIP, **settings)
    plan = plan_units(work.model("meta"), zero)
    return Run(
        layout=plan.layout,
        root=frozenset(plan.units_of_module[""]),
        zero=zero,
        compute=found.compute,
        rank_hosts=(0,) * ranks,
        owner_hosts=(0,) * owners,
        machine=replace(machine, owner_threads=threads),
        costs=costs,
        options=Options(transport=transport, compute_threads=threads),
    )
