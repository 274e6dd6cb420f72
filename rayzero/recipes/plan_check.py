"""Compares a run's plan with measurements after its first steps: logs the result once and writes it to plan.json."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rayzero.cluster.files.run_record import read_record
from rayzero.cluster.files.viewer_file import read_viewer
from rayzero.errors import ConfigError
from rayzero.files import parse_json, read_text, replace_file
from rayzero.plan.comparison import Comparison, compare_bytes, compare_step, format_comparisons
from rayzero.plan.hardware import Hardware, Hosts
from rayzero.quantities import count
from rayzero.recipes.planning import RecipeWork, plan_recipe, recipe_bytes, recipe_hardware
from rayzero.recipes.run_log import StepRow
from rayzero.telemetry.discovery import Target
from rayzero.telemetry.scrape import Scrape, scrape

PLAN = "plan.json"
_MAX_PLAN = 1 << 24  # bytes
PLAN_STEPS = 20  # after these, every page has been used, and owners report how much they grew

_ANSWER_S = 2.0
_AGAIN_S = 1.0  # exporters refresh their pages no more often
_TRIES = 5

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

    def __init__(
        self,
        work: RecipeWork,
        hardware: Hardware | None,
        run_dir: Path,
        say: Callable[[str], None],
        *,
        look: Callable[[tuple[Target, ...]], Scrape] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """hardware: None if it is not known; then no bound is compared. look: scrapes exporters; None: over HTTP."""
        self._work, self._hardware, self._run_dir, self._say = work, hardware, run_dir, say
        self._look = look or (lambda targets: scrape(targets, timeout_s=_ANSWER_S, viewer=read_viewer(run_dir)))
        self._clock = clock
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

    def take(self, row: StepRow) -> None:
        """One more step is done."""
        if self._done or not self._targets:
            return
        self._seconds.append(row.step_seconds)
        last = row.step >= self._work.recipe.steps
        if len(self._seconds) < PLAN_STEPS or (self._clock() < self._again and not last):
            return
        rows = self._compare()
        self._tries, self._again = self._tries + 1, self._clock() + _AGAIN_S
        if last or self._tries == _TRIES or all(one.measured is not None for one in rows):
            self._finish(rows)

    def _compare(self) -> tuple[Comparison, ...]:
        record = read_record(self._run_dir)
        if record is not None and record["telemetry"]:  # the optimizers may have changed since it began
            self.started(record)
        rows = compare_bytes(recipe_bytes(self._work, self._hosts), self._look(self._targets))
        if self._hardware is None or len({target.node for target in self._targets}) > 1:
            return rows  # the coordinator is on this host, so if all share its host, all are here
        planned = plan_recipe(self._work, replace(self._hardware, hosts=self._hosts))
        return (*rows, compare_step(planned.bound, median(self._seconds)))

    def _finish(self, rows: tuple[Comparison, ...]) -> None:
        self._done = True
        steps = len(self._seconds)
        self._say("\n".join([f"plan against measured, after {count(steps, 'step')}", *format_comparisons(rows)]))
        compared = [row.to_json() for row in rows]
        try:
            replace_file(self._run_dir / PLAN, json.dumps({"steps": steps, "compared": compared}, indent=1) + "\n")
        except OSError as error:  # training goes on without it
            log.warning("%s is not written: %s", self._run_dir / PLAN, error.strerror)


def read_plan(run_dir: Path) -> dict[str, Any] | None:
    """plan.json of a run; None if there is none or it holds something else."""
    try:
        found = parse_json(read_text(run_dir / PLAN, at_most=_MAX_PLAN))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _has_shards(member: Mapping[str, Any]) -> bool:
    return member["who"].startswith("optimizer") and bool(member.get("has_shards", True))
