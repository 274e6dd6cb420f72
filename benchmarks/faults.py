"""A campaign of seeded faults: processes of small runs are killed and stopped at random, and every run must end with
the bits of one that was not disturbed, and leave nothing.

    scripts/faults [--seed 0] [--count 1000] [--each 20] [--json OUT]
    scripts/faults --seed 0 --run 17                       # one run again, with the same faults

A run has 2 ranks and 1 to 3 owners, each a process, and a training loop with everything in it that can be cut: norm,
clip, scheduler, means, checkpoints, writes. Faults come while the run goes on, or while it still recovers. Their kinds:

    owner, rank           SIGKILL of one
    again                 SIGKILL of a member, and of the process that takes its place
    owners                SIGKILL of all owners at once
    both                  SIGKILL of an owner and a rank at once
    stop owner, stop rank SIGSTOP, for longer than the others wait

Compared, bit for bit: weights, moments, step counts, every loss of every rank, every mean. Seconds: from the signal
until both ranks have ended two more steps than they had. What a run may not leave: slabs, processes, open files of the
parent.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import random
import signal
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.slabs.slab import list_slabs
from rayzero.testing import run_ranks

RANKS = 2
STALL_S = 8.0  # stopped processes are killed after half of it
PATIENCE_S = 120.0  # without a step, a run counts as hanging
KINDS = {"owner": 30, "rank": 30, "again": 10, "owners": 8, "both": 14, "stop owner": 4, "stop rank": 4}  # weights
_PLACE = struct.Struct("<q")  # a rank's finished steps, in a file of its own


@dataclass(frozen=True)
class Fault:
    """One fault: after how many seconds of undisturbed progress, what, and to whom."""

    after_s: float
    kind: str
    owner: int
    rank: int
    again_s: float  # between the two deaths of "again"


@dataclass(frozen=True)
class Case:
    """One run of the campaign."""

    owners: int
    faults: tuple[Fault, ...]

    @classmethod
    def draw(cls, seed: int, run: int, each: int) -> Case:
        draw = random.Random(f"{seed}/{run}")
        owners = draw.randint(1, 3)
        kinds = draw.choices(list(KINDS), list(KINDS.values()), k=each)
        faults = tuple(
            Fault(draw.random() * 0.3, kind, draw.randrange(owners), draw.randrange(RANKS), draw.random() * 0.6)
            for kind in kinds
        )
        return cls(owners, faults)


# ---- the training loop ------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Seen:
    """What a rank's loop has seen."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.means: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "means": self.means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.means = list(state["losses"]), list(state["means"])


@functools.cache
def base() -> nn.Module:
    """The model that every rank begins with: ranks that are threads share one random generator."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(64, 64), Block(64), Block(64), nn.Linear(64, 64))


def loop(context: RankContext, model: nn.Module, folder: Path, steps: int) -> Any:
    """Train ``steps`` steps, in whichever life: until the file "end" says how many, if ``steps`` is 0."""
    torch.set_num_threads(1)  # the bits of a matrix product depend on it
    model = copy.deepcopy(model)
    (folder / "run").write_text(context.run)
    model, optimizer = rayzero.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), ZeroConfig(units=["Block", "Embedding"])
    )
    scheduler, seen = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9), Seen()
    rayzero.track(scheduler=scheduler, seen=seen)
    step = context.step
    while step < (steps or end_of(folder)):
        tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(1000 * step + context.rank))
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        seen.losses = [*seen.losses, loss.item()]
        if step % 2:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            seen.means = [*seen.means, rayzero.mean_over_ranks(seen.losses[-1])]
        if step % 20 == 19:
            rayzero.save_checkpoint(optimizer, folder / f"step-{step + 1}", keep_last=1)
        if step % 30 == 29:
            with torch.no_grad():
                model[3].bias.mul_(0.5)
        step += 1
        (folder / f"at-{context.rank}").write_bytes(_PLACE.pack(step))
    return rayzero.full_state_dict(model), optimizer.state_dict(), seen.losses, seen.means


def end_of(folder: Path) -> int:
    """The step with which a disturbed run ends: named once its last fault is over."""
    with suppress(OSError, ValueError):
        return int((folder / "end").read_text())
    return sys.maxsize


def differences(ours: Any, theirs: Any) -> list[str]:
    """What differs between two runs' results."""
    found = []
    for rank, ((weights, states, *seen), (w, s, *other)) in enumerate(zip(ours, theirs, strict=True)):
        found += [f"rank {rank}: {name}" for name in weights if not torch.equal(weights[name], w[name])]
        for key, state in states["state"].items():
            mine = {name: torch.as_tensor(value) for name, value in state.items()}
            found += [f"{key}.{n}" for n in mine if not torch.equal(mine[n], torch.as_tensor(s["state"][key][n]))]
        found += [f"rank {rank}: {what}" for what, a, b in zip(("losses", "means"), seen, other, strict=True) if a != b]
    return found


# ---- faults -----------------------------------------------------------------------------------------------------


@dataclass
class Faults(threading.Thread):
    """Disturbs one run, fault by fault, and takes the time of each."""

    folder: Path
    case: Case
    seconds: list[tuple[str, float]] = field(default_factory=list)
    error: str | None = None

    def __hash__(self) -> int:
        return id(self)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def run(self) -> None:
        try:
            self.wait_for(1)
            for fault in self.case.faults:
                time.sleep(fault.after_s)
                at = self.step
                began = time.monotonic()
                self.strike(fault)
                self.wait_for(at + 2)
                self.seconds.append((fault.kind, time.monotonic() - began))
        except TimeoutError as error:
            self.error = str(error)
            for pid in self.pids(None):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
        finally:
            (self.folder / "end").write_text(str(max(self.steps(), default=0) + 3))

    def strike(self, fault: Fault) -> None:
        signal_ = signal.SIGSTOP if fault.kind.startswith("stop") else signal.SIGKILL
        victims = {
            "owner": [("owner", fault.owner)],
            "rank": [("rank", fault.rank)],
            "again": [("owner", fault.owner)] if fault.rank else [("rank", fault.rank)],
            "owners": [("owner", owner) for owner in range(self.case.owners)],
            "both": [("owner", fault.owner), ("rank", fault.rank)],
            "stop owner": [("owner", fault.owner)],
            "stop rank": [("rank", fault.rank)],
        }[fault.kind]
        struck = [self.send(signal_, *victim) for victim in victims]
        if fault.kind == "again":
            time.sleep(fault.again_s)
            self.send(signal_, *victims[0], but=struck[0])

    def send(self, signal_: signal.Signals, kind: str, index: int, but: int = 0) -> int:
        """Send a signal to a member; waits until it has a process, other than ``but``."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for pid in self.pids((kind, index)):
                if pid != but:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal_)
                        return pid
            time.sleep(0.01)
        raise TimeoutError(f"{kind} {index} got no process in {PATIENCE_S:g} s")

    def pids(self, who: tuple[str, int] | None) -> set[int]:
        """The processes that hold the slabs of a member; None: of all."""
        run = (self.folder / "run").read_text()
        headers = [slab.header for slab in list_slabs() if slab.alive and slab.header is not None]
        ours = [(header.pid, header.facts) for header in headers if header.facts.run == run]
        if who is None:
            return {pid for pid, _ in ours}
        roles = ("params", "state") if who[0] == "owner" else ("grads",)
        return {pid for pid, facts in ours if facts.role in roles and facts.index == who[1]}

    def steps(self) -> list[int]:
        """The finished steps of the ranks that have finished any."""
        return [_PLACE.unpack(path.read_bytes().ljust(8, b"\0"))[0] for path in sorted(self.folder.glob("at-*"))]

    @property
    def step(self) -> int:
        found = self.steps()
        return min(found) if len(found) == RANKS else 0

    def wait_for(self, step: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.step < step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step in {PATIENCE_S:g} s: at {self.steps()}, waited for {step}")
            time.sleep(0.005)


# ---- runs -------------------------------------------------------------------------------------------------------


class Undisturbed:
    """The results of undisturbed runs, by number of steps."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def at(self, steps: int) -> Any:
        if steps not in self._known:
            with tempfile.TemporaryDirectory() as folder:
                self._known = {
                    steps: run_ranks(
                        functools.partial(loop, model=base(), folder=Path(folder), steps=steps), RANKS, 1, threads=1
                    )
                }
        return self._known[steps]


@contextmanager
def nothing_left(folder: Path, found: list[str]) -> Iterator[None]:
    """Notes what the run in the block leaves."""
    files = open_files()
    yield
    run = (folder / "run").read_text()
    slabs = [slab for slab in list_slabs() if slab.header is not None and slab.header.facts.run == run]
    found += [f"left {slab.path.name}" + (", held" if slab.alive else "") for slab in slabs]
    found += [f"left {name} x {more}" for name, more in (open_files() - files).items()]
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


def play(case: Case, undisturbed: Undisturbed) -> tuple[list[str], list[tuple[str, float]]]:
    """One run; what is wrong with it, and the seconds of each fault."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as name, nothing_left(folder := Path(name), wrong):
        faults = Faults(folder, case)
        faults.start()
        results = None
        try:
            one: Callable[[RankContext], Any] = functools.partial(loop, model=base(), folder=folder, steps=0)
            results = run_ranks(
                one, RANKS, case.owners, "shm", True, stall_timeout=STALL_S, max_failures=10**6, threads=1
            )
        except Exception as error:  # the campaign goes on
            wrong.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        faults.join(1.0 if results is None else None)
        if faults.error is not None:
            wrong.append(faults.error)
        steps = end_of(folder)
    if results is not None:
        wrong += differences(results, undisturbed.at(len(results[0][2])))
        if len(results[0][2]) != steps:
            wrong.append(f"{len(results[0][2])} losses after {steps} steps")
    return wrong, faults.seconds


def table(seconds: dict[str, list[float]]) -> list[str]:
    """Kind, faults, and the seconds until the run goes on."""
    rows = ["| fault | count | p50 s | p95 s | most s |", "|---|--:|--:|--:|--:|"]
    for kind in [kind for kind in KINDS if seconds[kind]]:
        took = sorted(seconds[kind])
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
    given = parser.parse_args()
    runs = range(-(-given.count // given.each)) if given.run is None else [given.run]
    undisturbed, seconds, failed = Undisturbed(), defaultdict(list), 0
    play(Case(1, ()), undisturbed)  # starts the server of processes, which stays
    for run in runs:
        wrong, took = play(Case.draw(given.seed, run, given.each), undisturbed)
        for kind, each in took:
            seconds[kind].append(each)
        failed += bool(wrong)
        replay = f"scripts/faults --seed {given.seed} --each {given.each} --run {run}"
        print(f"{replay}: {len(took)} faults, " + ("equal" if not wrong else "; ".join(wrong[:6])), flush=True)
    rows = table(seconds)
    print("\n".join(rows))
    print(f"{sum(map(len, seconds.values()))} faults in {len(runs)} runs, {failed} runs with something wrong")
    if given.json is not None:
        given.json.write_text(json.dumps({kind: sorted(took) for kind, took in seconds.items()}))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
