"""Compares a plan with what a run measured: its exporters' values and its step times. No clock, no network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rayzero.plan.bound import StepBound
from rayzero.plan.tiers import RunBytes
from rayzero.quantities import format_bytes
from rayzero.telemetry import names
from rayzero.telemetry.metric import Metric, Role
from rayzero.telemetry.scrape import Scrape, Scraped

_LEAST_BYTES = 32 << 20  # every process grows by some MiB, whatever it trains
_LEAST_S = 0.01  # calls, threads and messages take some milliseconds of a step that no bound counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure of a plan, and the value that was measured."""

    what: str
    unit: Literal["bytes", "s"]
    kind: Literal["planned", "at most", "at least"]  # what kind of figure the plan gives
    planned: float
    measured: float | None  # None: not measured
    least: float = 0.0  # below this, most of the value is what plans leave out

    @property
    def ratio(self) -> float | None:
        """Measured over planned; None if either is missing or too small to compare."""
        if self.measured is None or not self.planned or self.is_small:
            return None
        return self.measured / self.planned

    @property
    def is_small(self) -> bool:
        """Whether the planned value is too small for a ratio to mean anything."""
        return 0 < self.planned < self.least

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        told = ("what", "unit", "kind", "planned", "measured", "ratio")
        return {name: getattr(self, name) for name in told}


def compare_bytes(plan: RunBytes, scrape: Scrape) -> tuple[Comparison, ...]:
    """Compare the bytes of ranks, owners and, if all run on one host, of the host with what a scrape found."""
    ranks = [one for one in scrape.processes if one.target.role is Role.RANK]
    owners = [one for one in scrape.processes if one.target.role is Role.OPTIMIZER]
    rows = [row for rank in ranks for row in _of_rank(plan, rank)]
    rows += [_of_owner(plan, owner) for owner in owners if (owner.target.index or 0) < len(plan.owners)]
    if len(plan.hosts) == 1:
        rows += _of_host(plan, [*ranks, *owners], scrape.processes)
    return tuple(rows)


def compare_step(bound: StepBound, seconds: float) -> Comparison:
    """Compare a step's time with its lower bound."""
    what = f"step time (bound by {bound.binds})"
    return Comparison(what=what, unit="s", kind="at least", planned=bound.seconds, measured=seconds, least=_LEAST_S)


def format_comparisons(rows: Iterable[Comparison]) -> list[str]:
    """A line for each, for people."""
    return [
        f"{row.what:<32}  {row.kind:>8} {_amount(row, row.planned):>10}  measured {_amount(row, row.measured):>10}"
        + ("" if row.ratio is None else f"  ratio {row.ratio:.3f}")
        + ("  too small to compare" if row.is_small else "")
        for row in rows
    ]


def _in_bytes(
    what: str,
    planned: float,
    measured: float | None,
    kind: Literal["planned", "at most"] = "planned",
    of_any_size: bool = False,
) -> Comparison:
    least = 0 if of_any_size else _LEAST_BYTES
    return Comparison(what=what, unit="bytes", kind=kind, planned=planned, measured=measured, least=least)


def _of_rank(plan: RunBytes, rank: Scraped) -> Iterator[Comparison]:
    who, device = rank.target.who, plan.device
    gathered = _now(rank, names.PREFETCH_WINDOW_BYTES)
    yield _in_bytes(f"{who} gathered parameters", device.parameters, gathered, "at most", of_any_size=True)
    if _now(rank, names.HEAP_BYTES, kind="peak") is not None:  # it computes on a CPU, and has sampled its peak
        host = max(plan.hosts, key=lambda one: one.ranks)
        yield _in_bytes(f"{who} computing", host.of_ranks / host.ranks, _heap(rank))
    peak = _now(rank, names.GPU_MEMORY_BYTES, kind="peak_active")
    if peak is not None:  # it computes on a GPU
        yield _in_bytes(f"{who} device peak", device.peak, peak, of_any_size=True)


def _heap(rank: Scraped) -> float | None:
    """How much its heap has grown at the peak of its steps: bytes reported by purpose, and the rest."""
    told = _now(rank, names.MEMORY_BYTES, tier="ram")
    apart = [_now(rank, names.MEMORY_BYTES, kind=kind, tier="ram") for kind in ("process", "unused")]
    return None if told is None else told - sum(size or 0.0 for size in apart) + _higher(rank)


def _of_owner(plan: RunBytes, owner: Scraped) -> Comparison:
    """How much the owner's resident memory grew (it reports that as a share of its own plan), less unused bytes."""
    planned = plan.owners[owner.target.index or 0].steady
    error = _now(owner, names.PLAN_ERROR_RATIO, what="host")
    grown = None if error is None else planned * (1 + error) - _unused(owner)
    return _in_bytes(f"{owner.target.who} memory", planned, grown)


def _of_host(plan: RunBytes, processes: Sequence[Scraped], everyone: Sequence[Scraped]) -> Iterator[Comparison]:
    """Three rows: what all ranks and owners took beyond their size before the run, with shared pages counted once,
    each rank at the peak of its steps, and no checkpoint being written; the same including ``everyone``'s programs; and
    the freed memory that malloc still kept, which no plan can predict."""
    grown = [_grown(one) for one in processes]
    known = [size for size in grown if size is not None]
    (host,) = plan.hosts
    steady = host.total - sum(owner.copies for owner in plan.owners)
    unused = sum(max(0.0, _unused(one) - _higher(one)) for one in processes)
    used = sum(_higher(one) - _unused(one) for one in processes)
    everybody = len(known) == len(grown)
    beyond = sum(known) + used if everybody else None
    yield _in_bytes("host memory beyond the programs", steady - host.programs, beyond)
    whole = [_pss(one) for one in everyone]
    total = None if None in whole else sum(size or 0.0 for size in whole) + used
    yield _in_bytes("host memory", steady, total, "at most")  # programs that a fork server has forked share imports
    yield _in_bytes("freed memory that malloc keeps", 0, unused if everybody else None, of_any_size=True)


def _now(one: Scraped, metric: Metric, **labels: str) -> float | None:
    return None if one.series is None else one.series.get(metric, **labels)


def _grown(one: Scraped) -> float | None:
    now, before = _pss(one), _now(one, names.MEMORY_BYTES, kind="process")
    return None if now is None or before is None else now - before


def _pss(one: Scraped) -> float | None:
    """Its resident memory, including its share of pages that it shares with other processes."""
    return _now(one, names.PROCESS_MEMORY_BYTES, kind="pss")


def _higher(one: Scraped) -> float:
    """How much more a rank used at the peak of a step than it uses now."""
    peak, now = _now(one, names.HEAP_BYTES, kind="peak"), _now(one, names.HEAP_BYTES, kind="used")
    return 0.0 if peak is None or now is None else max(0.0, peak - now)


def _unused(one: Scraped) -> float:
    """Bytes that were freed but are still resident."""
    return _now(one, names.MEMORY_BYTES, kind="unused") or 0.0


def _amount(row: Comparison, value: float | None) -> str:
    if value is None:
        return "not told"
    return format_bytes(int(value)) if row.unit == "bytes" else f"{value:.4g} s"
