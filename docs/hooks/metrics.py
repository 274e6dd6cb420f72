"""The reference of every metric, from telemetry/names.py, each with a query of the dashboards that reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from docs.hooks.prose import prose
from docs.hooks.repository import ROOT
from rayzero.telemetry.metric import Kind, Metric
from rayzero.telemetry.names import METRICS

SECTIONS = {
    "BUILD_INFO": "Progress",
    "STEP_SECONDS": "Where a step goes",
    "PREFETCH_REQUESTS": "Prefetch and links",
    "OPTIMIZER_UPDATE_SECONDS": "Optimizer actors",
    "MEMORY_BYTES": "Memory",
    "CHECKPOINT_SECONDS": "Reliability",
    "GROUP_GRAD_NORM": "Layers",
    "ACTIVATION_BYTES": "Activations",
}
"""The first metric of each section of telemetry/names.py, by its name there."""

_OF_HISTOGRAMS = re.compile(r"_(bucket|sum|count)$")


def queries() -> dict[str, tuple[str, str, str]]:
    """For each metric a query that reads it, with the dashboard and panel that show it: the shortest of them."""
    found: dict[str, tuple[str, str, str]] = {}
    for path in sorted((ROOT / "dashboards" / "json").glob("*.json")):
        board: dict[str, Any] = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                expr = _typed(target["expr"])
                for name in re.findall(r"rayzero_\w+", expr):
                    name = _OF_HISTOGRAMS.sub("", name)
                    if name not in found or len(expr) < len(found[name][0]):
                        found[name] = (expr, board["title"], panel["title"])
    return found


def _typed(expr: str) -> str:
    """A query as one would type it, without Grafana's variables: those that choose everything are left out."""
    expr = expr.replace("$__rate_interval", "1m").replace('run=~"$run"', 'run="demo"')
    return re.sub(r',\w+=~"\$\w+"', "", expr)


def page() -> str:
    """A section for each part of a run, an entry for each metric."""
    from rayzero.telemetry import names

    first = {id(getattr(names, name)): title for name, title in SECTIONS.items()}
    shown = queries()
    lines: list[str] = []
    for metric in METRICS:
        if title := first.get(id(metric)):
            lines.append(f"\n## {title}\n")
        lines += _entry(metric, *shown[metric.name])
    return "\n".join(lines)


def _entry(metric: Metric, query: str, board: str, panel: str) -> Iterator[str]:
    roles = ", ".join({"rank": "ranks", "optimizer": "optimizer actors"}.get(one, str(one)) for one in metric.roles)
    facts = [str(metric.kind), metric.unit or "no unit", f"from {roles}"]
    facts += [f"labels {', '.join(f'`{one}`' for one in metric.labels)}"] if metric.labels else []
    facts += [f"only with {metric.only}"] if metric.only else []
    if metric.kind is Kind.HISTOGRAM:
        facts.append(f"buckets {', '.join(f'{one:g}' for one in metric.buckets)}")
    yield f"\n#### `{metric.name}` {{ #{metric.name} }}\n"
    yield "; ".join(facts) + "\n{ .kind }\n"
    yield f"{prose(metric.help)}\n"
    yield f"```promql\n{query}\n```\n"
    yield f"On the dashboard {board.replace('RayZero / ', '')}, panel {panel}.\n{{ .kind }}\n"
