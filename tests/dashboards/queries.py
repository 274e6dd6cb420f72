"""Every query there is: of panels, annotations, variables, alerts and recording rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2] / "dashboards"
BOARDS = sorted((ROOT / "json").glob("*.json"))
RULES = ROOT / "prometheus" / "rules.yaml"

CLASSIC = re.compile(r"_(bucket|sum|count)$")


@dataclass(frozen=True)
class Found:
    """One expression and where it stands."""

    where: str
    expr: str
    kind: str  # panel, annotation, alert, record


def board(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def panels(described: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in described["panels"] if one["type"] != "row"]


def on_boards() -> Iterator[Found]:
    for path in BOARDS:
        described = board(path)
        for one in panels(described):
            for target in one["targets"]:
                yield Found(f"{path.stem}: {one['title']} {target['refId']}", target["expr"], "panel")
        for one in described["annotations"]["list"]:
            yield Found(f"{path.stem}: {one['name']}", one["target"]["expr"], "annotation")


def in_rules() -> Iterator[Found]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            kind = "alert" if "alert" in rule else "record"
            yield Found(rule[kind], rule["expr"], kind)


def with_values(expr: str, *, interval: str = "1m") -> str:
    """The query as Grafana sends it with All chosen everywhere."""
    expr = expr.replace("$__rate_interval", interval)
    return re.sub(r'"\$\w+"', '".*"', expr)


def metrics_in(expr: str) -> set[str]:
    """Names of metrics, those of histograms without the suffix of their series."""
    return {CLASSIC.sub("", name) for name in re.findall(r"(?<![:\w])rayzero_\w+", expr)}
