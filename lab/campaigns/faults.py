"""A campaign of seeded faults: processes of small runs are killed and stopped at random moments and at named points.
Every run must end with the bits of one that was not disturbed, and leave nothing.

    scripts/soak faults [--seed 0] [--count 1000] [--each 20] [--json OUT]
    scripts/soak faults --seed 0 --run 17                       # one run again, with the same faults
    scripts/soak faults --scale --count 200 --each 5            # mostly other numbers of owners, and faults meanwhile
    scripts/soak faults --scale --apart --count 100 --each 2    # owners 1 and 3 share no memory with the others
    scripts/soak faults --apart --backwards 3 --count 100       # gradients are added up over three backwards
    scripts/soak faults --scale --precision bf16 --count 200    # masters are kept split
    scripts/soak faults --slope                                 # what 5,000 steps with 50 kills leave in memory

A run has 2 ranks and 1 to 3 owners, each a process, and a training loop with everything in it that can be cut: norm,
clip, scheduler, means, checkpoints, writes. Faults come while the run goes on, or while it still recovers. Their kinds:

    owner, rank           SIGKILL of one, at a random moment
    again                 SIGKILL of a member, and of the process that takes its place
    owners                SIGKILL of all owners at once
    both                  SIGKILL of an owner and a rank at once
    stop owner, stop rank SIGSTOP, for longer than the others wait
    owner.adam kill, ...  an act at a point of tests/support/faults.py, at its nth time from now
    then owner.redo kill  SIGKILL of an owner (or a rank), and a fault at a point of the recovery from that
    scale                 a request for another number of owners, 1 to 5
    scale, then owner     the same, and one of the above 0 to 0.6 s later; scale: another request
    scale owner.enter kill  a request, and an act at a point of the change

Compared, bit for bit: weights, moments, step counts, every loss of every rank, every mean. Seconds: from the signal
until both ranks have ended two more steps than they had (and there are as many owners as were asked for). What a run
may not leave: slabs, processes, open files and
open ports.

``--slope`` kills half of the members in turn and reports how much the private memory, the files and the threads of the
others and of the parent grow; then the same with the other half.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from lab.campaigns import fault_slope
from lab.campaigns.disturbed import (
    RANKS,
    base,
    differences,
    end_of,
    hosts_of,
    loop,
    owners_of,
    owners_there,
    pids,
    step_of,
    steps_of,
)
from rayzero.elastic.scaling import ScaleRequest, ask
from rayzero.engine.context import RankContext
from rayzero.slabs.sweep import SHARED_MEMORY, list_slabs
from rayzero.testing import run_ranks
from tests.support import faults as named

APART = 1, 3  # owners on another host, if any are
STALL_S = 8.0  # stopped processes are killed after half of it
PATIENCE_S = 120.0  # without a step, a run counts as hanging
KINDS = {"owner": 30, "rank": 30, "again": 10, "owners": 8, "both": 14, "stop owner": 4, "stop rank": 4}  # weights
ACTS = {"kill": 60, "delay": 15, "duplicate": 20, "stop": 5}  # weights at a point
OFTEN = (  # points that every few steps come to, in this loop
    *("owner.receive", "owner.collect", "owner.norm", "owner.apply", "owner.decided", "owner.adam", "owner.updated"),
    *("owner.publish", "owner.between-shards", "owner.idle", "owner.write", "owner.save", "owner.saved"),
    *("lead.finish", "lead.commit", "lead.norm", "lead.before-record", "lead.record", "lead.after-record"),
    *("lead.ordered", "lead.tell", "lead.mean", "lead.write", "lead.save", "lead.before-manifest"),
    *("lead.after-manifest", "rank.fetch", "rank.forward", "rank.backward", "rank.push", "rank.announce"),
    *("rank.pushed", "rank.pushed-last", "rank.clip", "rank.clipped", "rank.keep", "rank.finish", "rank.finished"),
    *("rank.mean", "rank.mean-asked", "rank.write", "rank.write-asked", "rank.save", "rank.save-asked"),
)
RECOVERING = {  # points that only a recovery comes to -> who has to die for that
    "owner.start": "owner",
    "owner.took-over": "owner",
    "owner.attach": "owner",
    "owner.redo": "owner",
    "rank.rejoin": "owner",
    "rank.attach": "rank",
    "rank.attached": "rank",
}
SCALED = {  # weights of what happens after a request for other owners
    "": 12,
    "owner": 30,
    "rank": 22,
    "owners": 6,
    "both": 14,
    "again": 6,
    "scale": 6,
    "stop owner": 2,
    "stop rank": 2,
}
CHANGING = {  # points of a change -> which owners come there; "": ranks do
    **dict.fromkeys(("owner.hold", "owner.held", "owner.settle", "owner.settled"), "old"),
    **dict.fromkeys(("owner.prepare", "owner.preparing", "owner.prepared", "owner.took-over"), "new"),
    **dict.fromkeys(("owner.let-stand", "owner.stands"), "lead"),
    **dict.fromkeys(("owner.enter", "owner.entering", "owner.entered"), "all"),
    **dict.fromkeys(("rank.change", "rank.take-over", "rank.greeted", "rank.shared", "rank.changed"), ""),
}
MOST_OWNERS, WITH_SHARDS = 5, 3  # this loop's model has no shards for more
RARELY = 3  # what a step does a few times is struck at one of so many; what only some steps do, at its first


@dataclass(frozen=True)
class Disturbance:
    """After how many seconds of undisturbed progress, what, and to whom."""

    after_s: float
    kind: str
    owner: int
    rank: int
    again_s: float  # between the two deaths of "again", or a request and what follows it
    nth: int = 1  # at a point
    scales: tuple[int, ...] = ()  # how many owners are asked for, one after the other

    @property
    def fault(self) -> named.Fault | None:
        """What is to happen at a named point."""
        point, _, act = self.kind.removeprefix("then ").removeprefix("scale ").partition(" ")
        if point not in named.POINTS:
            return None
        owner = 0 if point.startswith("lead.") else self.owner
        member = f"rank {self.rank}" if point.startswith("rank.") else f"optimizer {owner}"
        return named.Fault(member, point, act, self.nth, seconds=self.again_s)


@dataclass(frozen=True)
class Case:
    """One run of the campaign."""

    owners: int  # at first
    disturbances: tuple[Disturbance, ...]

    @classmethod
    def draw(cls, seed: int, run: int, each: int, *, scales: bool = False) -> Case:
        """``scales``: most disturbances are, or come with, a change of the owners."""
        draw = random.Random(f"{seed}/{run}")
        first = owners = draw.randint(1, 3)
        drawn = []
        for _ in range(each):
            if scales and draw.random() < 0.85:
                drawn.append(change(draw, owners))
                owners = drawn[-1].scales[-1]
            else:
                drawn.append(disturbance(draw, min(owners, WITH_SHARDS)))
        return cls(first, tuple(drawn))

    def named(self, folder: Path, apart: Sequence[int] = ()) -> named.Faults:
        """The faults at points: fault i is that of the ith disturbance which has one. ``apart``: owners that receive
        gradients over gRPC."""
        found = [each.fault for each in self.disturbances]
        for index, fault in enumerate(found):
            if (
                fault is not None
                and fault.point == "owner.receive"
                and fault.member in [f"optimizer {i}" for i in apart]
            ):
                act = fault.act if fault.act in named.POINTS["owner.landing"].acts else "kill"
                found[index] = replace(fault, point="owner.landing", act=act)
        return named.Faults(folder, tuple(fault for fault in found if fault is not None), waits=True)


def disturbance(draw: random.Random, owners: int) -> Disturbance:
    """Half of them come at a random moment, half at a point."""
    if draw.random() < 0.5:
        (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
    elif draw.random() < 0.2:
        kind = f"then {draw.choice(list(RECOVERING))} kill"
    else:
        point = draw.choice([point for point in OFTEN if owners > 1 or point != "lead.ordered"])
        acts = {act: weight for act, weight in ACTS.items() if act in named.POINTS[point].acts}
        kind = f"{point} {draw.choices(list(acts), list(acts.values()))[0]}"
    after_s, owner, rank = draw.random() * 0.3, draw.randrange(owners), draw.randrange(RANKS)
    seldom = kind.startswith("then ") or any(word in kind for word in ("save", "write", "manifest", "mean"))
    return Disturbance(after_s, kind, owner, rank, draw.random() * 0.6, 1 if seldom else draw.randint(1, RARELY))


def change(draw: random.Random, owners: int) -> Disturbance:
    """A change of the owners, of which there are so many, and what happens meanwhile."""
    others = draw.sample([n for n in range(1, MOST_OWNERS + 1) if n != owners], 2)
    after_s, again_s, rank = draw.random() * 0.3, draw.random() * 0.6, draw.randrange(RANKS)
    if draw.random() < 0.7:
        (meanwhile,) = draw.choices(list(SCALED), list(SCALED.values()))
        kind = f"scale, then {meanwhile}" if meanwhile else "scale"
        scales = tuple(others if meanwhile == "scale" else others[:1])
        return Disturbance(after_s, kind, draw.randrange(MOST_OWNERS), rank, again_s, scales=scales)
    point = draw.choice(list(CHANGING))
    acts = {act: weight for act, weight in ACTS.items() if act in named.POINTS[point].acts}
    kind = f"scale {point} {draw.choices(list(acts), list(acts.values()))[0]}"
    come = {"old": owners, "new": others[0], "lead": 1, "all": max(owners, others[0]), "": 1}[CHANGING[point]]
    return Disturbance(after_s, kind, draw.randrange(come), rank, again_s, scales=(others[0],))


# ---- disturbances --------------------------------------------------------------------------------------------------


@dataclass
class Disturber(threading.Thread):
    """Disturbs one run, again and again, and takes the time of each."""

    folder: Path
    case: Case
    faults: named.Faults
    seconds: list[tuple[str, float]] = field(default_factory=list)
    error: str | None = None

    def __hash__(self) -> int:
        return id(self)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self.owners = self.case.owners  # in the present epoch
        self.over = threading.Event()  # the run has failed

    def is_late(self, deadline: float) -> bool:
        """Whether to wait no longer."""
        return self.over.is_set() or time.monotonic() > deadline

    def run(self) -> None:
        try:
            self.wait_for(1)
            asked = itertools.count()
            for each in self.case.disturbances:
                time.sleep(each.after_s)
                at, began = self.step, time.monotonic()
                if each.fault is None:
                    self.strike(each)
                else:
                    at, began = self.strike_at_point(each, next(asked))
                if each.scales:
                    at = self.wait_for_owners(each.scales[-1])
                self.wait_for(at + 2)
                self.seconds.append((each.kind, time.monotonic() - began))
        except TimeoutError as error:
            self.error = str(error)
            for pid in pids(self.folder, None):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
        finally:
            (self.folder / "end").write_text(str(max(steps_of(self.folder), default=0) + 3))

    def strike_at_point(self, each: Disturbance, index: int) -> tuple[int, float]:
        """Let a fault strike at its point, in a recovery after the death that it takes; the step and the time at which
        it has."""
        assert each.fault is not None
        self.faults.ask(index)
        if each.kind.startswith("then "):
            kind = RECOVERING[each.fault.point]
            self.send(signal.SIGKILL, kind, each.owner if kind == "owner" else each.rank)
        elif each.scales:
            self.scale(each.scales[0])
        deadline = time.monotonic() + PATIENCE_S
        while (struck := self.faults.struck(index)) is None:
            if self.is_late(deadline):
                raise TimeoutError(f"{each.fault} has not struck in {PATIENCE_S:g} s: at {steps_of(self.folder)}")
            time.sleep(0.005)
        return self.step, struck.at

    def strike(self, fault: Disturbance) -> None:
        kind = fault.kind
        if fault.scales:
            self.scale(fault.scales[0])
            kind = kind.removeprefix("scale").removeprefix(", then ")
            time.sleep(fault.again_s)
        if kind == "scale":
            self.scale(fault.scales[1])
        if kind in ("", "scale"):
            return
        signal_ = signal.SIGSTOP if kind.startswith("stop") else signal.SIGKILL
        there = self.owners_there() if fault.scales else list(range(self.owners))
        owner = there[fault.owner % len(there)]
        victims = {
            "owner": [("owner", owner)],
            "rank": [("rank", fault.rank)],
            "again": [("owner", owner)] if fault.rank else [("rank", fault.rank)],
            "owners": [("owner", each) for each in there],
            "both": [("owner", owner), ("rank", fault.rank)],
            "stop owner": [("owner", owner)],
            "stop rank": [("rank", fault.rank)],
        }[kind]
        struck = [self.send(signal_, *victim, may_part=bool(fault.scales)) for victim in victims]
        if kind == "again":
            time.sleep(fault.again_s)
            self.send(signal_, *victims[0], but=struck[0], may_part=bool(fault.scales))

    def scale(self, owners: int) -> None:
        ask(self.folder, ScaleRequest(num_optimizers=owners))

    def owners_there(self) -> list[int]:
        """The owners that have processes, once there are any."""
        deadline = time.monotonic() + PATIENCE_S
        while not (there := owners_there(self.folder)):
            if self.is_late(deadline):
                raise TimeoutError(f"no owner got a process in {PATIENCE_S:g} s")
            time.sleep(0.01)
        return there

    def wait_for_owners(self, number: int) -> int:
        """Wait until the present epoch has so many; the steps by then."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := owners_of(self.folder)) != number:
            if self.is_late(deadline):
                raise TimeoutError(f"{found} owners after {PATIENCE_S:g} s at {steps_of(self.folder)}, not {number}")
            time.sleep(0.01)
        self.owners = number
        return self.step

    def send(self, signal_: signal.Signals, kind: str, index: int, but: int = 0, *, may_part: bool = False) -> int:
        """Send a signal to a member; waits until it has a process, other than ``but``. ``may_part``: an owner that has
        no process any more is left alone; then the answer is 0."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.is_late(deadline):
            for pid in pids(self.folder, (kind, index)):
                if pid != but:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal_)
                        return pid
            if may_part and kind == "owner" and index >= (owners_of(self.folder) or MOST_OWNERS):
                return 0
            time.sleep(0.01)
        raise TimeoutError(f"{kind} {index} got no process in {PATIENCE_S:g} s")

    @property
    def step(self) -> int:
        return step_of(self.folder)

    def wait_for(self, step: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.step < step:
            if self.is_late(deadline):
                raise TimeoutError(f"no step in {PATIENCE_S:g} s: at {steps_of(self.folder)}, waited for {step}")
            time.sleep(0.005)


# ---- runs -------------------------------------------------------------------------------------------------------


class Undisturbed:
    """The results of undisturbed runs, by number of steps. ``train``: ``loop`` without its folder and steps."""

    def __init__(self, train: Callable[..., Any]) -> None:
        self.train = train
        self._known: dict[int, Any] = {}

    def at(self, steps: int) -> Any:
        if steps not in self._known:
            with tempfile.TemporaryDirectory() as folder:
                one = functools.partial(self.train, folder=Path(folder), steps=steps)
                self._known = {steps: run_ranks(one, RANKS, 1, threads=1)}
        return self._known[steps]


@contextmanager
def nothing_left(folder: Path, found: list[str]) -> Iterator[None]:
    """Notes what the run in the block leaves."""
    files, ports = open_files(), open_ports()
    yield
    run = (folder / "run").read_text()
    there = [slab for directory in hosts_of(folder) for slab in list_slabs(directory)]
    slabs = [slab for slab in there if slab.header is not None and slab.header.facts.run == run]
    found += [f"left {slab.path.name}" + (", held" if slab.alive else "") for slab in slabs]
    found += [f"left {name} x {more}" for name, more in (open_files() - files).items()]
    found += [f"left port {port}" for port in sorted(open_ports() - ports)]
    alive = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    names = [" ".join(child.cmdline()) for child in alive]
    found += [f"left {name}" for name in names if "forkserver" not in name and "resource_tracker" not in name]


def open_files() -> Counter[str]:
    """What this process has open, by kind."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
    return Counter(links)


def open_ports() -> set[int]:
    """The ports on which this process and those that it started listen."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found: set[int] = set()
    for process in processes:
        with suppress(psutil.Error):
            listening = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            found |= {connection.laddr.port for connection in listening}
    return found


def play(case: Case, undisturbed: Undisturbed, *, apart: bool = False) -> tuple[list[str], list[tuple[str, float]]]:
    """One run; what is wrong with it, and the seconds of each fault. ``apart``: some owners share no memory with the
    others, nor with the ranks."""
    wrong: list[str] = []
    with (
        tempfile.TemporaryDirectory() as name,
        tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-host-") as host,
        nothing_left(folder := Path(name), wrong),
    ):
        hosts = dict.fromkeys((f"optimizer {owner}" for owner in APART), Path(host)) if apart else {}
        if apart:
            (folder / "host").write_text(host)
        at_points = case.named(folder, APART if apart else ())
        disturber = Disturber(folder, case, at_points)
        disturber.start()
        results = None
        try:
            one: Callable[[RankContext], Any] = functools.partial(undisturbed.train, folder=folder, steps=0)
            results = run_ranks(
                one,
                RANKS,
                case.owners,
                "shm",
                True,
                stall_timeout=STALL_S,
                max_failures=10**6,
                threads=1,
                faults=at_points,
                run_dir=folder,
                hosts=hosts,
            )
        except Exception as error:  # the campaign goes on
            wrong.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        if results is None:
            disturber.over.set()
        disturber.join()  # it writes to the folder
        if disturber.error is not None and results is not None:
            wrong.append(disturber.error)
        steps = end_of(folder)
    if results is not None:
        wrong += differences(results, undisturbed.at(len(results[0][2])))
        if len(results[0][2]) != steps:
            wrong.append(f"{len(results[0][2])} losses after {steps} steps")
    return wrong, disturber.seconds


def table(seconds: dict[str, list[float]]) -> list[str]:
    """Kind, faults, and the seconds until the run goes on: at random moments, at all points by act, at each point."""
    rows = ["| fault | count | p50 s | p95 s | most s |", "|---|--:|--:|--:|--:|"]
    scaled = {f"scale, then {meanwhile}" if meanwhile else "scale" for meanwhile in SCALED}
    at_points = sorted(seconds.keys() - KINDS.keys() - scaled)
    kinds = {kind: seconds[kind] for kind in (*KINDS, *sorted(scaled)) if seconds.get(kind)}
    for kind in at_points:
        where = "any point of a change" if kind.startswith("scale ") else "any point"
        kinds.setdefault(f"{where}, {kind.rpartition(' ')[2]}", []).extend(seconds[kind])
    for kind, took in (kinds | {kind: seconds[kind] for kind in at_points}).items():
        took = sorted(took)
        p95 = took[min(len(took) - 1, int(0.95 * len(took)))]
        rows.append(f"| {kind} | {len(took)} | {statistics.median(took):.2f} | {p95:.2f} | {took[-1]:.2f} |")
    return rows


def main() -> int:
    """The campaign; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000, help="faults in all")
    parser.add_argument("--each", type=int, default=20, help="faults of one run")
    parser.add_argument("--run", type=int, help="only this run of the campaign")
    parser.add_argument("--json", type=Path, help="write the table there, too")
    parser.add_argument("--scale", action="store_true", help="mostly other numbers of owners, and faults meanwhile")
    parser.add_argument("--apart", action="store_true", help="some owners share no memory with anybody else")
    parser.add_argument("--backwards", type=int, default=1, help="in a step")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="in bf16, masters are kept split")
    parser.add_argument("--slope", action="store_true", help="what many steps with many deaths leave in memory")
    parser.add_argument("--steps", type=int, default=5000, help="of --slope")
    parser.add_argument("--kills", type=int, default=50, help="of --slope")
    given = parser.parse_args()
    if given.slope:
        return fault_slope.main(given.steps, given.kills)
    runs = range(-(-given.count // given.each)) if given.run is None else [given.run]
    train = functools.partial(loop, model=base(), backwards=given.backwards, precision=given.precision)
    undisturbed, seconds, failed = Undisturbed(train), defaultdict(list), 0
    play(Case(1, ()), undisturbed)  # starts the server of processes, which stays
    for run in runs:
        wrong, took = play(Case.draw(given.seed, run, given.each, scales=given.scale), undisturbed, apart=given.apart)
        for kind, each in took:
            seconds[kind].append(each)
        failed += bool(wrong)
        kind = " --scale" * given.scale + " --apart" * given.apart
        kind += f" --backwards {given.backwards}" * (given.backwards > 1)
        kind += f" --precision {given.precision}" * (given.precision != "fp32")
        replay = f"scripts/soak faults{kind} --seed {given.seed} --each {given.each} --run {run}"
        print(f"{replay}: {len(took)} faults, " + ("equal" if not wrong else "; ".join(wrong[:6])), flush=True)
    rows = table(seconds)
    print("\n".join(rows))
    print(f"{sum(map(len, seconds.values()))} faults in {len(runs)} runs, {failed} runs with something wrong")
    if given.json is not None:
        given.json.write_text(json.dumps({kind: sorted(took) for kind, took in seconds.items()}))
    return int(failed > 0)
