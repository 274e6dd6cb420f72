"""Serves the live page: one HTML file, and the JSON that it asks for while somebody looks at it.

A thread of the coordinator follows metrics.jsonl and scrapes the run's exporters, as ``rayzero top`` does, but only
while the JSON is asked for: a run that nobody looks at has no cost.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from rayzero.cluster.files.metrics_log import RowTail, Value, values_of
from rayzero.cluster.run import RunState
from rayzero.files import to_json
from rayzero.telemetry.metric import Role
from rayzero.telemetry.names import MEMORY_BYTES
from rayzero.telemetry.pages import Page
from rayzero.telemetry.picture import PHASES, Picture, draw_from, keep
from rayzero.telemetry.scrape import Scrape, Target, Viewer, scrape

PAGE_PATH = "/"
DATA_PATH = "/live.json"
MOST_POINTS = 400  # of one curve: about as many as a screen has pixels for

_LEAST_S = 1.5  # between two scrapes
_SHARE = 0.1  # of the thread's time, at most, in scrapes
_LOOKED_S = 15.0  # after the last request, nobody looks any more
_WINDOW_S = 10.0  # speeds and waits are means of so long, and of one step at least
_ANSWER_S = 2.0  # an exporter that has not answered by then is shown as silent
_MOST_CURVES = 24
_LEAST = ("loss", "validation_loss", "tokens_per_second")  # these have a curve, whatever comes first
_NUMBERS = ("step", "loss", "tokens_per_second", "step_seconds", "eta_seconds", "since_step")  # of a ``Picture``
_TIERS = ("gpu", "pinned", "shm", "ram")

log = logging.getLogger(__name__)


# ---- what it shows, as values for JSON --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that happened to the run."""

    time: float  # seconds since 1970
    text: str
    bad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the coordinator knows without asking anybody."""

    run: str
    state: RunState = RunState.STARTING
    started_at: float  # seconds since 1970
    hosts: Mapping[str, str] = field(default_factory=dict)  # process -> its host
    targets: Sequence[Target] = ()  # the exporters
    events: Sequence[RunEvent] = ()  # oldest first


def described(
    known: Known,
    curves: Mapping[str, Sequence[tuple[int, float]]],
    picture: Picture | None,
    memory: Mapping[str, Mapping[str, float]],
    now: float,
) -> dict[str, Any]:
    """The page's values. ``picture``: None: no process has been scraped yet."""
    return {
        "run": known.run,
        "state": known.state,
        "at": now,
        "started_at": known.started_at,
        "curves": {name: [list(point) for point in points] for name, points in curves.items()},
        "events": [asdict(event) for event in reversed(known.events)],
        "now": None if picture is None else _numbers(picture),
        "phases": [] if picture is None else _shares(picture),
        "memory": {tier: dict(kinds) for tier, kinds in memory.items()},
        "bars": []
        if picture is None
        else [asdict(bar) for bar in picture.bars if bar.what.endswith(("memory", "gpu"))],
        "ranks": [] if picture is None else [_hosted(asdict(rank), known) for rank in picture.ranks],
        "owners": [] if picture is None else [_hosted(asdict(owner), known) for owner in picture.owners],
        "followers": None if picture is None or picture.followers is None else asdict(picture.followers),
        "trouble": [] if picture is None else _trouble(picture),
    }


def _numbers(picture: Picture) -> dict[str, Any]:
    waited = [sum(rank.waits.values()) / rank.step_seconds for rank in picture.ranks if rank.step_seconds]
    shown = {name: getattr(picture, name) for name in _NUMBERS}
    return shown | {"waiting": max(waited, default=None)}  # share of a step, of the rank that waits most


def _shares(picture: Picture) -> list[dict[str, Any]]:
    """The phases of a step that take time, in their order."""
    total = sum(picture.phases.values())
    found = [(phase, picture.phases.get(phase, 0.0)) for phase in PHASES]
    return [{"phase": phase, "seconds": s, "share": s / total} for phase, s in found if s > 0]


def _hosted(row: dict[str, Any], known: Known) -> dict[str, Any]:
    return row | {"host": known.hosts.get(row["who"].removeprefix("beside "))}


def _trouble(picture: Picture) -> list[str]:
    late = [f"{who} has sent no heartbeat for {age:.0f} s" for who, age in sorted(picture.late.items())]
    return late + [f"{who} does not answer: {why}" for who, why in sorted(picture.silent.items())]


def memory_by_tier(scraped: Scrape) -> dict[str, dict[str, float]]:
    """Bytes of the ranks' and owners' processes, by tier and purpose; tiers without any are left out."""
    tiers: dict[str, dict[str, float]] = {tier: {} for tier in _TIERS}
    for one in scraped.processes:
        if one.series is None or one.target.role is Role.COORDINATOR:
            continue
        for (name, labels), size in one.series.values.items():
            of = dict(labels)
            if name == MEMORY_BYTES.name and size > 0:
                kinds = tiers.setdefault(of["tier"], {})
                kinds[of["kind"]] = kinds.get(of["kind"], 0.0) + size
    return {tier: kinds for tier, kinds in tiers.items() if kinds}


# ---- curves -----------------------------------------------------------------------------------------------------


class Curve:
    """Points (step, value). When there are too many, every second one goes, and from then on every second one that
    comes; the newest is always there."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []
        self._newest: tuple[int, float] | None = None
        self._every, self._seen = 1, 0

    def add(self, step: int, value: float) -> None:
        """One more point. A step that is done again replaces what followed it."""
        if self._newest is not None and step <= self._newest[0]:
            self._points = [point for point in self._points if point[0] < step]
        self._newest = (step, value)
        if self._seen % self._every == 0:
            self._points.append(self._newest)
        self._seen += 1
        if len(self._points) > MOST_POINTS:
            self._points = self._points[::2]
            self._every *= 2

    @property
    def points(self) -> list[tuple[int, float]]:
        """The points that are kept, in the order of steps."""
        if self._newest is None or (self._points and self._points[-1] == self._newest):
            return list(self._points)
        return [*self._points, self._newest]


class Curves:
    """One curve for each name that has numbers. Knows rows' values; not where they come from."""

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}

    def add(self, step: int, values: Mapping[str, Value]) -> None:
        """Take a row. Names beyond the first ``_MOST_CURVES`` have no curve."""
        for name, value in values.items():
            has_room = name in _LEAST or len(self._curves) < _MOST_CURVES
            if not isinstance(value, str) and (name in self._curves or has_room):
                self._curves.setdefault(name, Curve()).add(step, float(value))

    def points(self) -> dict[str, list[tuple[int, float]]]:
        return {name: curve.points for name, curve in self._curves.items()}


class LivePage:
    """What a browser may ask for. Knows rows, scrapes and what the coordinator tells; not how a run works."""

    def __init__(self, run_dir: Path, look: Callable[[], Known], viewer: Viewer) -> None:
        """``look``: called in this object's thread. ``viewer``: opens the run's exporters."""
        self._look, self._viewer = look, viewer
        self._tail, self._curves = RowTail(run_dir), Curves()
        self._kept: tuple[Scrape, ...] = ()
        self._made = b""
        self._asked = -math.inf  # monotonic seconds
        self._wanted, self._closed = threading.Event(), threading.Event()
        html = files("rayzero.cluster.processes").joinpath("live_page.html").read_bytes()
        self.pages: Mapping[str, Page] = {
            PAGE_PATH: Page("text/html; charset=utf-8", lambda: html),
            DATA_PATH: Page("application/json", self._answer),
        }
        self._thread = threading.Thread(target=self._watch, name="rayzero-live-page", daemon=True)
        self._thread.start()

    def _answer(self) -> bytes:
        self._asked = time.monotonic()
        self._wanted.set()
        return self._made or _json(described(self._look(), {}, None, {}, time.time()))

    def _watch(self) -> None:
        while True:
            self._wanted.wait()
            if self._closed.is_set():
                return
            began = time.monotonic()
            try:
                self.refresh()
            except Exception:  # the page is old, and training goes on
                log.exception("the live page could not be made")
            took = time.monotonic() - began
            self._closed.wait(max(_LEAST_S, took / _SHARE - took))
            if time.monotonic() - self._asked > _LOOKED_S and not self._closed.is_set():
                self._wanted.clear()

    def refresh(self) -> None:
        while rows := self._tail.next():
            for row in rows:
                self._curves.add(row["step"], values_of(row) or {})
        asked = tuple(self._look().targets)
        now = scrape(asked, timeout_s=_ANSWER_S, viewer=self._viewer)
        same = [one for one in self._kept if {p.target for p in one.processes} == set(asked)]
        self._kept = keep((*same, now), _WINDOW_S)
        known = self._look()
        picture = draw_from(known.run, self._kept[0] if len(self._kept) > 1 else None, now)
        self._made = _json(described(known, self._curves.points(), picture, memory_by_tier(now), now.at))

    def renew(self, viewer: Viewer) -> None:
        """Open the run's exporters with this from the next scrape on: their certificates are new."""
        self._viewer = viewer

    def close(self) -> None:
        self._closed.set()
        self._wanted.set()
        self._thread.join()


def _json(told: Any) -> bytes:
    return to_json(told).encode()
