"""What deaths leave in the members that outlive them: ``scripts/soak faults --slope``.

One run of many steps, in which an owner and a rank are killed in turn, at even distances. The others are looked at
between the deaths: private memory (RssAnon), open files, threads. The slope is that of a straight line through what was
seen after the first quarter of the run, in which caches fill, in bytes a step."""

from __future__ import annotations

import functools
import os
import re
import signal
import statistics
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.campaigns.disturbed import RANKS, base, differences, loop, pids, step_of
from rayzero.testing import run_ranks

OWNERS = 2
KEEPS = 100  # losses that the loop remembers: what it keeps with every step must not grow by itself
GOAL = 1024  # bytes a step
PATIENCE_S = 120.0  # without a step, the run counts as hanging
Member = tuple[str, int]


@dataclass(frozen=True)
class Look:
    """A process at one moment."""

    step: int
    private: int  # bytes
    files: int
    threads: int

    @classmethod
    def at(cls, pid: int, step: int) -> Look:
        status = Path(f"/proc/{pid}/status").read_text()
        found = {key: int(value) for key, value in re.findall(r"(RssAnon|Threads):\s+(\d+)", status)}
        return cls(step, found["RssAnon"] * 1024, len(os.listdir(f"/proc/{pid}/fd")), found["Threads"])


@dataclass
class Killer(threading.Thread):
    """Kills ``victims`` in turn and looks at everybody else."""

    folder: Path
    steps: int
    kills: int
    victims: tuple[Member, ...]
    seen: dict[str, list[Look]] = field(default_factory=dict)
    done: int = 0
    error: str | None = None

    def __hash__(self) -> int:
        return id(self)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def run(self) -> None:
        try:
            self.wait_for(1)
            others = {("owner", owner) for owner in range(OWNERS)} | {("rank", rank) for rank in range(RANKS)}
            processes = {f"{kind} {index}": self.pid((kind, index)) for kind, index in others - {*self.victims}}
            processes["parent"] = os.getpid()
            for kill in range(self.kills):
                self.wait_for((kill + 1) * self.steps // (self.kills + 1))
                for name, pid in sorted(processes.items()):
                    self.seen.setdefault(name, []).append(Look.at(pid, step_of(self.folder)))
                os.kill(self.pid(self.victims[kill % len(self.victims)]), signal.SIGKILL)
                self.done += 1
        except (TimeoutError, OSError) as error:
            self.error = f"{type(error).__name__}: {error}"

    def pid(self, who: Member) -> int:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for pid in pids(self.folder, who):
                return pid
            time.sleep(0.01)
        raise TimeoutError(f"{who} got no process in {PATIENCE_S:g} s")

    def wait_for(self, step: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while step_of(self.folder) < step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step {step} in {PATIENCE_S:g} s")
            time.sleep(0.01)


def slope(looks: list[Look]) -> float:
    """Bytes a step after the first quarter."""
    late = looks[len(looks) // 4 :]
    return statistics.linear_regression([look.step for look in late], [look.private for look in late]).slope


def play(steps: int, kills: int, victims: tuple[Member, ...], expected: Any) -> tuple[list[str], list[str]]:
    """One run; rows of a table, and what is wrong."""
    names = " and ".join(f"{kind} {index}" for kind, index in victims)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = functools.partial(loop, model=base(), folder=folder, steps=steps, keeps=KEEPS)
        killer = Killer(folder, steps, kills, victims)
        killer.start()
        results = run_ranks(one, RANKS, OWNERS, "shm", True, max_failures=10**6, threads=1)
        with suppress(RuntimeError):
            killer.join(1.0)
    wrong = differences(results, expected) + ([killer.error] if killer.error else [])
    wrong += [] if killer.done == kills else [f"{killer.done} of {kills} kills"]
    rows = []
    for who, looks in killer.seen.items():
        first, last = looks[len(looks) // 4], looks[-1]
        grows = slope(looks)
        wrong += [f"{who} grows by {grows:,.0f} B a step"] if grows > GOAL else []
        rows.append(
            f"| {who} | {names} | {len(looks)} | {grows:,.0f} | {first.private / 2**20:.1f} to "
            f"{last.private / 2**20:.1f} | {first.files} to {last.files} | {first.threads} to {last.threads} |"
        )
    return rows, wrong


def main(steps: int, kills: int) -> int:
    """Both halves; 1 if anything was wrong."""
    with tempfile.TemporaryDirectory() as name:
        one = functools.partial(loop, model=base(), folder=Path(name), steps=steps, keeps=KEEPS)
        expected = run_ranks(one, RANKS, 1, threads=1)
    print("| who lives on | who is killed in turn | looks | B a step | private MiB | files | threads |")
    print("|---|---|--:|--:|---|---|---|", flush=True)
    failed = 0
    for index in (1, 0):
        rows, wrong = play(steps, kills, (("owner", index), ("rank", index)), expected)
        print("\n".join(rows))
        print("bits are equal, nothing grows" if not wrong else "; ".join(wrong[:6]), flush=True)
        failed += bool(wrong)
    return int(failed > 0)
