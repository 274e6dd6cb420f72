"""Names and values that a run's processes share: process names, members, the run's state, reports.

Plain values, which travel between processes and into files; neither Ray nor torch is needed to read them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rayzero.elastic.members import MemberId, MemberKind

NAMESPACE = "rayzero"  # Ray namespace of the run's named actor
DISCOVERY_PATH = "/sd"  # of the coordinator's exporter: Prometheus' http_sd
TRACE_PATH = "/trace"  # of every exporter: its process's spans


def coordinator_name(run: str) -> str:
    """The name of a run's coordinator actor, in ``NAMESPACE``."""
    return f"{run}/coordinator"


def rank_name(rank: int) -> str:
    """A rank worker's name in messages."""
    return f"rank {rank}"


def optimizer_name(owner: int) -> str:
    """An optimizer actor's name in messages."""
    return f"optimizer {owner}"


def actor_name(member: MemberId) -> str:
    """The name of the actor that a member is in. An owner beside a rank is in the rank's."""
    return rank_name(member.index) if member.kind is MemberKind.BESIDE else str(member)


class RunState(StrEnum):
    """The state of a run. The last three are final."""

    STARTING = "starting"  # processes are placed and started
    RUNNING = "running"  # every rank is in its training loop
    FINISHED = "finished"  # every loop returned
    FAILED = "failed"  # a process failed; the record's `error` says which
    STOPPED = "stopped"  # interrupted by the user


OPEN_STATES = RunState.STARTING, RunState.RUNNING  # of a run that has not ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of the run, as ``rayzero status`` shows it."""

    who: str  # "rank 0", "optimizer 1"
    pid: int
    node: str  # node id
    host: str  # node address
    open_files: int | None = None  # that it may have open at once; None: it has not said
    has_shards: bool = True  # False: an optimizer that is there for the ranks of its host alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A failure that the run has outlived: a death, or the loss of what only a checkpoint brings back."""

    who: str  # "rank 0", "optimizer 1"; "the run": it started again from a checkpoint
    pid: int | None  # of the process that took the place; None: the run's
    seconds: float  # from the failure, or from Ray's word of one on another node, until work could go on
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds by phase: names.RECOVERY_SECONDS
    time: float = field(default_factory=time.time)  # when it could, seconds since 1970


@dataclass(frozen=True, slots=True)
class Load:
    """What a process has done since it began."""

    count: int  # steps of a rank, updates of an owner
    seconds: float  # that they took
    exposed: float = 0.0  # of a rank's steps, in which it waited for updates that were not published yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescaled:
    """What came of a request for other optimizer actors."""

    id: str  # of the request
    why: str  # it was made
    before: int  # optimizer actors
    after: int
    failed: str | None  # why they stayed as they were; None: they have changed
    seconds: Mapping[str, float] = field(default_factory=dict)  # by step: rayzero/elastic/reform.py; {}: nothing to do
    pause: float = 0.0  # seconds in which no step was decided
    moved_bytes: int = 0  # of shards that have another owner now
    time: float = field(default_factory=time.time)  # when it ended, seconds since 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerState:
    """How far a logger is in this start of the run."""

    logger: str
    where: str | None = None  # a folder, a file or a URL; None: it is not open
    sent: int = 0  # rows
    lost: int = 0  # rows that it refused while it took others
    step: int = -1  # of the last row
    error: str | None = None  # the last one
    complete: bool = False  # it has ended, and has every row


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One call of ``rayzero.report``."""

    rank: int
    world_size: int = 1  # ranks that report
    life: int = 0  # of the rank: a later one makes the last reports of the one before again
    step: int = 0  # steps the rank had committed; 0 before it has prepared a model
    number: int = 0  # of its reports at this step
    time: float = field(default_factory=time.time)  # when it was made, seconds since 1970
    metrics: Mapping[str, Any] = field(default_factory=dict)  # JSON-able values
    checkpoint: str | None = None  # directory of a checkpoint that is complete
