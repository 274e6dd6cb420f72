"""Supplies what every benchmark reports beside its figures: machine, versions, spread, and the load of others."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import torch

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Spread:
    """Samples of one figure."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Self:
        """The spread of one or more samples."""
        found = list(samples)
        return cls(statistics.median(found), min(found), max(found))

    def text(self, scale: float = 1.0, digits: int = 2) -> str:
        """``median (least-most)``, each times ``scale``."""
        median, least, most = (f"{value * scale:.{digits}f}" for value in (self.median, self.least, self.most))
        return f"{median} ({least}-{most})"


def plain(value: Any) -> Any:
    """``value`` with dataclasses as dicts and tuples as lists, for JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    start = perf_counter()
    work()
    return perf_counter() - start


def about() -> dict[str, Any]:
    """The machine and the versions that a figure belongs to; ``load`` is the system's average of the last minute."""
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="minutes"),
        "processor": processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rayzero": _version(),
    }


def _version() -> str:
    try:
        return importlib.metadata.version("rayzero")
    except importlib.metadata.PackageNotFoundError:
        return "not installed: run from its source"


def processor() -> str:
    """The processor's model name; its architecture if the system does not tell the name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


@dataclass(frozen=True, slots=True)
class Cost:
    """What a piece of work took."""

    seconds: float
    cpu_seconds: float  # of the calling process and those that work for it; the kernel counts in ticks of 10 ms

    @classmethod
    def of(cls, work: Callable[[], object], pids: Sequence[int]) -> Self:
        """Do the work. ``pids``: the processes that take part in it, besides the calling one."""
        used = -process_seconds(os.getpid(), *pids)
        seconds = timed(work)
        return cls(seconds, used + process_seconds(os.getpid(), *pids))


# ---- other people's work ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Busy:
    """CPU seconds that the whole machine, and this benchmark's processes, have used so far."""

    at: float
    machine: float
    ours: float

    @classmethod
    def now(cls, pids: Sequence[int]) -> Self:
        """The seconds now. ``pids``: this benchmark's processes, besides the calling one."""
        return cls(perf_counter(), _machine_seconds(), process_seconds(*{os.getpid(), *pids}))

    def others_since(self, earlier: Busy) -> float:
        """The share of all CPUs that others have used since ``earlier``, 0 to 1."""
        taken = (self.machine - earlier.machine) - (self.ours - earlier.ours)
        return max(0.0, taken / (self.at - earlier.at) / (os.cpu_count() or 1))


def _machine_seconds() -> float:
    with open("/proc/stat", encoding="ascii") as stat:
        user, nice, system, _idle, _wait, irq, softirq, steal, *_ = map(int, stat.readline().split()[1:])
    return (user + nice + system + irq + softirq + steal) / _TICKS


def process_seconds(*pids: int) -> float:
    """CPU seconds that these processes have used so far, together."""
    stats = (Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split() for pid in pids)
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / _TICKS


# ---- memory -----------------------------------------------------------------------------------------------------


def resident_bytes(pid: int) -> int:
    """Bytes of a process's share (PSS) of resident anonymous and shared memory. Files, and so libraries, do not
    count."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
        kib = {line.split()[0]: int(line.split()[1]) for line in rollup if line.startswith(("Pss_Anon", "Pss_Shmem"))}
    return sum(kib.values()) << 10


def at_least_one(text: str) -> int:
    """Parse a command-line option that is a whole number from 1 on. Raises ArgumentTypeError for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"is {text!r} but must be a whole number from 1 on")
    return int(text)
