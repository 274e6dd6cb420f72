"""Counts, per group name, what was saved, moved and waited for, and how many device bytes are held; shows that of all
ranks as numbers, as a table and as JSON."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch.distributed as dist
from rich.table import Table

from rayzero.lanes import AT_ONCE_S, Event, Lane
from rayzero.telemetry.names import ACTIVATION_BYTES
from rayzero.telemetry.recorder import Recorder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_MIB = 1 << 20


@dataclass(slots=True)
class GroupTotals:
    """Sums over all groups of one name. Bytes are device bytes unless a comment says otherwise."""

    groups: int = 0  # committed with at least one eligible tensor
    saved_bytes: int = 0  # eligible, each storage's bytes once
    offloaded_bytes: int = 0  # left for the host
    host_bytes: int = 0  # host bytes of what left (fewer if compressed)
    kept_bytes: int = 0  # stayed by choice
    no_room_bytes: int = 0  # stayed because the host cap was reached
    shared_bytes: int = 0  # saved again by a view whose bytes were stored already
    recomputed: int = 0  # groups run under recomputation
    released_bytes: int = 0  # handed over as dead, and freed
    refused_bytes: int = 0  # handed over as dead, but somebody still holds them
    returned_bytes: int = 0  # came back
    hits: int = 0  # reads whose bytes were fetched ahead and were back
    late: int = 0  # reads whose bytes were fetched ahead and were still on their way
    misses: int = 0  # reads whose bytes were not fetched before they were needed
    on_device: int = 0  # reads whose bytes never left the device
    stall_s: float = 0.0  # seconds the backward waited for copies


@dataclass(frozen=True, slots=True)
class _LaneWait:
    name: str
    lane: Lane
    start: Event
    stop: Event
    ahead: bool

    @property
    def seconds(self) -> float | None:
        return self.lane.seconds(self.start, self.stop)


class Ledger:
    """The device bytes of saved activations, now and at their peak, and the totals of each group name. Thread-safe."""

    def __init__(self, recorder: Recorder) -> None:
        self._lock = threading.Lock()
        self._recorder = recorder
        self.device_bytes = 0  # of committed groups on the device now, each byte once
        self.peak_device_bytes = 0  # the most since the start or the last ``reset_peak``
        self._totals: dict[str, GroupTotals] = {}
        self._waits: deque[_LaneWait] = deque()  # not counted yet, oldest first

    def reset_peak(self) -> None:
        """Let the peak start again from the present bytes."""
        with self._lock:
            self.peak_device_bytes = self.device_bytes

    def add_device(self, nbytes: int) -> None:
        """Count ``nbytes`` more device bytes as held."""
        with self._lock:
            self.device_bytes += nbytes
            self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)

    def drop_device(self, nbytes: int) -> None:
        """Count ``nbytes`` device bytes as freed."""
        with self._lock:
            self.device_bytes -= nbytes

    def add(self, name: str, **amounts: int) -> None:
        """Add to the totals of ``name``; ``amounts`` are fields of ``GroupTotals``."""
        with self._lock:
            totals = self._totals.setdefault(name, GroupTotals())
            for field, amount in amounts.items():
                setattr(totals, field, getattr(totals, field) + amount)

    def moved(self, direction: str, nbytes: int) -> None:
        """Count a copy in the metrics. ``direction``: "out" or "in"."""
        self._recorder.add(ACTIVATION_BYTES, nbytes, direction=direction)

    def waited(self, name: str, lane: Lane, start: Event, stop: Event, *, ahead: bool) -> None:
        """The backward of ``name`` may have waited between two events of a lane, for bytes that were asked for
        ``ahead`` or not. They are counted once both events have happened."""
        with self._lock:
            self._waits.append(_LaneWait(name, lane, start, stop, ahead))
        self._count_waits()

    def _count_waits(self) -> None:
        with self._lock:
            while self._waits and (seconds := self._waits[0].seconds) is not None:
                wait = self._waits.popleft()
                totals = self._totals.setdefault(wait.name, GroupTotals())
                stood = seconds > AT_ONCE_S
                totals.stall_s += seconds if stood else 0.0
                if wait.ahead:
                    totals.late += stood
                    totals.hits += not stood

    def totals(self) -> dict[str, GroupTotals]:
        """A copy of the totals, by group name."""
        self._count_waits()
        with self._lock:
            return {name: replace(totals) for name, totals in self._totals.items()}


# ---- what is shown of it --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One rank's totals. Bytes are device bytes, except in ``host``."""

    rank: int
    groups: dict[str, GroupTotals]
    device_bytes: int
    peak_device_bytes: int
    host: dict[str, object]  # the pool's status

    @property
    def offloaded_bytes(self) -> int:
        """The bytes that left, over all groups."""
        return sum(totals.offloaded_bytes for totals in self.groups.values())

    @property
    def achieved_fraction(self) -> float:
        """The share of the eligible bytes that left; 0.0 if there were none."""
        saved = sum(totals.saved_bytes for totals in self.groups.values())
        return self.offloaded_bytes / saved if saved else 0.0

    def as_dict(self) -> dict[str, object]:
        """Plain values, ready for JSON."""
        shares = {"offloaded_bytes": self.offloaded_bytes, "achieved_fraction": self.achieved_fraction}
        return asdict(self) | shares


def gather(summary: RankSummary, process_group: ProcessGroup | None = None) -> list[RankSummary]:
    """Every rank's summary on every rank, in rank order. A collective of torch.distributed; without it, only this
    rank's summary."""
    if not dist.is_available() or not dist.is_initialized():
        return [summary]
    found: list[RankSummary | None] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, summary, group=process_group)
    return sorted((one for one in found if one is not None), key=lambda one: one.rank)


def table(summaries: Sequence[RankSummary]) -> Table:
    """The offloaded MiB (2**20 bytes), with a row per rank, a column per group name, and totals at the right and at the
    bottom."""
    names = sorted({name for summary in summaries for name in summary.groups})
    shown = Table(title="offloaded activations, MiB", show_footer=len(summaries) > 1)
    shown.add_column("rank", footer="all")
    for name in names:
        shown.add_column(name, justify="right", footer=_mib(sum(_offloaded(one, name) for one in summaries)))
    shown.add_column("total", justify="right", footer=_mib(sum(one.offloaded_bytes for one in summaries)))
    shown.add_column("share", justify="right")
    shown.add_column("stall s", justify="right")
    for summary in summaries:
        stall = sum(totals.stall_s for totals in summary.groups.values())
        cells = [_mib(_offloaded(summary, name)) for name in names]
        share = f"{summary.achieved_fraction:.1%}"
        shown.add_row(str(summary.rank), *cells, _mib(summary.offloaded_bytes), share, f"{stall:.3f}")
    return shown


def to_json(summaries: Sequence[RankSummary]) -> str:
    """All numbers of all ranks, as JSON."""
    return json.dumps([summary.as_dict() for summary in summaries], indent=2)


def _offloaded(summary: RankSummary, name: str) -> int:
    totals = summary.groups.get(name)
    return totals.offloaded_bytes if totals is not None else 0


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:.2f}"
