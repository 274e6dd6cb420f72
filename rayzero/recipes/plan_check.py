"""Compares a run's plan with what it measured in its first steps, its exporters' values and its step times: logs the
result once and writes it to plan.json."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, Literal

import torch

from rayzero.cluster.files.key_files import read_viewer
from rayzero.cluster.files.run_record import read_record
from rayzero.errors import ConfigError
from rayzero.files import parse_json, read_text, replace_file
from rayzero.plan.bound import StepBound
from rayzero.plan.hardware import Hardware, Hosts
from rayzero.plan.tiers import RunBytes
from rayzero.quantities import count, format_bytes
from rayzero.recipes.planning import RecipeWork, plan_recipe, recipe_bytes, recipe_hardware
from rayzero.recipes.run_log import StepRow
from rayzero.telemetry import names
from rayzero.telemetry.metric import Metric, Role
from rayzero.telemetry.scrape import Scrape, Scraped, Target, scrape

PLAN = "plan.json"
_MAX_PLAN = 1 << 24  # bytes
PLAN_STEPS = 20  # after these, every page has been used, and owners report how much they grew
_ANSWER_S = 2.0
_AGAIN_S = 1.0  # exporters refresh their pages no more often
_TRIES = 5
_LEAST_BYTES = 32 << 20  # every process grows by some MiB, whatever it trains
_LEAST_S = 0.01  # calls, threads and messages take some milliseconds of a step that no bound counts
log = logging.getLogger(__name__)


def measure_hardware(work: RecipeWork) -> Hardware | None:
    """This host's limits, measured before the run starts (half a second on CPUs); None if they cannot be measured."""
    try:
        if not work.recipe.scaling.use_gpu:
            return recipe_hardware(work, on_gpu=False)
        if not torch.cuda.is_available():  # ranks are on other hosts
            return None
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:  # its CUDA context ends with it
            return apart.submit(recipe_hardware, work, on_gpu=True).result()
    except (RuntimeError, OSError, ConfigError) as error:
        log.warning("nothing is planned, because this host cannot be measured: %s", error)
        return None


class PlanCheck:
    """Counts a run's rows; once, after PLAN_STEPS of them, compares the plan with measurements, logs the result and
    writes it.

    Knows the plan and how to scrape exporters; not what is trained. A run without telemetry is not compared."""

    def __init__(self, work: RecipeWork, hardware: Hardware | None, run_dir: Path) -> None:
        """hardware: None if it is not known; then no bound is compared."""
        self._work, self._hardware, self._run_dir = work, hardware, run_dir
        self._targets: tuple[Target, ...] = ()
        self._hosts = Hosts()
        self._seconds: list[float] = []
        self._tries = 0
        self._again = 0.0
        self._done = False

    def started(self, record: Mapping[str, Any]) -> None:
        """The run is up; ``record``: its run.json so far."""
        told, optimizers = record["telemetry"], sum(map(_has_shards, record["members"]))
        self._work = self._work.with_optimizers(optimizers)
        self._targets = tuple(Target.of(one["address"], one["labels"]) for one in told["targets"]) if told else ()
        ranks = Counter(one["host"] for one in record["members"] if one["who"].startswith("rank"))
        gpus_each = max(ranks.values()) if self._work.recipe.scaling.use_gpu else 0
        self._hosts = Hosts(count=len({one["host"] for one in record["members"]}), gpus_each=gpus_each)

    def take(self, row: StepRow) -> str | None:
        """One more step is done. Returns the comparison, as lines, once."""
        if self._done or not self._targets:
            return None
        self._seconds.append(row.step_seconds)
        last = row.step >= self._work.recipe.steps
        if len(self._seconds) < PLAN_STEPS or (monotonic() < self._again and not last):
            return None
        rows = self._compare()
        self._tries, self._again = self._tries + 1, monotonic() + _AGAIN_S
        if last or self._tries == _TRIES or all(one.measured is not None for one in rows):
            return self._finish(rows)
        return None

    def _compare(self) -> tuple[Comparison, ...]:
        record = read_record(self._run_dir)
        if record is not None and record["telemetry"]:  # the optimizers may have changed since it began
            self.started(record)
        found = scrape(self._targets, timeout_s=_ANSWER_S, viewer=read_viewer(self._run_dir))
        rows = compare_bytes(recipe_bytes(self._work, self._hosts), found)
        if self._hardware is None or len({target.node for target in self._targets}) > 1:
            return rows  # the coordinator is on this host, so if all share its host, all are here
        planned = plan_recipe(self._work, replace(self._hardware, hosts=self._hosts))
        return (*rows, compare_step(planned.bound, median(self._seconds)))

    def _finish(self, rows: tuple[Comparison, ...]) -> str:
        self._done = True
        steps = len(self._seconds)
        compared = [row.to_json() for row in rows]
        try:
            replace_file(self._run_dir / PLAN, json.dumps({"steps": steps, "compared": compared}, indent=1) + "\n")
        except OSError as error:  # training goes on without it
            log.warning("%s is not written: %s", self._run_dir / PLAN, error.strerror)
        return "\n".join([f"plan against measured, after {count(steps, 'step')}", *format_comparisons(rows)])


def read_plan(run_dir: Path) -> dict[str, Any] | None:
    """plan.json of a run; None if there is none or it holds something else."""
    try:
        found = parse_json(read_text(run_dir / PLAN, at_most=_MAX_PLAN))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _has_shards(member: Mapping[str, Any]) -> bool:
    return member["who"].startswith("optimizer") and bool(member.get("has_shards", True))


# ---- the figures of a plan beside what a scrape has found: no clock, no network -------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure of a plan, and the value that was measured."""

    what: str
    unit: Literal["bytes", "s"]
    kind: Literal["planned", "at most", "at least"]  # what kind of figure the plan gives
    planned: float
    measured: float | None  # None: not measured
    least: float = 0.0  # below this, most of the value is what plans leave out
    waiting: float = 0.0  # of ``planned``: what a run needs or does not need, as its copies are slow or fast

    @property
    def ratio(self) -> float | None:
        """Measured over planned, with as much of ``waiting`` as comes nearest; None if either is missing or too small
        to compare."""
        if self.measured is None or not self.planned or self.is_small:
            return None
        return self.measured / min(max(self.measured, self.planned - self.waiting), self.planned)

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
    waiting: float = 0.0,
) -> Comparison:
    least = 0 if of_any_size else _LEAST_BYTES
    return Comparison(
        what=what, unit="bytes", kind=kind, planned=planned, measured=measured, least=least, waiting=waiting
    )


def _of_rank(plan: RunBytes, rank: Scraped) -> Iterator[Comparison]:
    who, device = rank.target.who, plan.device
    gathered = _now(rank, names.PREFETCH_WINDOW_BYTES)
    yield _in_bytes(f"{who} gathered parameters", device.parameters, gathered, "at most", of_any_size=True)
    if _now(rank, names.HEAP_BYTES, kind="peak") is not None:  # it computes on a CPU, and has sampled its peak
        host = max(plan.hosts, key=lambda one: one.ranks)
        waiting = host.waiting / host.ranks
        yield _in_bytes(f"{who} computing", host.of_ranks / host.ranks, _heap(rank), waiting=waiting)
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
    yield _in_bytes("host memory beyond the programs", steady - host.programs, beyond, waiting=host.waiting)
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
