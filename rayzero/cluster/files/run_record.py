"""``run.json``: what a run's driver writes about it every second, for the commands and for a run that continues it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from rayzero.cluster.continuation import States
from rayzero.cluster.run import Member, Recovery, Rescaled, RunState
from rayzero.errors import ConfigError
from rayzero.records import JsonRecord, load_record

RECORD = "run.json"

_MOST = 1 << 28  # bytes


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


class LoggerState(JsonRecord):
    """How far a logger is (``loggers/children.py``, ``Progress``)."""

    logger: str
    where: str | None = None
    sent: int
    lost: int
    step: int
    error: str | None = None
    complete: bool = False


class RunRecord(JsonRecord):
    """The entries of ``run.json``. Those with a default are not in the record of a run that has not come so far."""

    model_config = ConfigDict(extra="allow")  # entries of a later RayZero are passed on

    run: str
    state: RunState
    error: str | None = None
    started_at: float  # seconds since 1970
    ended_at: float | None = None
    driver: DriverProcess
    ray_address: str | None = None
    ray_auth_mode: str | None = None
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

    def plain(self) -> dict[str, Any]:
        return self.model_dump()


def read_record(path: Path) -> dict[str, Any] | None:
    """The entries of ``run.json`` in a run directory; None if there is none. Raises ConfigError if the file is not a
    run's record."""
    what, instead = "a run's record", "restore it from a copy, or move the folder away"
    try:
        return load_record(path / RECORD, RunRecord, what, instead, at_most=_MOST).plain()
    except (FileNotFoundError, NotADirectoryError):  # there is no run, whatever else is there
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {path / RECORD}: {error}") from error
