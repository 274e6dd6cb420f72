"""A plan beside what a run measured: what its exporters tell, and how long its steps took. No clock, no network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rayzero.plan.bound import StepBound
from rayzero.plan.tiers import RunBytes
from rayzero.quantities import format_bytes
from rayzero.telemetry.metric import Role
from rayzero.telemetry.names import (
    GPU_MEMORY_BYTES,
    HEAP_BYTES,
    MEMORY_BYTES,
    PLAN_ERROR_RATIO,
    PREFETCH_WINDOW_BYTES,
    PROCESS_MEMORY_BYTES,
)
from rayzero.telemetry.scrape import Scrape, Scraped

__all__ = ["Comparison", "compare_bytes", "compare_step", "format_comparisons"]


_LEAST_BYTES = 32 << 20  # a process grows by some MiB whatever it trains
_LEAST_S = 0.01  # a step has some milliseconds of calls, threads and messages that no bound counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure of a plan and what it came to be."""

    what: str
    unit: Literal["bytes", "s"]
    kind: Literal["planned", "at most", "at least"]  # what the plan says of it
    planned: float
    measured: float | None  # None: nobody told
    least: float = 0.0  # a plan of less is mostly what plans leave out

    @property
    def ratio(self) -> float | None:
        """Measured over planned; None where that would be of what the plan leaves out."""
        if self.measured is None or not self.planned or self.is_small:
            return None
        return self.measured / self.planned

    @property
    def is_small(self) -> bool:
        """Whether the plan is of so little that a ratio would say nothing of it."""
        return 0 < self.planned < self.least

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "what": self.what,
            "unit": self.unit,
            "kind": self.kind,
            "planned": self.planned,
            "measured": self.measured,
            "ratio": self.ratio,
        }


def compare_bytes(plan: RunBytes, scrape: Scrape) -> tuple[Comparison, ...]:
    """The bytes of ranks, owners and (where all are on one) of the host, as their processes told in a scrape."""
    ranks = [one for one in scrape.processes if one.target.role is Role.RANK]
    owners = [one for one in scrape.processes if one.target.role is Role.OPTIMIZER]
    rows = [row for rank in ranks for row in _of_rank(plan, rank)]
    rows += [_of_owner(plan, owner) for owner in owners]
    if len(plan.hosts) == 1:
        rows += _of_host(plan, [*ranks, *owners], scrape.processes)
    return tuple(rows)


def compare_step(bound: StepBound, seconds: float) -> Comparison:
    """A step's time beside the least that it can be."""
    return Comparison(
        what=f"step time (bound by {bound.binds})",
        unit="s",
        kind="at least",
        planned=bound.seconds,
        measured=seconds,
        least=_LEAST_S,
    )


def format_comparisons(rows: Iterable[Comparison]) -> list[str]:
    """A line for each, for people."""
    return [
        f"{row.what:<32}  {row.kind:>8} {_amount(row, row.planned):>10}  measured {_amount(row, row.measured):>10}"
        + ("" if row.ratio is None else f"  ratio {row.ratio:.3f}")
        + ("  too small to compare" if row.is_small else "")
        for row in rows
    ]


def _of_rank(plan: RunBytes, rank: Scraped) -> Iterator[Comparison]:
    now, who = rank.series, rank.target.who
    gathered = None if now is None else now.get(PREFETCH_WINDOW_BYTES)
    yield Comparison(
        what=f"{who} gathered parameters",
        unit="bytes",
        kind="at most",
        planned=plan.device.parameters,
        measured=gathered,
    )
    if _computes_here(rank):
        heap = _heap(rank)
        yield Comparison(
            what=f"{who} computing",
            unit="bytes",
            kind="planned",
            planned=_own(plan),
            measured=heap,
            least=_LEAST_BYTES,
        )
    peak = None if now is None else now.get(GPU_MEMORY_BYTES, kind="peak_active")
    if peak is not None:  # it computes on a GPU
        yield Comparison(
            what=f"{who} device peak", unit="bytes", kind="planned", planned=plan.device.peak, measured=peak
        )


def _own(plan: RunBytes) -> float:
    """Host bytes of one rank alone."""
    host = max(plan.hosts, key=lambda one: one.ranks)
    return host.of_ranks / host.ranks


def _computes_here(rank: Scraped) -> bool:
    """Whether it computes on a CPU, and has."""
    return rank.series is not None and rank.series.get(HEAP_BYTES, kind="peak") is not None


def _heap(rank: Scraped) -> float | None:
    """What its heap has grown by at the height of its steps: what it has been told the use of, and the rest."""
    if rank.series is None:
        return None
    told = rank.series.get(MEMORY_BYTES, tier="ram")
    apart = [rank.series.get(MEMORY_BYTES, kind=kind, tier="ram") for kind in ("process", "unused")]
    return None if told is None else told - sum(size or 0.0 for size in apart) + _higher(rank)


def _of_owner(plan: RunBytes, owner: Scraped) -> Comparison:
    """What its resident memory grew by (it tells that as a part of its own plan), less what nobody uses."""
    index = owner.target.index or 0
    planned = plan.owners[index].total
    error = None if owner.series is None else owner.series.get(PLAN_ERROR_RATIO, what="host")
    return Comparison(
        what=f"{owner.target.who} memory",
        unit="bytes",
        kind="planned",
        planned=planned,
        measured=None if error is None else planned * (1 + error) - _unused(owner),
        least=_LEAST_BYTES,
    )


def _of_host(plan: RunBytes, processes: Sequence[Scraped], everyone: Sequence[Scraped]) -> Iterator[Comparison]:
    """What all ranks and owners took beyond what they were before the run, pages that they share once, each rank at
    the height of its steps; the same with ``everyone``'s programs; apart from it, what malloc keeps even then of what
    they freed, which is no plan's to foresee."""
    grown = [_grown(one) for one in processes]
    known = [size for size in grown if size is not None]
    (host,) = plan.hosts
    unused = sum(max(0.0, _unused(one) - _higher(one)) for one in processes)
    used = sum(_higher(one) - _unused(one) for one in processes)
    everybody = len(known) == len(grown)
    yield Comparison(
        what="host memory beyond the programs",
        unit="bytes",
        kind="planned",
        planned=host.total - host.programs,
        measured=sum(known) + used if everybody else None,
        least=_LEAST_BYTES,
    )
    whole = [_pss(one) for one in everyone]
    yield Comparison(
        what="host memory",
        unit="bytes",
        kind="planned",
        planned=host.total,
        measured=None if None in whole else sum(size or 0.0 for size in whole) + used,
        least=_LEAST_BYTES,
    )
    yield Comparison(
        what="freed memory that malloc keeps",
        unit="bytes",
        kind="planned",
        planned=0,
        measured=unused if everybody else None,
    )


def _grown(one: Scraped) -> float | None:
    if one.series is None:
        return None
    now, before = _pss(one), one.series.get(MEMORY_BYTES, kind="process")
    return None if now is None or before is None else now - before


def _pss(one: Scraped) -> float | None:
    """What it holds, its part of what it shares with others included."""
    return None if one.series is None else one.series.get(PROCESS_MEMORY_BYTES, kind="pss")


def _higher(one: Scraped) -> float:
    """By how much more was in use at the height of a rank's step than is now."""
    if one.series is None:
        return 0.0
    peak, now = one.series.get(HEAP_BYTES, kind="peak"), one.series.get(HEAP_BYTES, kind="used")
    return 0.0 if peak is None or now is None else max(0.0, peak - now)


def _unused(one: Scraped) -> float:
    """Bytes that are resident and belong to nobody."""
    return (one.series.get(MEMORY_BYTES, kind="unused") if one.series is not None else None) or 0.0


def _amount(row: Comparison, value: float | None) -> str:
    if value is None:
        return "not told"
    return format_bytes(int(value)) if row.unit == "bytes" else f"{value:.4g} s"
