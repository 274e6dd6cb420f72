"""What was offloaded, per rank and group name, as numbers, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from rich.table import Table

from rayzero.activations.ledger import GroupTotals

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_MIB = 1 << 20


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
        return {
            "rank": self.rank,
            "groups": {name: totals.as_dict() for name, totals in self.groups.items()},
            "offloaded_bytes": self.offloaded_bytes,
            "achieved_fraction": self.achieved_fraction,
            "device_bytes": self.device_bytes,
            "peak_device_bytes": self.peak_device_bytes,
            "host": self.host,
        }


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
