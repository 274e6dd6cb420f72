"""Measures what the simulation needs to know of this machine, and compares simulated steps with real ones.

    python -m lab simulation --save here.json                          # measure this machine, about three minutes
    python -m lab simulation --load here.json --compare [--cases 4]    # real steps against simulated ones
    python -m lab simulation --load here.json --lead lead.json --save here.json    # what hundreds of ranks cost a lead

What a message costs the lead is measured with one rank. Among hundreds it is several times less, and less still in the
call of a host's door: ``lead.json`` has the lines of ``python -m lab many_ranks --door-of 1 8 --json``.

Each case is a model, a transport and numbers of ranks and owners, of one thread each, that share ``--cores`` cores.
What the model computes is measured with plain PyTorch in the same rounds, by as many processes as there are ranks;
nothing of RayZero's own steps of that case goes into its prediction. A round in which others took more than 5 % of the
machine is repeated while ``--patience`` (seconds, for each case) lasts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from lab.bench.contestants import OursOptions, Overlap, ours
from lab.bench.figures import Busy, Spread, about, at_least_one, plain
from lab.bench.step import MOST_DISTURBED, confined_to
from lab.bench.turns import Turn, contest
from lab.bench.work import Work
from lab.calibration.lead_costs import LeadCosts, read_runs
from lab.calibration.machine import Profile, measure_costs, measure_machine, measure_parts, profile_entry, profile_of
from lab.calibration.machine import run_of as run_of_work
from lab.simulation.cluster import Simulated, simulate
from lab.simulation.machines import Measured, Transport
from rayzero.errors import ConfigError, RunFailedError

CAUSES = ("optimizer", "fetch", "push")
HEAD = (
    "| transport, ranks x owners, model | computing, ms | simulated | measured | ratio | waits of both, ms | "
    "others |\n|---|--:|--:|--:|--:|---|--:|"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A real step to compare with."""

    ranks: int
    owners: int
    transport: Transport
    work: Work
    overlap: Overlap = "forward"

    @property
    def name(self) -> str:
        """As tables show it."""
        work = self.work
        return (
            f"{self.transport}, {self.ranks} x {self.owners}, {work.count_params() / 1e6:.0f}M {work.precision}, "
            f"overlap {self.overlap}"
        )


def cases() -> list[Case]:
    """What is compared: none of it was measured for the calibration."""
    small = Work(dim=512, layers=8, vocab=8192, seq=64, batch=1)  # few tokens, so that most of a step is not computing
    wide = replace(small, dim=1024, layers=4)
    return [
        Case(ranks=1, owners=1, transport="inproc", work=small),
        Case(ranks=1, owners=1, transport="shm", work=small),
        Case(ranks=1, owners=2, transport="shm", work=replace(wide, precision="bf16"), overlap="none"),
        Case(ranks=2, owners=1, transport="shm", work=small),
        Case(ranks=2, owners=2, transport="shm", work=replace(small, precision="bf16")),
        Case(ranks=2, owners=3, transport="shm", work=wide),
        Case(ranks=1, owners=1, transport="grpc", work=replace(small, precision="bf16")),
        Case(ranks=2, owners=2, transport="grpc", work=wide),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A case's real steps and its simulated one; seconds."""

    case: Case
    step: Spread
    waits: dict[str, float]  # medians, by cause
    computing: float  # of plain PyTorch
    others: float  # share of the machine that others took, the median of rounds
    simulated: Simulated

    @property
    def ratio(self) -> float:
        """Simulated over measured."""
        return self.simulated.seconds / self.step.median


def measure_here(cores: int) -> Measured:
    """Calibrate: about three minutes."""
    machine = measure_machine(cores, owner_threads=1)
    transports: tuple[Transport, ...] = get_args(Transport)
    return Measured(
        machine=machine,
        costs={transport: measure_costs(transport, machine) for transport in transports},
        part_s=measure_parts(),
    )


def with_lead(here: Measured, lead: Path) -> Measured:
    """The same with what a lead of many ranks takes, in the costs of gRPC. Raises ConfigError if these were not
    measured, or the file has something else."""
    if "grpc" not in here.costs:
        raise ConfigError("--lead adds to the costs of grpc, which were not measured; leave out --load, or --lead")
    found = LeadCosts.fit(read_runs(lead))
    return replace(here, costs={**here.costs, "grpc": found.put_into(here.costs["grpc"])})


def compare(case: Case, here: Measured, cores: int, rounds: int, steps: int, patience: float) -> Compared:
    """Let plain PyTorch compute and RayZero train, in turn, and simulate the same. Raises RunFailedError if one of them
    cannot."""
    options = OursOptions(transport=case.transport, owners=case.owners, overlap=case.overlap)
    entries = [profile_entry(case.work, {}), ours(case.work, options)]
    profiles: list[Profile] = []
    seconds: list[float] = []
    waits: list[dict[str, float]] = []
    taken: list[float] = []
    first, warm, deadline = 0, False, time.perf_counter() + patience
    with (
        confined_to(cores),
        tempfile.TemporaryDirectory() as folder,
        contest(entries, case.ranks, 1, folder=folder) as (there, absent),
    ):
        if absent:
            raise RunFailedError("; ".join(f"{name}: {why}" for name, why in absent.items()))
        computing, training = there
        pids = [pid for each in there for pid in (*each.rank_pids, *each.owner_pids)]
        while len(seconds) < rounds:
            before, turn = Busy.now(pids), Turn(first=first, steps=steps)
            computed, trained = computing.play(turn), training.play(turn)
            others = Busy.now(pids).others_since(before)
            first += steps + 1
            if warm and (others <= MOST_DISTURBED or time.perf_counter() > deadline):
                profiles.append(profile_of(computed, root=0))
                seconds.append(max(account["seconds"] for account in trained) / steps)
                waits.append({cause: max(a["waits"][cause] for a in trained) / steps for cause in CAUSES})
                taken.append(others)
            warm = True
    middle = sorted(profiles, key=lambda each: each.total)[len(profiles) // 2]
    run = run_of_work(
        case.work,
        middle,
        case.transport,
        case.ranks,
        case.owners,
        replace(here.machine, cores=cores),
        here.costs[case.transport],
        overlap=case.overlap,
    )
    return Compared(
        case=case,
        step=Spread.of(seconds),
        waits={cause: Spread.of(each[cause] for each in waits).median for cause in CAUSES},
        computing=middle.total,
        others=Spread.of(taken).median,
        simulated=simulate(replace(run, part_s=here.part_s), steps=4),
    )


def text_of(found: Compared) -> str:
    """A case as a line of a table."""
    waits = ", ".join(
        f"{cause} {found.simulated.waits[cause] * 1e3:.0f}/{found.waits[cause] * 1e3:.0f}" for cause in CAUSES
    )
    return (
        f"| {found.case.name} | {found.computing * 1e3:.0f} | {found.simulated.seconds * 1e3:.0f} | "
        f"{found.step.text(1e3, 0)} | {found.ratio:.2f} | {waits} | {found.others:.0%} |"
    )


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    found = argparse.ArgumentParser(
        prog="python -m lab simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--load", type=Path, help="a file of --save, instead of measuring")
    found.add_argument("--lead", type=Path, help="lines of python -m lab many_ranks --json, with and without doors")
    found.add_argument("--save", type=Path, help="write what was measured")
    found.add_argument("--compare", action="store_true", help="compare with real steps")
    found.add_argument("--cases", type=int, nargs="+", help="numbers of cases, from 0 on; default: all")
    found.add_argument("--cores", type=at_least_one, default=min(2, os.cpu_count() or 1))
    found.add_argument("--rounds", type=at_least_one, default=5)
    found.add_argument("--steps", type=at_least_one, default=3, help="timed steps of a round")
    found.add_argument("--patience", type=float, default=20.0, help="seconds for each case")
    found.add_argument("--json", action="store_true")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command: measure and print. Raises ConfigError for a case that does not exist, or a file to write that
    cannot be in its folder."""
    args = parser().parse_args(argv)
    every = cases()
    chosen = range(len(every)) if args.cases is None else args.cases
    if wrong := [number for number in chosen if number not in range(len(every))]:
        raise ConfigError(f"--cases has {wrong}, but there are only 0 to {len(every) - 1}")
    if args.save and not os.access(args.save.parent, os.W_OK):
        raise ConfigError(f"--save is {args.save}, but there is no folder {args.save.parent} that can be written to")
    here = Measured.read(args.load) if args.load else measure_here(args.cores)
    here = here if args.lead is None else with_lead(here, args.lead)
    if args.save:
        args.save.write_text(json.dumps(here.to_json(), indent=1) + "\n")
    if not args.json:
        print(json.dumps(here.to_json(), indent=1))
    if args.compare and not args.json:
        print(HEAD)
    found = []
    for number in chosen if args.compare else ():
        found.append(compare(every[number], here, args.cores, args.rounds, args.steps, args.patience))
        if not args.json:
            print(text_of(found[-1]), flush=True)
    if args.json:
        rows = [plain(each) | {"ratio": each.ratio} for each in found]
        print(json.dumps(about() | {"here": here.to_json(), "cases": rows}))
