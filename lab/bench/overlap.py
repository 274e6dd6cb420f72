"""Measures how much of the optimizer's time a training loop with clipping sees if its compute leaves the CPU idle.

    python -m lab overlap [--mparams 64] [--units 16] [--optimizer adamw] [--rounds 5] [--steps 4] [--json]

The model's forward and backward sleep, like a loop whose GPU is busy, and its gradients are ready in memory. Backward
sleeps twice as long as forward. T_adam is the time of ``step()`` under overlap="none" after the clip: decision, update,
publish; with ``--optimizer muon``, whose units must be square matrices, that of Muon's. For T_forward / T_adam of 0.5,
1 and 2, a round measures in turn

    exposed   seconds a step beyond the sleep, for overlap="forward" and for overlap="none"
    floor     the same under a forward so long (4 x T_adam) that it hides the whole update: the last copy-out, norm,
              decision, first unit
    bound     max(0, T_adam - T_forward) + floor

At the end, the weights of both overlaps must have equal bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lab.bench.contestants import OursOptions, Overlap, best_transport, host_ranks
from lab.bench.figures import Spread, about, at_least_one
from lab.bench.figures import plain as as_plain
from lab.bench.turns import Contestant, Entry, Program, Seat, Turn, contest
from lab.bench.work import ADAMW, CLIP, Precision
from rayzero.config import ZeroConfig
from rayzero.engine.full_values import full_state_dict
from rayzero.engine.prepare import prepare
from rayzero.errors import RunFailedError
from rayzero.testing import Transport

RATIOS = (0.5, 1.0, 2.0)  # T_forward / T_adam
LONG = 4.0  # T_forward / T_adam at which the whole update hides
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)


# ---- a model that sleeps ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Clock:
    """The seconds that a unit's forward takes, and the seconds that all units have slept so far."""

    unit_s: float = 0.0
    slept_s: float = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep, and count the seconds that it really took."""
        start = time.perf_counter()
        if seconds > 0:
            time.sleep(seconds)  # stands for a busy GPU, which the benchmark measures against
        self.slept_s += time.perf_counter() - start


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, clock: Clock) -> Tensor:
        """Return a copy of ``x`` after the unit's time."""
        ctx.save_for_backward(weight)
        ctx.gradient, ctx.clock = gradient, clock
        clock.sleep(clock.unit_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the ready gradient after twice the unit's time."""
        (weight,) = ctx.saved_tensors
        ctx.clock.sleep(2 * ctx.clock.unit_s)
        return grad, ctx.gradient.view_as(weight), None, None


class Sleeper(nn.Module):
    """A unit of ``numel`` parameters that sleeps instead of computing."""

    def __init__(self, numel: int, clock: Clock, dtype: torch.dtype) -> None:
        super().__init__()
        side = math.isqrt(numel)
        shape = (side, side) if side * side == numel else (numel,)
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.float32, device="cpu"))
        self.gradient = torch.randn(numel, dtype=torch.float32, device="cpu").to(dtype)
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, a 0-dim tensor, unchanged."""
        out: Tensor = _Asleep.apply(x, self.weight, self.gradient, self.clock)  # type: ignore[no-untyped-call]
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The model's size."""

    mparams: int = 64  # 2^20 parameters
    units: int = 16
    precision: Precision = "bf16"
    optimizer: Literal["adamw", "muon"] = "adamw"


class SleepingPlayer:
    """A rank that trains sleepers. Its turns are "steps" (setting: seconds of one forward), "adam" and "digest"."""

    def __init__(self, shape: Shape, overlap: Overlap, seat: Seat) -> None:
        torch.set_num_threads(1)  # it computes nothing; with all cores its forward would begin after the update
        torch.manual_seed(0)
        dtype = torch.float32 if shape.precision == "fp32" else torch.bfloat16
        self._clock, self._units = Clock(), shape.units
        numel = (shape.mparams << 20) // shape.units
        model = nn.Sequential(*(Sleeper(numel, self._clock, dtype) for _ in range(shape.units)))
        config = ZeroConfig(precision=shape.precision, overlap=overlap, max_grad_norm=CLIP)
        optimizer = (
            torch.optim.Muon(model.parameters(), lr=ADAMW["lr"])  # type: ignore[arg-type]
            if shape.optimizer == "muon"
            else torch.optim.AdamW(model.parameters(), **ADAMW)  # type: ignore[arg-type]
        )
        self._model, self._optimizer = prepare(model, optimizer, config)

    def play(self, turn: Turn) -> dict[str, Any]:
        """See the class."""
        if turn.what == "digest":
            return {"digest": digest(full_state_dict(self._model))}
        if turn.what == "adam":
            return {"adam_s": [self._adam() for _ in range(turn.steps)]}
        self._clock.unit_s = turn.setting / self._units
        self._step()
        slept, start = self._clock.slept_s, time.perf_counter()
        for _ in range(turn.steps):
            self._step()
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "slept": self._clock.slept_s - slept}

    def _backward(self) -> None:
        self._model(torch.ones((), dtype=torch.float32, device="cpu")).backward()

    def _step(self) -> None:
        self._backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _adam(self) -> float:
        """Seconds of ``step()`` after the clip; under overlap="none" they are those of the whole update."""
        self._clock.unit_s = 0.0
        self._backward()
        self._optimizer.clip_grad_norm_(CLIP)
        start = time.perf_counter()
        self._optimizer.step()
        seconds = time.perf_counter() - start
        self._optimizer.zero_grad()
        return seconds


def digest(state: dict[str, Tensor]) -> str:
    """SHA-256 of the names and all bits of the tensors, in order."""
    found = hashlib.sha256()
    for name, tensor in state.items():
        found.update(name.encode())
        found.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def entry_of(shape: Shape, overlap: Overlap, options: OursOptions) -> Entry:
    """The entry of RayZero with one overlap."""
    return Entry(name=overlap, programs=partial(_programs, partial(SleepingPlayer, shape, overlap), options))


def _programs(build: Any, options: OursOptions, seats: Sequence[Seat]) -> list[Program]:
    return [partial(host_ranks, build, options, tuple(seats))]


# ---- rounds -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Samples:
    """Seconds a step at one ratio, by round."""

    forward_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)  # under overlap="forward"
    exposed_s: list[float] = field(default_factory=list)
    exposed_none_s: list[float] = field(default_factory=list)
    bound_s: list[float] = field(default_factory=list)
    beyond_floor: list[float] = field(default_factory=list)  # share of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one ratio."""

    ratio: float  # T_forward / T_adam
    forward_s: Spread
    step_s: Spread
    exposed_s: Spread  # overlap="forward"
    exposed_none_s: Spread  # overlap="none"
    bound_s: Spread
    beyond_floor: Spread  # (exposed - floor) / step
    of_bound: Spread  # exposed / bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The whole measurement."""

    adam_s: Spread
    floor_s: Spread
    rows: list[Row]
    equal_bits: bool


def measure(entries: Sequence[Entry], rounds: int, steps: int, threads: int) -> Found:
    """Run the measurement. ``entries``: overlap "none" and "forward". Raises RunFailedError if one cannot take part, or
    if their weights differ."""
    with tempfile.TemporaryDirectory() as folder, contest(entries, 1, threads, folder=folder) as (there, absent):
        if absent:
            raise RunFailedError("; ".join(f"{name}: {why}" for name, why in absent.items()))
        by_name = {contestant.name: contestant for contestant in there}
        samples = {ratio: Samples() for ratio in RATIOS}
        adam, floors = [], []
        for round_ in range(rounds + 1):
            adam_s, floor = one_round(by_name["none"], by_name["forward"], steps, samples if round_ else None)
            if round_:
                adam.append(adam_s)
                floors.append(floor)
        digests = {c.play(Turn(what="digest"))[0]["digest"] for c in there}
    if len(digests) != 1:
        raise RunFailedError('weights differ between overlap="none" and overlap="forward"')
    return Found(
        adam_s=Spread.of(adam),
        floor_s=Spread.of(floors),
        rows=[row_of(ratio, found) for ratio, found in samples.items()],
        equal_bits=True,
    )


def one_round(
    none: Contestant, forward: Contestant, steps: int, samples: dict[float, Samples] | None
) -> tuple[float, float]:
    """Play a round and add every ratio's samples; returns T_adam and the floor in seconds. Both contestants play the
    same number of steps, so that their weights can be compared."""
    both = [contestant.play(Turn(what="adam", steps=steps + 1))[0]["adam_s"][1:] for contestant in (none, forward)]
    adam_s = Spread.of(both[0]).median
    floor, _ = exposed(forward, LONG * adam_s, steps)
    exposed(none, 0.0, steps)
    for ratio, found in (samples or {}).items():
        forward_s = ratio * adam_s
        seen, step_s = exposed(forward, forward_s, steps)
        found.exposed_none_s.append(exposed(none, forward_s, steps)[0])
        found.forward_s.append(forward_s)
        found.step_s.append(step_s)
        found.exposed_s.append(seen)
        found.bound_s.append(max(0.0, adam_s - forward_s) + floor)
        found.beyond_floor.append((seen - floor) / step_s)
    return adam_s, floor


def exposed(contestant: Contestant, forward_s: float, steps: int) -> tuple[float, float]:
    """(seconds a step beyond the sleep, seconds of a whole step)."""
    account = contestant.play(Turn(steps=steps, setting=forward_s))[0]
    return (account["seconds"] - account["slept"]) / steps, account["seconds"] / steps


def row_of(ratio: float, found: Samples) -> Row:
    """A ratio's figures over the rounds."""
    return Row(
        ratio=ratio,
        forward_s=Spread.of(found.forward_s),
        step_s=Spread.of(found.step_s),
        exposed_s=Spread.of(found.exposed_s),
        exposed_none_s=Spread.of(found.exposed_none_s),
        bound_s=Spread.of(found.bound_s),
        beyond_floor=Spread.of(found.beyond_floor),
        of_bound=Spread.of(e / b for e, b in zip(found.exposed_s, found.bound_s, strict=True)),
    )


# ---- the command ------------------------------------------------------------------------------------------------


def text_of(found: Found) -> str:
    """The figures as text for people, in milliseconds."""
    lines = [f"T_adam {found.adam_s.text(1e3, 1)} ms, floor {found.floor_s.text(1e3, 1)} ms, bits equal"]
    for row in found.rows:
        lines.append(
            f"  T_forward/T_adam {row.ratio:3.1f}: exposed {row.exposed_s.text(1e3, 1):>18} ms a step of "
            f"{row.step_s.median * 1e3:.0f}, overlap none {row.exposed_none_s.text(1e3, 1):>20}, bound "
            f"{row.bound_s.text(1e3, 1):>18}; beyond the floor {row.beyond_floor.text(100, 1)} % of the step, "
            f"{row.of_bound.text()} x bound"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    found = argparse.ArgumentParser(
        prog="python -m lab overlap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--mparams", type=at_least_one, default=Shape().mparams, help="2^20 parameters")
    found.add_argument("--units", type=at_least_one, default=Shape().units)
    found.add_argument("--precision", choices=get_args(Precision), default=Shape().precision)
    found.add_argument("--optimizer", choices=("adamw", "muon"), default=Shape().optimizer)
    found.add_argument("--rounds", type=at_least_one, default=5)
    found.add_argument("--steps", type=at_least_one, default=4)
    found.add_argument("--threads", type=at_least_one, default=min(2, os.cpu_count() or 1), help="threads of the owner")
    found.add_argument("--transport", choices=get_args(Transport), help="default: the fastest one")
    found.add_argument("--json", action="store_true")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command: measure and print."""
    args = parser().parse_args(argv)
    shape = Shape(mparams=args.mparams, units=args.units, precision=args.precision, optimizer=args.optimizer)
    transport = args.transport or best_transport(1)
    facts = about() | {"shape": as_plain(shape), "transport": transport, "threads": args.threads, "clip": CLIP}
    facts |= {"rounds": args.rounds, "steps": args.steps}
    entries = [entry_of(shape, overlap, OursOptions(transport=transport)) for overlap in OVERLAPS]
    found = measure(entries, args.rounds, args.steps, args.threads)
    if args.json:
        print(json.dumps(facts | as_plain(found), indent=1))
        return
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(text_of(found))
