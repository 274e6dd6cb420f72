"""What a dashboard shows, as plain values; dashboards/grafana.py makes Grafana's JSON of it.

In queries ``<run>``, ``<rank>``, ``<actor>`` and ``<role>`` are the matchers of the dashboard's variables, ``<i>`` is
the rate interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VARIABLES = {
    "<run>": 'run=~"$run"',
    "<rank>": 'run=~"$run",rank=~"$rank"',
    "<actor>": 'run=~"$run",actor=~"$actor"',
    "<role>": 'run=~"$run",role=~"$role"',
    "<i>": "$__rate_interval",
}

_CHECKPOINT = "rayzero_checkpoint_last_success_timestamp_seconds{<run>}"  # not there before a run's first
_RECOVERIES = "rayzero_recoveries_total{<run>}"
_RESCALES = 'rayzero_rescales_total{<run>,outcome="done"}'

ANNOTATIONS = {
    "Checkpoints": (f"changes({_CHECKPOINT}[1m]) > 0 or ({_CHECKPOINT} unless {_CHECKPOINT} offset 1m)", "blue"),
    "Recoveries": (f"increase({_RECOVERIES}[1m]) > 0 or ({_RECOVERIES} unless {_RECOVERIES} offset 1m)", "orange"),
    "Rescales": (f"increase({_RESCALES}[1m]) > 0 or ({_RESCALES} unless {_RESCALES} offset 1m)", "green"),
    "Starts": ("count by (run) (rayzero_step{<run>} unless rayzero_step{<run>} offset 1m)", "purple"),
}
"""Marks on every dashboard: name -> when, colour."""

Unit = Literal["s", "bytes", "Bps", "percentunit", "short", "none", "dateTimeAsIso", "reqps", "ops"]


def grown(counter: str, window: str = "1h") -> str:
    """By how much a counter has grown in a window, its first value included: a counter of what is rare is not there
    before it counts, and ``increase`` takes what it begins with for old."""
    return f"(({counter} unless {counter} offset {window}) or increase({counter}[{window}]))"


def promql(text: str) -> str:
    """The query with Grafana's variables in place of ours."""
    for ours, grafanas in VARIABLES.items():
        text = text.replace(ours, grafanas)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One PromQL expression and how its series are called."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One question and its answer."""

    title: str
    description: str  # what it shows, and what to do when it looks wrong
    unit: Unit
    queries: tuple[Query, ...]
    kind: Literal["lines", "stack", "stat", "table"] = "lines"
    width: int = 8  # of 24
    thresholds: tuple[tuple[float | None, str], ...] = ()  # (from, colour); the first has None
    at_most: float | None = None  # end of the axis
    opens: str = ""  # uid of the dashboard that tells more


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One dashboard."""

    uid: str
    title: str
    description: str
    variables: tuple[Literal["rank", "actor", "role"], ...]  # beside the data source and the run
    rows: tuple[Row, ...]


def panel(title: str, description: str, unit: Unit, *queries: tuple[str, str] | str, **settings: object) -> Panel:
    """A panel; a query is its expression, or the expression and a legend."""
    made = tuple(Query(expr=q) if isinstance(q, str) else Query(expr=q[0], legend=q[1]) for q in queries)
    return Panel(title=title, description=description, unit=unit, queries=made, **settings)  # type: ignore[arg-type]


LOW_IS_BAD = ((None, "red"), (0.5, "orange"), (0.9, "green"))  # of shares that should be near 1
HIGH_IS_BAD = ((None, "green"), (0.1, "orange"), (0.3, "red"))  # of shares that should be near 0
FULL_IS_BAD = ((None, "green"), (0.8, "orange"), (0.9, "red"))  # of what has an end
ANY_IS_BAD = ((None, "green"), (1, "red"))
