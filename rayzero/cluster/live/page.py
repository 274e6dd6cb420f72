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
from importlib.resources import files
from pathlib import Path
from typing import Any

from rayzero.cluster.files.row_tail import RowTail, values_of
from rayzero.cluster.live.curves import Curves
from rayzero.cluster.live.snapshot import Known, described, memory_by_tier
from rayzero.files import to_json
from rayzero.telemetry.discovery import Target
from rayzero.telemetry.http import Page
from rayzero.telemetry.picture import draw_from, keep
from rayzero.telemetry.scrape import Scrape, Viewer, scrape

__all__ = ["DATA_PATH", "PAGE_PATH", "LivePage"]

PAGE_PATH = "/"
DATA_PATH = "/live.json"

_LEAST_S = 1.5  # between two scrapes
_SHARE = 0.1  # of the thread's time, at most, in scrapes
_LOOKED_S = 15.0  # after the last request, nobody looks any more
_WINDOW_S = 10.0  # speeds and waits are means of so long, and of one step at least
_ANSWER_S = 2.0  # an exporter that has not answered by then is shown as silent

log = logging.getLogger(__name__)


class LivePage:
    """What a browser may ask for. Knows rows, scrapes and what the coordinator tells; not how a run works."""

    def __init__(
        self, run_dir: Path, look: Callable[[], Known], targets: Callable[[], Sequence[Target]], viewer: Viewer
    ) -> None:
        """``look``, ``targets``: called in this object's thread. ``viewer``: opens the run's exporters."""
        self._look, self._targets, self._viewer = look, targets, viewer
        self._tail, self._curves = RowTail(run_dir), Curves()
        self._kept: tuple[Scrape, ...] = ()
        self._made = b""
        self._asked = -math.inf  # monotonic seconds
        self._wanted, self._closed = threading.Event(), threading.Event()
        html = files("rayzero.cluster.live").joinpath("page.html").read_bytes()
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
        """Read new rows, scrape the exporters, make the JSON."""
        while rows := self._tail.next():
            for row in rows:
                self._curves.add(row["step"], values_of(row) or {})
        asked = tuple(self._targets())
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
        """End the thread. Idempotent."""
        self._closed.set()
        self._wanted.set()
        self._thread.join()


def _json(told: Any) -> bytes:
    return to_json(told).encode()
