"""The state of a run for ``rayzero status``, read from its record, which the driver keeps up to date."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from rayzero.cluster.files.run_record import RECORD, read_record
from rayzero.cluster.run import RunState
from rayzero.errors import ConfigError
from rayzero.slabs.hold import held_in
from rayzero.store.shm.same_host import host_identity

LOST = "lost"  # the record says starting or running, but the driver is gone

_CLOCK_S = 2.0  # error of a process's start time, which is counted from boot


def run_status(run_dir: Path) -> dict[str, Any]:
    """What is known of the run in ``run_dir``: its ``run.json``.

    ``state`` is a RunState's value, or ``"lost"``. Raises ConfigError when no run was recorded there.
    """
    record = read_record(run_dir)
    if record is None:
        raise ConfigError(f"{run_dir} holds no run, because it has no {RECORD}")
    if record["state"] not in (RunState.STARTING, RunState.RUNNING):
        return record
    return record if _driver_lives(record) else record | {"state": LOST}


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
    if not _is_here(directory, states["memory"]):
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


def _is_here(directory: Path, memory: str) -> bool:
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
