"""What does a change of the optimizer actors cost, and when do more of them pay? Runs on a Ray of its own.

    python -m lab rescale                          # changes at several sizes of states: pause, bytes, memory
    python -m lab rescale --pays [--picture PNG]   # 1 -> 2 -> 4 actors, each held to a part of a core
    python -m lab rescale --shared                 # 1 -> 2 -> 4 actors on this host's memory, held by nothing
    python -m lab rescale --auto slow idle shared  # runs with num_optimizers=(1, 4), which decide by themselves
    python -m lab rescale --hosts                  # a model of 1 to 64 hosts; measures nothing

``--pays`` and ``--auto`` stand in for hosts of their own: each actor is in a CPU cgroup with a quota, so two actors
update twice as fast as one. It needs a cgroup below its own that it may make, which on most hosts is root's. The run's
processes together weigh as much as eight others, so that actors get their parts on a machine with other load too.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import ray
import torch

import rayzero
from lab.bench.figures import Spread, about, plain, timed
from rayzero.cluster.files.run_record import read_record
from rayzero.elastic.scaling import ScaleRequest, ask
from rayzero.slabs.sweep import list_slabs

MIB = 1 << 20
BYTES_A_PARAMETER = 12  # fp32: the master, which is also what is published, and two moments
WIDTH = 1024
CHANGES = (3, 2, 4, 1, 2)  # from 2 on; one round
SETTLE_STEPS = 12  # between two changes, of which the last SAMPLE count
SAMPLE = 10
LEAVE_S = 30.0  # for a process or a slab that is not needed any more
PERIOD_US = 20_000  # of a CPU quota
BOUND_S = 1.0  # a pause is this long at most, and as long as it takes to copy what moves
GROUPS = Path("/sys/fs/cgroup")


# ---- the loop of a rank -----------------------------------------------------------------------------------------


def train(config: Mapping[str, Any]) -> None:
    """Train until there is a file "enough"; report the seconds of each step, and what it waited for updates.
    ``idle``: seconds that the loop spends on other things in each step."""
    context, optimizer_waits = rayzero.get_context(), 0.0
    enough = Path(context.run_dir or "") / "enough"
    torch.manual_seed(0)
    plain_model = torch.nn.Sequential(
        *(torch.nn.Linear(config["width"], config["width"], bias=False) for _ in range(config["layers"]))
    )
    model, optimizer = rayzero.prepare(plain_model, torch.optim.AdamW(plain_model.parameters(), lr=1e-5))
    rayzero.track()
    batch = torch.randn(config["batch"], config["width"])
    began = time.perf_counter()
    while rayzero.mean_over_ranks(float(enough.exists())) == 0:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(config["idle"])
        now, waited = time.perf_counter(), rayzero.stats(model).waits["optimizer"].total
        rayzero.report({"seconds": now - began, "exposed": waited - optimizer_waits})
        began, optimizer_waits = now, waited


# ---- what is seen from outside ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that a run holds: its slabs in shared memory, and its processes' own memory."""

    shared: int
    ranks: int
    optimizers: int
    processes: int  # optimizer actors that there are


def held(run: str) -> Held:
    """The bytes now. Actors are found below this process, which started their Ray."""
    private = {"RankWorker": 0, "OptimizerActor": 0}
    num_optimizers = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, OSError):
            kind = actor_class(process)
            if kind in private:
                private[kind] += anonymous_bytes(process.pid)
                num_optimizers += kind == "OptimizerActor"
    return Held(shared_bytes(run), private["RankWorker"], private["OptimizerActor"], num_optimizers)


def shared_bytes(run: str) -> int:
    """Of the run's slabs, as far as pages have been touched."""
    total = 0
    for slab in list_slabs():
        if slab.header is not None and slab.header.facts.run == run:
            with suppress(OSError):
                total += slab.path.stat().st_blocks * 512
    return total


def actor_class(process: psutil.Process) -> str:
    """The class of a Ray actor; "" for other processes."""
    title = "".join(process.cmdline()[:1])
    return title.removeprefix("ray::").partition(".")[0] if title.startswith("ray::") else ""


def anonymous_bytes(pid: int) -> int:
    """Private memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Sampler:
    """Notes what a run holds, in a thread of its own."""

    EVERY_S = 0.2

    def __init__(self, run: str) -> None:
        self._run = run
        self.seen: list[tuple[float, Held]] = []  # seconds since 1970
        self.loads: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(self.EVERY_S):
            self.seen.append((time.time(), held(self._run)))
            self.loads.append(os.getloadavg()[0])


# ---- a limit of the CPU -----------------------------------------------------------------------------------------


@contextmanager
def grouped(share: float | None, *, weigh: bool) -> Iterator[None]:
    """Hold each optimizer actor below this process to ``share`` of a core, as soon as it is there; None: to nothing.
    ``weigh``: let the actors and ranks together weigh as much as eight other processes, as they also do with a share.
    Raises OSError where no cgroup can be made."""
    if share is None and not weigh:
        yield
        return
    above, files = _below_own()
    above.mkdir()
    stop, thread = threading.Event(), None
    try:
        if not (above / next(iter(files))).exists():
            raise OSError(f"{above.parent} gives its children no cpu controller")
        thread = threading.Thread(target=_limit_actors, args=(above, files, share, stop))
        thread.start()
        yield
    finally:
        stop.set()
        if thread is not None:
            thread.join()
        for group in (*above.glob("*-*"), above):
            _remove(group)


def _below_own() -> tuple[Path, dict[str, str]]:
    """A cgroup that can be made, and its files with their values for {quota} in {period} us."""
    name = f"rayzero-rescale-{os.getpid()}"
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            one = {"cpu.cfs_period_us": "{period}", "cpu.cfs_quota_us": "{quota}", "cpu.shares": "8192"}
            return GROUPS / "cpu" / path.lstrip("/") / name, one
        if hierarchy == "0" and (GROUPS / "cgroup.controllers").exists():
            own = GROUPS / path.lstrip("/")
            (own / "cgroup.subtree_control").write_text("+cpu")  # EBUSY where ``own`` has processes
            return own / name, {"cpu.max": "{quota} {period}", "cpu.weight": "800"}
    raise OSError("this host has no cpu cgroups")


def _limit_actors(above: Path, files: Mapping[str, str], share: float | None, stop: threading.Event) -> None:
    known: set[int] = set()
    _set(above, {file: value for file, value in files.items() if "quota" not in value and "period" not in value})
    while not stop.wait(0.05):
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error, OSError):
                kind = actor_class(process) if process.pid not in known else ""
                if kind not in ("OptimizerActor", "RankWorker"):
                    continue
                group = above / f"{kind}-{process.pid}"
                group.mkdir()
                if kind == "OptimizerActor" and share is not None:
                    _set(group, files, share)
                (group / "cgroup.procs").write_text(str(process.pid))
                known.add(process.pid)


def _set(group: Path, files: Mapping[str, str], share: float = 0.0) -> None:
    for file, value in files.items():
        (group / file).write_text(value.format(quota=round(share * PERIOD_US), period=PERIOD_US))


def _remove(group: Path) -> None:
    deadline = time.monotonic() + LEAVE_S
    while group.exists():
        try:
            group.rmdir()
        except OSError:  # a process is still being taken down
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


# ---- a run ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    """One step of rank 0."""

    time: float  # when it ended, seconds since 1970
    seconds: float
    exposed: float  # of these, waited for updates
    optimizers: int  # that there were when it was reported


@dataclass(slots=True, kw_only=True)
class Plan:
    """What a run is and what is asked of it."""

    layers: int
    width: int = WIDTH
    batch: int = 4
    idle: float = 0.0
    ranks: int = 2
    optimizers: int | tuple[int, int] = 2
    changes: Sequence[int] = ()  # asked for one after the other
    settle_steps: int = SETTLE_STEPS
    settle_s: float = 1.0
    share: float | None = None  # of a core that an optimizer actor may use
    weigh: bool = False  # as much as eight other processes
    still_s: float | None = None  # end when owners have not changed for so long
    ends_at: int | None = None  # and at once when there are so many


@dataclass(slots=True)
class Run:
    """What became of it."""

    plan: Plan
    steps: list[Seen] = field(default_factory=list)
    rescales: list[dict[str, Any]] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)  # when, seconds since 1970
    sampled: list[tuple[float, Held]] = field(default_factory=list)
    left: Held | None = None  # after its end
    load: Spread | None = None  # of the machine, itself included: averages of a minute

    def at(self, moment: float) -> Held:
        """What it held then."""
        return min(self.sampled, key=lambda one: abs(one[0] - moment))[1]

    def with_optimizers(self, number: int) -> list[Seen]:
        """The steps with so many optimizer actors that count."""
        return [step for step in self.steps if step.optimizers == number][2:]


class Director:
    """Asks for one number of optimizer actors after the other, and ends the run."""

    def __init__(self, run_dir: Path, run: Run) -> None:
        self._run_dir, self._run = run_dir, run
        self._recent: deque[float] = deque(maxlen=run.plan.settle_steps)  # ends of steps since the last change
        self._changed_s = time.monotonic()
        self._read_s = -1.0
        self._there = 0

    def __call__(self, one: Any) -> None:
        if one.rank != 0:
            return
        now = time.monotonic()
        if now - self._read_s > 0.1:  # the record is a file
            self._read_s = now
            self._read()
        self._run.steps.append(Seen(one.time, one.metrics["seconds"], one.metrics["exposed"], self._there))
        self._recent.append(now)
        plan, run = self._run.plan, self._run
        settled = len(self._recent) == plan.settle_steps and now - self._changed_s > plan.settle_s
        if len(run.rescales) < len(run.asked) or not settled:
            return
        if len(run.asked) < len(plan.changes):
            run.asked.append(time.time())
            ask(self._run_dir, ScaleRequest(num_optimizers=plan.changes[len(run.asked) - 1]))
        elif plan.still_s is None or now - self._changed_s > plan.still_s or self._there == plan.ends_at:
            (self._run_dir / "enough").touch()

    def _read(self) -> None:
        record = read_record(self._run_dir)
        assert record is not None
        self._there = sum(member["who"].startswith("optimizer") for member in record["members"])
        if len(record["rescales"]) > len(self._run.rescales):
            self._run.rescales = record["rescales"]
            self._changed_s = time.monotonic()
            self._recent.clear()


def carry_out(plan: Plan) -> Run:
    """Train as planned."""
    run = Run(plan)
    with tempfile.TemporaryDirectory() as folder, grouped(plan.share, weigh=plan.weigh):
        settings = rayzero.RunConfig(name=f"rescale-{os.getpid()}", storage_path=folder, max_failures=1)
        scaling = rayzero.ScalingConfig(
            num_workers=plan.ranks, num_optimizers=plan.optimizers, threads_per_worker=1, threads_per_optimizer=1
        )
        trainer = rayzero.ZeroTrainer(
            train,
            train_loop_config={"layers": plan.layers, "width": plan.width, "batch": plan.batch, "idle": plan.idle},
            scaling_config=scaling,
            run_config=settings,
            on_report=Director(settings.path, run),
            on_phase=lambda line: print(f"  {line}", file=sys.stderr),
        )
        with Sampler(settings.name) as sampler:
            trainer.fit()
        run.sampled, run.load = sampler.seen, Spread.of(sampler.loads)
        record = read_record(settings.path)
        assert record is not None
        run.rescales = record["rescales"]
        run.left = _left(settings.name)
    return run


def _left(run: str) -> Held:
    deadline = time.monotonic() + LEAVE_S
    while (found := held(run)) != Held(0, 0, 0, 0) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def copy_rate() -> float:
    """Bytes a second that one thread copies, the median of 9."""
    torch.set_num_threads(1)
    source, target = (torch.ones(64 * MIB) for _ in range(2))
    return 4 * 64 * MIB / median(timed(lambda: target.copy_(source)) for _ in range(9))


# ---- what a change costs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """One change at one size."""

    mib: int  # of states
    before: int
    after: int
    pause: float  # seconds
    steps: Mapping[str, float]  # of the change, in seconds: rayzero/elastic/reform.py
    moved: int  # bytes of states
    bound: float  # seconds
    start: float  # seconds until the new processes were up, while training went on
    step: float  # seconds a step before
    longest: float  # of the steps meanwhile
    step_after: float
    gone: float | None  # seconds from the end of the change until there were no more processes than actors
    memory: tuple[Held, Held, Held]  # before; the most of each meanwhile; after, once they were gone


def changes_of(mib: int, run: Run, rate: float) -> list[Change]:
    """The changes of a run."""
    found = []
    for asked, one in zip(run.asked, run.rescales, strict=True):
        assert one["failed"] is None, one
        ended = one["time"]
        before = [step.seconds for step in run.steps if step.time < asked][-SAMPLE:]
        meanwhile = [step.seconds for step in run.steps if step.time > asked and step.time - step.seconds < ended + 1]
        after = [step.seconds for step in run.steps if step.time > ended + 1][:SAMPLE]
        seen = [held for at, held in run.sampled if asked <= at <= ended + 1]
        seen = seen or [run.at(asked)]
        most = Held(*(max(getattr(held, name) for held in seen) for name in Held.__slots__))
        gone = next((at for at, held in run.sampled if at >= ended and held.processes == one["after"]), None)
        found.append(
            Change(
                mib=mib,
                before=one["before"],
                after=one["after"],
                pause=one["pause"],
                steps=one["seconds"],
                moved=one["moved_bytes"],
                bound=one["moved_bytes"] / rate + BOUND_S,
                start=one["seconds"].get("start", 0.0),
                step=median(before) if before else float("nan"),
                longest=max(meanwhile, default=float("nan")),
                step_after=median(after) if after else float("nan"),
                gone=None if gone is None else gone - ended,
                memory=(run.at(asked), most, run.at(gone or ended + 2.5)),
            )
        )
    return found


def measure(sizes: Sequence[int], rounds: int, *, weigh: bool) -> dict[str, Any]:
    """Changes at each size of the states, in MiB. ``weigh``: see ``grouped``."""
    rate = copy_rate()
    print(f"one thread copies {rate / 1e9:.1f} GB/s", file=sys.stderr)
    changes, runs = [], []
    for mib in sizes:
        width = WIDTH if mib <= 256 else 2 * WIDTH
        layers = max(1, round(mib * MIB / BYTES_A_PARAMETER / width**2))
        run = carry_out(Plan(layers=layers, width=width, changes=CHANGES * rounds, settle_s=3.0, weigh=weigh))
        changes += changes_of(layers * width**2 * BYTES_A_PARAMETER // MIB, run, rate)
        runs.append({"mib": mib, "left": run.left, "load": run.load})
    return {"copy_rate": rate, "changes": changes, "runs": runs}


def show(found: Mapping[str, Any]) -> None:
    """Print two tables with a row for each size and change; medians of the rounds."""
    changes: list[Change] = found["changes"]
    rows: dict[tuple[int, int, int], list[Change]] = {}
    for one in changes:
        rows.setdefault((one.mib, one.before, one.after), []).append(one)
    print(f"one thread copies {found['copy_rate'] / 1e9:.1f} GB/s")
    print("| states | change | another owner | pause, ms | bound, ms | new up, s | step before, ms | longest | after |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for (mib, before, after), some in rows.items():
        times = (_text(some, name) for name in ("step", "longest", "step_after"))
        print(
            f"| {mib} MiB | {before} to {after} | {some[0].moved / MIB:.0f} MiB | {_text(some, 'pause')} | "
            f"{median(one.bound for one in some) * 1e3:.0f} | {_text(some, 'start', 1, 1)} | {' | '.join(times)} |"
        )
    print("\n| states | change | shared memory before, most, after | optimizers' own | ranks' own | gone after, s |")
    print("|---|---|--:|--:|--:|--:|")
    for (mib, before, after), some in rows.items():
        kinds = (_memory(some, kind) for kind in ("shared", "optimizers", "ranks"))
        gone = [one.gone for one in some if one.gone is not None]
        ended = Spread.of(gone).text(1, 1) if len(gone) == len(some) else "not seen"
        print(f"| {mib} MiB | {before} to {after} | {' | '.join(kinds)} | {ended if after < before else ''} |")
    for run in found["runs"]:
        print(f"{run['mib']} MiB: after its end {run['left']}; load {run['load'].text(digits=0)}")
    late = sum(one.pause > one.bound for one in changes)
    longest = max(one.pause for one in changes)
    print(f"{len(changes)} changes, {late} above the bound; the longest pause {longest:.3f} s")


def _text(some: Sequence[Change], name: str, scale: float = 1e3, digits: int = 0) -> str:
    return Spread.of(getattr(one, name) for one in some).text(scale, digits)


def _memory(some: Sequence[Change], kind: str) -> str:
    at = (median(getattr(one.memory[when], kind) for one in some) for when in range(3))
    return ", ".join(f"{size / MIB:.0f}" for size in at) + " MiB"


# ---- whether it pays --------------------------------------------------------------------------------------------


def pays(share: float | None, layers: int, *, weigh: bool) -> Run:
    """1, 2, then 4 optimizer actors of one run."""
    plan = Plan(
        layers=layers,
        batch=64,
        ranks=1,
        optimizers=1,
        changes=(2, 4),
        settle_steps=40,
        settle_s=8.0,
        share=share,
        weigh=weigh,
    )
    return carry_out(plan)


def show_steps(run: Run) -> None:
    """Print a row for each number of optimizer actors, with what a simple model foretells from the first."""
    print(
        "| optimizers | step, ms | waited for updates, ms | of a step | x the step before | foretold step, ms | steps |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|")
    first: tuple[int, float, float] | None = None
    last = None
    for number in dict.fromkeys(step.optimizers for step in run.steps):
        steps = run.with_optimizers(number)
        if len(steps) < SAMPLE:
            continue
        step, exposed = (Spread.of(getattr(one, name) for one in steps) for name in ("seconds", "exposed"))
        part = median(one.exposed / one.seconds for one in steps)
        first = first or (number, step.median, exposed.median)
        foretold = foretold_step(first, number, hidden_share=HIDDEN)
        ratio = "1" if last is None else f"{step.median / last:.2f}"
        print(f"| {number} | {step.text(1e3, 0)} | {exposed.text(1e3, 0)} | {part:.0%} | {ratio} | "
              f"{foretold * 1e3:.0f} | {len(steps)} |")  # fmt: skip
        last = step.median
    for one in run.rescales:
        print(f"{one['before']} to {one['after']}: {one['failed'] or one['why']}; pause {one['pause']:.3f} s; "
              f"{one['moved_bytes'] / MIB:.0f} MiB have another owner")  # fmt: skip
    assert run.load is not None
    print(f"load {run.load.text(digits=0)}; left {run.left}")


HIDDEN = 1 / 3  # of what a step takes without waits: the next forward hides so much of an update


def foretold_step(first: tuple[int, float, float], number: int, hidden_share: float) -> float:
    """Seconds of a step with ``number`` optimizer actors, from those with fewer: how many, a step's seconds, and what
    was waited of it. Only the update gets faster, and what the next forward hides of it stays the same."""
    there, step, exposed = first
    rest = step - exposed
    hidden = hidden_share * rest
    return rest + max(0.0, (hidden + exposed) * there / number - hidden)


def draw(run: Run, path: Path) -> None:
    """Draw each step's seconds, and of these what it waited for updates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    axes = figure.subplots()
    began = run.steps[0].time
    steps = [step for step in run.steps if step.time - began > 1]
    times = [step.time - began for step in steps]
    axes.plot(times, [step.seconds * 1e3 for step in steps], lw=0.8, color="tab:blue", label="a step")
    waited = [step.exposed * 1e3 for step in steps]
    axes.fill_between(times, waited, step="mid", lw=0, alpha=0.5, color="tab:red", label="of it, waiting for updates")
    top = 1.35 * sorted(step.seconds for step in steps)[int(0.97 * len(steps))] * 1e3
    for change in run.rescales:
        at = change["time"] - began
        axes.axvline(at, color="black", lw=0.8, ls=":")
        axes.text(at, 0.97 * top, f" {change['after']} optimizers", va="top", fontsize=9)
    first = run.rescales[0]["before"]
    axes.text(times[0], 0.97 * top, f"{first} optimizer" + "s" * (first > 1), va="top", fontsize=9)
    axes.set(xlabel="seconds", ylabel="ms", ylim=(0, top), xlim=(times[0], times[-1]))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.88), fontsize=8)
    figure.savefig(path, dpi=100)


# ---- a run that decides by itself -------------------------------------------------------------------------------


def decide(which: str, share: float, layers: int) -> Run:
    """A run with num_optimizers=(1, 4). "slow": each owner is held to a part of a core; "idle": owners have little to
    do, and 4 are asked for at first; "shared": owners share the memory of this host."""
    plan = Plan(layers=layers, batch=64, ranks=1, optimizers=(1, 4), still_s=45.0)
    if which == "slow":
        return carry_out(replace(plan, share=share))
    if which == "idle":
        return carry_out(replace(plan, batch=4, idle=0.25, changes=(4,), still_s=90.0, ends_at=1))
    return carry_out(replace(plan, batch=1))


# ---- more hosts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hosts:
    """How long an update takes on so many hosts, and what of it a step waits for."""

    hosts: int
    update: float  # seconds
    exposed: float
    step: float
    gain: float  # of the step over that with the fewest hosts


def on_hosts(
    parameters: float, compute: float, bandwidth: float, hosts: Sequence[int], *, bytes_each: int = 28
) -> list[Hosts]:
    """A model of a step. ``compute``: seconds of forward and backward; ``bandwidth``: bytes a second of a host's
    memory; ``bytes_each``: that an update reads and writes for a parameter (28 with 16-bit gradients and weights)."""
    found: list[Hosts] = []
    for number in hosts:
        update = parameters * bytes_each / (bandwidth * number)
        exposed = max(0.0, update - HIDDEN * compute)
        step = compute + exposed
        found.append(Hosts(number, update, exposed, step, found[0].step / step if found else 1.0))
    return found


def show_hosts(parameters: float, compute: float, bandwidth: float) -> None:
    """Print the model for 1 to 64 hosts."""
    print("| hosts | update, s | hidden, s | exposed, s | of a step | x faster than 1 host |")
    print("|--:|--:|--:|--:|--:|--:|")
    for one in on_hosts(parameters, compute, bandwidth, (1, 2, 4, 8, 16, 32, 64)):
        print(f"| {one.hosts} | {one.update:.3f} | {one.update - one.exposed:.3f} | {one.exposed:.3f} | "
              f"{one.exposed / one.step:.0%} | {one.gain:.2f} |")  # fmt: skip


def main() -> None:
    """Measure what was asked for, print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[64, 256, 1024], help="MiB of states")
    parser.add_argument("--rounds", type=int, default=3, help="of the changes 2-3-2-4-1-2 at each size")
    parser.add_argument("--pays", action="store_true")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--auto", nargs="+", choices=("slow", "idle", "shared"))
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--weigh", action="store_true", help="let a run weigh as much as eight other processes")
    parser.add_argument("--share", type=float, default=0.1, help="of a core, for each optimizer actor that is held")
    parser.add_argument("--layers", type=int, default=16, help=f"of {WIDTH} x {WIDTH}, for --pays and --auto")
    parser.add_argument("--picture", type=Path, help="where to draw the steps of --pays")
    parser.add_argument("--parameters", type=float, default=70e9, help="for --hosts")
    parser.add_argument("--compute", type=float, default=2.0, help="seconds of forward and backward, for --hosts")
    parser.add_argument("--bandwidth", type=float, default=200e9, help="bytes a second of a host's memory, for --hosts")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    if options.hosts:
        show_hosts(options.parameters, options.compute, options.bandwidth)
        return
    print(about())
    ray.init(address="local", num_cpus=16, include_dashboard=False, logging_level=logging.ERROR)
    found: dict[str, Any] = {"about": about()}
    if options.pays or options.shared:
        found["steps"] = run = pays(None if options.shared else options.share, options.layers, weigh=options.weigh)
        show_steps(run)
        if options.picture is not None:
            draw(run, options.picture)
    elif options.auto:
        for which in options.auto:
            print(f"\n{which}")
            found[which] = run = decide(which, options.share, options.layers)
            show_steps(run)
    else:
        found |= measure(options.sizes, options.rounds, weigh=options.weigh)
        show(found)
    if options.json is not None:
        options.json.write_text(json.dumps(plain(found)), encoding="utf-8")
