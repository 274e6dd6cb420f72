"""Computes the numbers that ``rayzero top`` and the live page show of a run, from two scrapes. Uses no clock, network
or terminal.

[Note: since when] Speeds, waits and phases are differences of two scrapes, divided by the steps that ended in between.
If none ended (long steps, a run that hangs), they are the means since each process started, and the picture says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from rayzero.telemetry import names
from rayzero.telemetry.metric import Metric, Role
from rayzero.telemetry.scrape import Scrape, Scraped, Series, Target

PHASES = ("data", "forward", "fetch_wait", "backward", "grad_push", "norm", "optimizer", "checkpoint")
CAUSES = ("fetch", "push", "norm", "optimizer")  # a wait in mean_over_ranks is part of the phase data
RESULTS = ("hit", "late", "miss")

_IN_HEADLINE = ("step", "loss")  # these have metrics of their own

_MOST_KEPT = 60  # scrapes
_LATE_S = 10.0  # processes send the coordinator a heartbeat every two seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank; a number that it does not report is None."""

    who: str
    step: int | None
    loss: float | None  # nats
    step_seconds: float | None
    waits: dict[str, float]  # cause -> seconds a step
    prefetch: dict[str, int]  # result -> uses since the earlier scrape


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerRow:
    """One owner, in an actor or beside a rank (offload_fraction); a number that it does not report is None."""

    who: str
    update_seconds: float | None  # of one step
    queue: int | None  # tasks
    threads: int | None
    cores: int | None
    efficiency: float | None  # share of the measured bandwidth limit of its host's memory
    version: int | None
    shards: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowersRow:
    """All processes that follow the run over the network."""

    count: int
    version: int | None  # which the one that is farthest behind has; -1: none yet
    newest: int | None  # which all owners have published
    change_bytes: int  # that they got in the span, of what versions changed
    whole_bytes: int  # the same of shards as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Bytes in use; ``limit``: None if there is none."""

    what: str
    used: float
    limit: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A run's state, as one screen shows it."""

    run: str
    step: int | None  # of the rank that is furthest behind
    loss: float | None  # mean over ranks
    reported: dict[str, float]  # the loop's other reported numbers, by name: mean over the ranks that report them
    tokens_per_second: float | None  # all ranks
    step_seconds: float | None  # mean over ranks
    eta_seconds: float | None
    since_step: float | None  # seconds since a rank last committed a step
    span: float | None  # seconds between the scrapes; None: means since the start, see [Note: since when]
    steps: int  # ended in the span
    phases: dict[str, float]  # seconds a step, mean over ranks, in the order of PHASES
    ranks: tuple[RankRow, ...]
    owners: tuple[OwnerRow, ...]
    followers: FollowersRow | None  # None: there are none
    bars: tuple[Bar, ...]
    silent: dict[str, str]  # process -> why it did not answer
    late: dict[str, float]  # process -> seconds since its last heartbeat, if that is long ago


@dataclass(frozen=True, slots=True)
class _Process:
    """One process now and before; ``before`` is None if differences count from its start."""

    target: Target
    now: Series
    before: Series | None

    def grown(self, metric: Metric, suffix: str = "", **labels: str) -> float | None:
        """How much a counter grew; all of it if the process was restarted. None if the process does not report it."""
        now = self.now.get(metric, suffix, **labels)
        before = self.before.get(metric, suffix, **labels) if self.before is not None else None
        return now if now is None or before is None or before > now else now - before

    def mean(self, metric: Metric, **labels: str) -> float | None:
        """The mean of the values that were added to a histogram; None if there were none."""
        return _ratio(self.grown(metric, "_sum", **labels), self.grown(metric, "_count", **labels))

    def whole(self, metric: Metric) -> int | None:
        """A gauge that is a whole number."""
        value = self.now.get(metric)
        return None if value is None else int(value)


def keep(kept: Sequence[Scrape], window_s: float) -> tuple[Scrape, ...]:
    """The scrapes that a next picture may start from, oldest first: few that cover ``window_s`` and a step's end."""
    left = list(kept)
    while len(left) > 2 and left[-1].at - left[1].at >= window_s and _steps_between(left[1], left[-1]):
        del left[0]
    while len(left) > _MOST_KEPT:  # no step has ended for long: keep the oldest, where the difference starts
        del left[1]
    return tuple(left)


def draw_from(run: str, before: Scrape | None, now: Scrape) -> Picture:
    """The picture of the time between two scrapes; if ``before`` is None, of all the time until ``now``."""
    steps = _steps_between(before, now) if before is not None else 0
    processes = _pair(before if steps else None, now)
    ranks = [process for process in processes if process.target.role is Role.RANK]
    owners = [process for process in processes if _is_owner(process)]
    committed = _told(rank.now.get(names.LAST_STEP_TIMESTAMP) for rank in ranks)
    return Picture(
        run=run,
        step=min((int(step) for step in _told(rank.now.get(names.STEP) for rank in ranks)), default=None),
        loss=_mean(rank.now.get(names.TRAIN_LOSS) for rank in ranks),
        reported=_reported(ranks),
        tokens_per_second=_sum(
            _ratio(rank.grown(names.TOKENS), rank.grown(names.STEP_SECONDS, "_sum")) for rank in ranks
        ),
        step_seconds=_mean(rank.mean(names.STEP_SECONDS) for rank in ranks),
        eta_seconds=max(_told(rank.now.get(names.ETA_SECONDS) for rank in ranks), default=None),
        since_step=max(0.0, now.at - max(committed)) if committed else None,
        span=now.at - before.at if before is not None and steps else None,
        steps=steps,
        phases={
            phase: _mean(rank.mean(names.STEP_PHASE_SECONDS, phase=phase) for rank in ranks) or 0.0 for phase in PHASES
        },
        ranks=tuple(map(_rank_row, ranks)),
        owners=tuple(map(_owner_row, owners)),
        followers=_followers_row(owners),
        bars=(*_node_bars(processes), *_process_bars(processes)),
        silent={one.target.who: one.error or "" for one in now.processes if one.series is None},
        late={
            who: age
            for process in processes
            if process.target.role is Role.COORDINATOR
            for who, age in process.now.by_label(names.HEARTBEAT_AGE_SECONDS, "process").items()
            if age > _LATE_S
        },
    )


def _pair(before: Scrape | None, now: Scrape) -> list[_Process]:
    """Every process that answered, with its earlier answer; by role and index, whenever it joined."""
    earlier = {one.target: one.series for one in before.processes} if before is not None else {}
    found = [_Process(one.target, one.series, earlier.get(one.target)) for one in now.processes if one.series]
    return sorted(found, key=lambda process: (process.target.role, process.target.index or 0))


def _steps_between(before: Scrape, now: Scrape) -> int:
    """How many steps ended: the most of any rank that answered both times."""
    earlier = {one.target: _steps(one) for one in before.processes if one.series}
    done = [_steps(one) - earlier[one.target] for one in now.processes if one.series and one.target in earlier]
    return max([0, *done])


def _steps(one: Scraped) -> int:
    return int((one.series.get(names.STEP_SECONDS, "_count") if one.series else None) or 0)


def _rank_row(rank: _Process) -> RankRow:
    steps = rank.grown(names.STEP_SECONDS, "_count")
    waits = {cause: _ratio(rank.grown(names.EXPOSED_WAIT_SECONDS, cause=cause) or 0.0, steps) for cause in CAUSES}
    return RankRow(
        who=rank.target.who,
        step=rank.whole(names.STEP),
        loss=rank.now.get(names.TRAIN_LOSS),
        step_seconds=rank.mean(names.STEP_SECONDS),
        waits={cause: seconds for cause, seconds in waits.items() if seconds is not None},
        prefetch={result: int(rank.grown(names.PREFETCH_REQUESTS, result=result) or 0) for result in RESULTS},
    )


def _reported(ranks: Iterable[_Process]) -> dict[str, float]:
    by_name: dict[str, list[float]] = {}
    for rank in ranks:
        for name, value in rank.now.by_label(names.REPORTED, "name").items():
            if name not in _IN_HEADLINE:
                by_name.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in sorted(by_name.items())}


def _is_owner(process: _Process) -> bool:
    """Whether it is an optimizer actor, or a rank with an owner beside it, which reports updates after its first."""
    return (
        process.target.role is Role.OPTIMIZER or process.now.get(names.OPTIMIZER_UPDATE_SECONDS, "_count") is not None
    )


def _owner_row(owner: _Process) -> OwnerRow:
    moved = _ratio(owner.grown(names.OPTIMIZER_BYTES), owner.grown(names.OPTIMIZER_UPDATE_SECONDS, "_sum"))
    actor = owner.target.role is Role.OPTIMIZER
    return OwnerRow(
        who=owner.target.who if actor else f"beside {owner.target.who}",
        update_seconds=owner.mean(names.OPTIMIZER_UPDATE_SECONDS),
        queue=owner.whole(names.OPTIMIZER_QUEUE_DEPTH),
        threads=owner.whole(names.OPTIMIZER_THREADS),
        cores=owner.whole(names.OPTIMIZER_CORES),
        efficiency=_ratio(moved, owner.now.get(names.HOST_BANDWIDTH_LIMIT)),
        version=owner.whole(names.PARAM_VERSION),
        shards=owner.whole(names.SHARDS),
    )


def _followers_row(owners: Sequence[_Process]) -> FollowersRow | None:
    """Each follower takes shards of every owner."""
    count = max((owner.whole(names.FOLLOWERS) or 0 for owner in owners), default=0)
    if not count:
        return None
    newest = min(_told(owner.now.get(names.PARAM_VERSION) for owner in owners), default=None)
    lag = max(_told(owner.now.get(names.FOLLOWER_LAG) for owner in owners), default=None)
    came = {
        form: int(_sum(owner.grown(names.FOLLOW_BYTES, form=form) for owner in owners) or 0)
        for form in ("changes", "whole")
    }
    return FollowersRow(
        count=count,
        version=None if newest is None or lag is None else int(newest - lag),
        newest=None if newest is None else int(newest),
        change_bytes=came["changes"],
        whole_bytes=came["whole"],
    )


def _node_bars(processes: Iterable[_Process]) -> list[Bar]:
    """Each node's memory and shared memory, as the first of its processes reports them."""
    nodes: dict[str, Series] = {}
    for process in processes:
        if process.now.get(names.HOST_MEMORY_HEADROOM_BYTES) is not None:
            nodes.setdefault(process.target.node, process.now)
    bars = []
    for node, series in nodes.items():
        limits = series.by_label(names.HOST_MEMORY_LIMIT_BYTES, "source").values()
        headroom, shm = series.get(names.HOST_MEMORY_HEADROOM_BYTES), series.get(names.SHM_USED_BYTES)
        if limits and headroom is not None:
            bars.append(Bar(what=f"{node} memory", used=max(0.0, min(limits) - headroom), limit=min(limits)))
        if shm is not None:
            bars.append(Bar(what=f"{node} shared memory", used=shm, limit=series.get(names.SHM_LIMIT_BYTES)))
    return bars


def _process_bars(processes: Iterable[_Process]) -> list[Bar]:
    """Memory that each process takes of its node, and parameters that a rank has gathered of its budget."""
    bars = []
    for process in processes:
        who, now = process.target.who, process.now
        limits = now.by_label(names.HOST_MEMORY_LIMIT_BYTES, "source").values()
        candidates = (
            ("host", now.get(names.PROCESS_MEMORY_BYTES, kind="pss"), min(limits, default=None)),
            ("gathered", now.get(names.PREFETCH_WINDOW_BYTES), now.get(names.PREFETCH_WINDOW_LIMIT_BYTES)),
            ("gpu", now.get(names.GPU_MEMORY_BYTES, kind="allocated"), now.get(names.GPU_MEMORY_BYTES, kind="total")),
        )
        bars += [
            Bar(what=f"{who} {what}", used=used, limit=limit) for what, used, limit in candidates if used is not None
        ]
    return bars


def _told(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Iterable[float | None]) -> float | None:
    told = _told(values)
    return fmean(told) if told else None


def _sum(values: Iterable[float | None]) -> float | None:
    told = _told(values)
    return sum(told) if told else None


def _ratio(value: float | None, by: float | None) -> float | None:
    return value / by if value is not None and by else None
