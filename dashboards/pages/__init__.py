"""One file a dashboard; in the order that a reader goes through them."""

from __future__ import annotations

from dashboards.pages import layers, links, memory, optimizer, reliability, run, step
from dashboards.spec import Page

PAGES: tuple[Page, ...] = (
    run.PAGE,
    step.PAGE,
    links.PAGE,
    optimizer.PAGE,
    memory.PAGE,
    reliability.PAGE,
    layers.PAGE,
)
