"""A run's trace: the spans of its ranks and owners, requested while it runs, or kept when it ended."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from rayzero.cluster.files.key_files import read_viewer
from rayzero.cluster.files.run_record import run_status
from rayzero.cluster.run import TRACE_PATH, RunState
from rayzero.errors import ConfigError, RunFailedError
from rayzero.files import replace_file
from rayzero.records import parse_record
from rayzero.telemetry.metric import Role
from rayzero.telemetry.scrape import Viewer, discover, read_pages
from rayzero.telemetry.spans import ASKED_S, Recorded, trace_of

TRACE_FILE = "trace.json"  # in the folder of a run that kept its trace

_ANSWER_S = 10.0  # for a whole page, however slowly its bytes come
_TRACED = (Role.RANK, Role.OPTIMIZER)  # the coordinator takes no part in a step


def trace_run(run_dir: Path, seconds: float) -> dict[str, Recorded]:
    """The spans of the next ``seconds`` of the run in ``run_dir``, by process; more if it keeps spans from its start.

    Raises ConfigError if it does not run or has no telemetry, RunFailedError if it does not answer."""
    record = run_status(run_dir)
    name = record["run"]
    if record["state"] != RunState.RUNNING:
        raise ConfigError(_not_running(name, record["state"], run_dir / TRACE_FILE))
    if not record["telemetry"]:
        raise ConfigError(
            f"run {name!r} cannot be traced, because it has run.telemetry.enabled=false; start it with telemetry"
        )
    viewer = read_viewer(run_dir)
    urls = _traced(record["telemetry"]["http_sd"], name, viewer)
    found = _spans(urls, name, viewer)
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, ASKED_S / 2))
        found = _spans(urls, name, viewer)
    return found


def _not_running(name: str, state: str, kept: Path) -> str:
    if state == RunState.STARTING:
        return f"run {name!r} is still starting and has no spans yet; try again when it trains"
    if kept.is_file():
        return f"run {name!r} is not running any more ({state}); its trace is in {kept}"
    return (
        f"run {name!r} is not running any more ({state}) and kept no trace; trace a run while it runs, or start it "
        "with run.telemetry.trace_steps=10 for a trace of its last 10 steps"
    )


def _traced(http_sd: str, run: str, viewer: Viewer) -> dict[str, str]:
    """Process -> address of its page, for every process that has spans, ranks first."""
    try:
        targets = discover(http_sd, timeout_s=_ANSWER_S, viewer=viewer)
    except OSError as error:
        raise _silent(f"the coordinator of run {run!r}", http_sd, error) from error
    except ValueError as error:
        raise RunFailedError(f"run {run!r} does not list its processes at {http_sd}: {error}") from error
    found = sorted((one for one in targets if one.role in _TRACED), key=lambda one: (one.role != Role.RANK, one.index))
    if not found:
        raise RunFailedError(f"run {run!r} lists no rank or owner at {http_sd} yet; try again when it trains")
    return {one.who: one.url(TRACE_PATH) for one in found}


def _spans(urls: Mapping[str, str], run: str, viewer: Viewer) -> dict[str, Recorded]:
    """Process -> its spans. Asks all at the same time, and names one that does not answer."""
    found: dict[str, Recorded] = {}
    pages = read_pages([*urls.values()], timeout_s=_ANSWER_S, viewer=viewer)
    for (who, url), page in zip(urls.items(), pages, strict=True):
        if isinstance(page, str):
            raise _silent(f"{who} of run {run!r}", url, page)
        try:
            found[who] = parse_record(page, Recorded)
        except ValueError as error:
            raise RunFailedError(f"{who} of run {run!r} answers with no spans: {error}") from error
    return found


def _silent(who: str, url: str, why: object) -> RunFailedError:
    return RunFailedError(
        f"{who} does not answer at {url}: {why}; check that the run has not just ended, "
        "and that this host can reach that network"
    )


def write_trace(path: Path, run: str, processes: Mapping[str, Recorded]) -> None:
    """Write the file for Perfetto, whole or not at all. Raises ConfigError if it cannot be written."""
    try:
        replace_file(path, json.dumps(trace_of(run, processes)) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write the trace to {path}: {error.strerror}") from error
