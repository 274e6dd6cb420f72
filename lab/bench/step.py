"""Measures a whole training step against plain PyTorch, and other entries, with the same model, tokens and precision.

    python -m lab step [--worlds 1 2] [--precisions fp32 bf16] [--rounds 5] [--steps 3] [--transport shm] [--json]
    python -m lab step --peers      # FSDP2 and DeepSpeed ZeRO-3 too, where they are installed: see lab/README.md

A cell is a number of ranks and a precision. All contestants of a cell are up together, each in its own processes, and
take turns A B C A B C ...; a turn is one step that is not timed and ``--steps`` that are. All share ``--cores`` cores:
each of R ranks has cores / R threads, and RayZero's owners share the same cores. A ratio is within one round; a round
in which others took more than 5 % of the machine is repeated while ``--patience`` lasts. The loss of every step must
agree with plain PyTorch's within TOLERANCE, or the cell fails. Resident bytes are the most seen during a further turn,
less what the ranks' processes held before they built anything. OMP_* variables hold for all contestants.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from statistics import fmean
from typing import Any, get_args

from lab.bench.contestants import CAUSES, OursOptions, best_transport, ours, plain
from lab.bench.figures import Busy, Spread, about, at_least_one
from lab.bench.figures import plain as as_plain
from lab.bench.peers import peers
from lab.bench.turns import Contestant, Entry, Turn, contest
from lab.bench.work import Work
from rayzero.errors import RunFailedError
from rayzero.testing import Transport

PLAIN = "plain"
TOLERANCE = {"fp32": 2e-3, "bf16": 3e-2}  # relative difference of a step's loss
MOST_DISTURBED = 0.05  # share of the CPUs that others may take in a round


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How many rounds and timed steps a contest has, and how long it waits for undisturbed rounds."""

    rounds: int = 5
    steps: int = 3
    patience_s: float = 60.0


@dataclass(slots=True)
class Score:
    """A contestant's figures, round by round."""

    step_s: list[float] = field(default_factory=list)  # seconds a step of the slowest rank
    losses: list[float] = field(default_factory=list)  # of every step, mean over ranks
    waits_s: list[dict[str, float]] = field(default_factory=list)  # seconds a step by cause, of the slowest rank
    device_bytes: int = 0

    def add(self, accounts: Sequence[dict[str, Any]], steps: int, *, counts: bool) -> None:
        """Add the ranks' results of one turn. ``counts``: whether its time counts."""
        self.losses += [fmean(losses) for losses in zip(*(account["losses"] for account in accounts), strict=True)]
        self.device_bytes = max(account.get("device_bytes", 0) for account in accounts)
        if counts:
            self.step_s.append(max(account["seconds"] for account in accounts) / steps)
            waits = [account["waits"] for account in accounts]
            self.waits_s.append({cause: max(w[cause] for w in waits) / steps for cause in CAUSES})


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One contestant in one cell."""

    step_s: Spread
    ratio: Spread  # to plain's step, round by round
    loss: float  # of the last step
    loss_apart: float  # largest relative difference from plain's loss of the same step
    rank_bytes_per_param: float  # resident in all ranks' processes together, over the model's parameters
    owner_bytes_per_param: float  # the same of the other processes
    waits_s: dict[str, float]  # seconds a step that the loop waited, by cause, medians
    device_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The results of one contest."""

    world_size: int
    precision: str
    params: int
    others: Spread  # share of the CPUs that others took, over the rounds that count
    results: dict[str, Result]
    absent: dict[str, str]  # who could not take part, and why


def hold(
    entries: Sequence[Entry], work: Work, world_size: int, threads: int, rules: Rules, device: str = "cpu"
) -> Cell:
    """Hold the contest of one cell. Raises RunFailedError if losses disagree or if plain PyTorch cannot take part."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contest(entries, world_size, threads, folder=folder, device=device) as (there, absent),
    ):
        if PLAIN not in [contestant.name for contestant in there]:
            raise RunFailedError(f"there is nothing to compare with: {PLAIN}: {absent.get(PLAIN, 'not entered')}")
        scores, others, step = play_rounds(there, rules)
        sizes = {c.name: c.peak_bytes(Turn(first=step, steps=rules.steps)) for c in there}
        bases = {c.name: c.base_bytes for c in there}
    results = {
        name: result_of(score, scores[PLAIN], sizes[name], bases[name], work.count_params())
        for name, score in scores.items()
    }
    check_losses(results, TOLERANCE[work.precision])
    return Cell(
        world_size=world_size,
        precision=work.precision,
        params=work.count_params(),
        others=Spread.of(others),
        results=results,
        absent=absent,
    )


def play_rounds(there: Sequence[Contestant], rules: Rules) -> tuple[dict[str, Score], list[float], int]:
    """Play a round that does not count, then ``rules.rounds`` that do; returns (scores, the share of the CPUs that
    others took in each, the next step)."""
    scores = {contestant.name: Score() for contestant in there}
    pids = [pid for c in there for pid in (*c.rank_pids, *c.owner_pids)]
    others: list[float] = []
    step, warm, deadline = 0, False, time.perf_counter() + rules.patience_s
    while len(others) < rules.rounds:
        before = Busy.now(pids)
        turn = Turn(first=step, steps=rules.steps)
        accounts = {contestant.name: contestant.play(turn) for contestant in there}
        taken = Busy.now(pids).others_since(before)
        counts = warm and (taken <= MOST_DISTURBED or time.perf_counter() > deadline)
        for name, score in scores.items():
            score.add(accounts[name], rules.steps, counts=counts)
        if counts:
            others.append(taken)
        step, warm = step + rules.steps + 1, True
    return scores, others, step


def result_of(score: Score, reference: Score, size: tuple[int, int], base: int, params: int) -> Result:
    """A contestant's figures. ``size``: bytes of its ranks and of its other processes; ``base``: bytes."""
    pairs = zip(score.losses, reference.losses, strict=True)
    return Result(
        step_s=Spread.of(score.step_s),
        ratio=Spread.of(a / b for a, b in zip(score.step_s, reference.step_s, strict=True)),
        loss=score.losses[-1],
        loss_apart=max(abs(a - b) / b for a, b in pairs),
        rank_bytes_per_param=(size[0] - base) / params,
        owner_bytes_per_param=size[1] / params,
        waits_s={cause: Spread.of(w[cause] for w in score.waits_s).median for cause in CAUSES},
        device_bytes=score.device_bytes,
    )


def check_losses(results: dict[str, Result], tolerance: float) -> None:
    """Raise RunFailedError, with every contestant's difference, if one is further from plain's loss than
    ``tolerance``."""
    if any(not result.loss_apart <= tolerance for result in results.values()):
        told = ", ".join(f"{name} {result.loss_apart:.1e}" for name, result in results.items())
        raise RunFailedError(f"losses differ from plain PyTorch's by more than {tolerance:.0e}: {told}")


# ---- the command ------------------------------------------------------------------------------------------------


def text_of(cell: Cell) -> str:
    """The cell as a table for people."""
    lines = [
        f"{cell.world_size} rank(s), {cell.precision}, {cell.params / 1e6:.1f}M parameters; "
        f"others took {cell.others.text(100, 0)} % of the machine"
    ]
    for name, r in cell.results.items():
        waits = ", ".join(f"{cause} {seconds * 1e3:.0f}" for cause, seconds in r.waits_s.items() if seconds > 5e-4)
        lines.append(
            f"  {name:14} {r.step_s.text(1e3, 0):>20} ms a step   {r.ratio.text():>18} x plain   "
            f"loss apart {r.loss_apart:.0e}   ranks {r.rank_bytes_per_param:5.1f} + owners "
            f"{r.owner_bytes_per_param:4.1f} B/param" + (f"   waited (ms): {waits}" if waits else "")
        )
    lines += [f"  {name:14} cannot take part: {why}" for name, why in cell.absent.items()]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    found = argparse.ArgumentParser(
        prog="python -m lab step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--worlds", type=at_least_one, nargs="+", default=[1, 2])
    found.add_argument("--precisions", nargs="+", choices=list(TOLERANCE), default=list(TOLERANCE))
    found.add_argument("--transport", choices=get_args(Transport), help="default: the fastest one")
    found.add_argument("--owners", type=at_least_one, help="default: one for each rank")
    found.add_argument("--cores", type=at_least_one, default=2, help="cores that all contestants share")
    for name in ("rounds", "steps"):
        found.add_argument(f"--{name}", type=at_least_one, default=getattr(Rules(), name))
    found.add_argument("--peers", action="store_true", help="compare with FSDP2 and DeepSpeed ZeRO-3, too")
    found.add_argument("--patience", type=float, default=Rules().patience_s, help="seconds for each cell")
    for name in ("dim", "layers", "vocab", "seq", "batch"):
        found.add_argument(f"--{name}", type=at_least_one, default=getattr(Work(), name))
    found.add_argument("--json", action="store_true")
    return found


@contextmanager
def confined_to(cores: int) -> Iterator[None]:
    """Confine processes that start inside to the first ``cores`` cores, which they share."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command: measure and print."""
    args = parser().parse_args(argv)
    rules = Rules(rounds=args.rounds, steps=args.steps, patience_s=args.patience)
    base = Work(dim=args.dim, layers=args.layers, vocab=args.vocab, seq=args.seq, batch=args.batch)
    facts = about() | {"work": asdict(base), "rules": asdict(rules), "cores": args.cores}
    facts["transports"] = {world: args.transport or best_transport(world) for world in args.worlds}
    cells = []
    for world, precision in product(args.worlds, args.precisions):
        work = replace(base, precision=precision)
        options = OursOptions(transport=args.transport, owners=args.owners or world)
        entries = [plain(work), ours(work, options), *(peers(work) if args.peers else [])]
        with confined_to(args.cores):
            cells.append(hold(entries, work, world, max(1, args.cores // world), rules))
        if not args.json:
            print(text_of(cells[-1]), flush=True)
    if args.json:
        print(json.dumps(facts | {"cells": as_plain(cells)}, indent=1))
    else:
        print(", ".join(f"{name} {value}" for name, value in facts.items()))
