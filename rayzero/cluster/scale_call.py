"""Asks a run that goes on for other optimizer actors, from any process that sees its folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayzero.cluster.files.run_record import LOST, run_status
from rayzero.cluster.run import Rescaled, RunState
from rayzero.cluster.upkeep.rescaling import why_not
from rayzero.config import ZeroConfig
from rayzero.config.zero import Placement
from rayzero.elastic.requests import ScaleRequest, ask, withdraw
from rayzero.errors import ConfigError, RunFailedError

_LOOK_S = 0.2
_TAKEN_S = 120.0  # in which a driver takes a request: it looks twice a second, but not while it starts the run again


def scale(
    run: str | Path,
    num_optimizers: int,
    *,
    avoid: Sequence[str] = (),
    placement: Placement | None = None,
    wait: bool = True,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Rescaled | None:
    """Give a run other optimizer actors while it trains; no step is lost and no bit changes. The newest request counts.

    run: its folder. avoid: nodes (ids or addresses) on which no optimizer actor is to have shards; those that have are
        replaced by others. placement: where all of them are to be from now on (``ZeroConfig.placement``); those that
        are elsewhere are replaced by others. wait: until they have changed; returns then what came of it. on_progress:
        called with each step, while it waits.

    Raises ConfigError if there is no such run, or it cannot change its optimizers, RunFailedError if they stayed as
    they were, the run ended before, or its driver does not take the request, which is withdrawn then."""
    run_dir = Path(run)
    _require_running(run_status(run_dir))
    request = ScaleRequest(num_optimizers=num_optimizers, avoid=tuple(avoid), placement=placement)
    try:
        ask(run_dir, request)
    except OSError as error:
        raise ConfigError(f"cannot leave a request in {run_dir}: {error.strerror}") from error
    return _outcome(run_dir, request, on_progress) if wait else None


def _require_running(record: Mapping[str, Any]) -> None:
    if record["state"] not in (RunState.STARTING, RunState.RUNNING):
        gone = "its driver is gone" if record["state"] == LOST else f"it has {record['state']}"
        raise ConfigError(f"run {record['run']!r} does not go on, because {gone}: only a run that goes on can change")
    try:
        config = record["config"]
        zero, failures = ZeroConfig.from_mapping(config["zero"]), config["run"]["max_failures"]
    except (KeyError, TypeError, ConfigError) as error:
        raise ConfigError(f"the record of run {record['run']!r} does not say how it is configured: {error}") from error
    reason = why_not(zero, failures)
    if reason is not None:
        raise ConfigError(f"the optimizers of run {record['run']!r} cannot change: {reason}")


def _outcome(run_dir: Path, request: ScaleRequest, on_progress: Callable[[str], None]) -> Rescaled:
    said, asked = None, time.monotonic()
    while True:
        record = run_status(run_dir)
        found = next((one for one in record["rescales"] if one["id"] == request.id), None)
        if found is not None:
            if found["failed"] is not None:
                raise RunFailedError(f"the optimizers stay as they are: {found['failed']}")
            return Rescaled(**found)
        progress = record["rescaling"]
        if progress is not None and progress != said:
            said = progress
            on_progress(progress)
        if record["state"] not in (RunState.STARTING, RunState.RUNNING):
            raise RunFailedError(f"run {record['run']!r} ended before its optimizers changed")
        if record["state"] == RunState.STARTING:
            asked = time.monotonic()
        elif time.monotonic() - asked > _TAKEN_S and withdraw(run_dir, request):
            pid, host = record["driver"]["pid"], record["driver"]["host"]
            raise RunFailedError(
                f"the driver of run {record['run']!r}, pid {pid} on {host}, has not taken the request within "
                f"{_TAKEN_S:.0f} s: see there whether it was killed or is stopped"
            )
        time.sleep(_LOOK_S)
