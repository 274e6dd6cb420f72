"""``run.json``: what a run's driver writes about it every second, for the commands and for a run that continues it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from pydantic import ConfigDict, Field

from rayzero import __version__
from rayzero.cluster.continuation import States
from rayzero.cluster.run import OPEN_STATES, LoggerState, Member, Recovery, Rescaled, RunState
from rayzero.errors import ConfigError
from rayzero.files import parse_json, read_text
from rayzero.records import JsonRecord, load_record
from rayzero.slabs.sweep import held_in
from rayzero.store.shm.signals import host_identity

RECORD = "run.json"
LOST = "lost"  # the record says starting or running, but the driver is gone

_MOST = 1 << 28  # bytes
_CLOCK_S = 2.0  # error of a process's start time, which is counted from boot


class DriverProcess(JsonRecord):
    """The process that runs ``fit()``."""

    pid: int
    host: str


class ExporterAddress(JsonRecord):
    """One process's exporter, as Prometheus' service discovery describes it."""

    address: str
    labels: dict[str, str]


class TelemetryAddresses(JsonRecord):
    """Where a run is observed."""

    http_sd: str  # URL of Prometheus' service discovery
    page: str | None = None  # URL of the live page; None: a browser cannot show it
    targets: list[ExporterAddress]


class RunRecord(JsonRecord):
    """The entries of ``run.json``. Those with a default are not in the record of a run that has not come so far."""

    model_config = ConfigDict(extra="allow")  # entries of a later RayZero are passed on

    rayzero: str = __version__  # that wrote it
    run: str
    state: RunState
    error: str | None = None
    started_at: float  # seconds since 1970
    ended_at: float | None = None
    driver: DriverProcess
    ray_address: str | None = None
    members: list[Member] = Field(default_factory=list)
    spares: list[Member] = Field(default_factory=list)
    addresses: list[str] = Field(default_factory=list)  # of the owners, by index
    recoveries: list[Recovery] = Field(default_factory=list)
    replacing: list[str] = Field(default_factory=list)
    rescaling: str | None = None
    rescales: list[Rescaled] = Field(default_factory=list)
    telemetry: TelemetryAddresses | None = None
    loggers: list[LoggerState] = Field(default_factory=list)
    metrics: dict[str, dict[str, Any]] = Field(default_factory=dict)  # by rank: its last report
    checkpoint: str | None = None  # the newest that is known
    checkpoints_elsewhere: list[str] = Field(default_factory=list)  # outside of the run's folder
    resumed_from: str | None = None
    states: States | None = None  # None: nowhere that outlives the run
    measured: dict[str, Any] = Field(default_factory=dict)  # by process
    config: dict[str, Any] = Field(default_factory=dict)


def read_record(path: Path) -> dict[str, Any] | None:
    """The entries of ``run.json`` in a run directory; None if there is none. Raises ConfigError if the file is not a
    run's record."""
    record, what, instead = path / RECORD, "a run's record", "restore it from a copy, or move the folder away"
    try:
        try:
            return load_record(record, RunRecord, what, instead, at_most=_MOST).model_dump()
        except ConfigError:
            if (wrote := _writer(record)) == __version__:
                raise
        what, instead = f"{what} of this RayZero, {__version__}", f"use RayZero {wrote}, which wrote it"
        return load_record(record, RunRecord, what, instead, at_most=_MOST).model_dump()
    except (FileNotFoundError, NotADirectoryError):  # there is no run, whatever else is there
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {record}: {error}") from error


def _writer(record: Path) -> str:
    """The version of the RayZero that wrote a record, if it says so; else this one. Raises OSError."""
    with suppress(ValueError, AttributeError):
        wrote = parse_json(read_text(record, at_most=_MOST)).get("rayzero")
        if isinstance(wrote, str) and wrote.isprintable():
            return wrote[:40]
    return __version__


# ---- the state of a run, for commands ---------------------------------------------------------------------------


def run_status(run_dir: Path) -> dict[str, Any]:
    """What is known of the run in ``run_dir``: its ``run.json``.

    ``state`` is a RunState's value, or ``"lost"``. Raises ConfigError when no run was recorded there.
    """
    record = read_record(run_dir)
    if record is None:
        raise ConfigError(f"{run_dir} holds no run, because it has no {RECORD}")
    return record if why_over(record) is not None or _driver_lives(record) else record | {"state": LOST}


def why_over(record: Mapping[str, Any]) -> str | None:
    """Why a run does not go on, by what ``run_status`` returns; None: it does."""
    if record["state"] in OPEN_STATES:
        return None
    return "its driver is gone" if record["state"] == LOST else f"it has {record['state']}"


def kept_states(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """What this host's shared memory still has of a run whose driver was killed; None if no driver was killed.

    ``kept``: whether a run can continue it; ``step``: with which step, ``until``: how long (seconds since 1970), and
    ``directory``, or ``why`` not."""
    if record["state"] != LOST:
        return None
    states = record["states"]
    if states is None:
        return _not_kept("the run kept no states in shared memory")
    directory = Path(states["directory"])
    if not is_here(directory, states["memory"]):
        return _not_kept(f"they were in {directory} on another host, or this host has been restarted")
    held = next((held for held in held_in(directory) if held.lineage == states["lineage"]), None)
    if held is None:
        return _not_kept("their time is over, or they were not enough to go on from")
    if held.until is None:
        return _not_kept("another run is taking them over")
    if held.step is None:
        return _not_kept("the run's processes have not ended yet; ask again in a few seconds")
    return {"kept": True, "step": held.step, "until": held.until, "directory": str(directory), "why": None}


def _not_kept(why: str) -> dict[str, Any]:
    return {"kept": False, "step": None, "until": None, "directory": None, "why": why}


def is_here(directory: Path, memory: str) -> bool:
    """Whether ``memory`` is the identity of this host's ``directory``. A record may name any text as a directory."""
    try:
        return bool(memory) and host_identity(directory) == memory
    except (OSError, ValueError):
        return False


def list_runs(storage_path: Path) -> list[dict[str, Any]]:
    """The records of all runs under ``storage_path``, oldest first."""
    if not storage_path.is_dir():
        return []
    records = [read_record(path.parent) for path in sorted(storage_path.glob(f"*/{RECORD}"))]
    return sorted((record for record in records if record), key=lambda record: float(record["started_at"]))


def _driver_lives(record: dict[str, Any]) -> bool:
    """False if the driver ran on this host and is gone. A process that has its pid now but started later is another
    one."""
    driver = record["driver"]
    if driver["host"] != socket.gethostname():
        return True
    try:
        process = psutil.Process(driver["pid"])
        born: float = process.create_time()
        return process.status() != psutil.STATUS_ZOMBIE and born <= record["started_at"] + _CLOCK_S
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False
    except psutil.AccessDenied:
        return True
