"""The dashboards beside the types that Grafana publishes: grafana.json is made from those by grafana.ts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from jsonschema.exceptions import best_match

from .queries import BOARDS, ROOT, board, panels

SCHEMA = Draft7Validator(json.loads(Path(__file__).with_name("grafana.json").read_text()))


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_of_the_published_type(path: Path) -> None:
    error = best_match(SCHEMA.iter_errors(board(path)))
    assert error is None, f"{error.json_path}: {error.message[:300]}"


def _panel(described: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(one for one in panels(described) if one["type"] == kind)


MUTATIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a panel's field": lambda board: _panel(board, "timeseries").update(fieldsConfig={}),
    "a panel's kind": lambda board: _panel(board, "stat").update(type="stats"),
    "an option of lines": lambda board: _panel(board, "timeseries")["options"]["legend"].update(placement="under"),
    "a query's text": lambda board: _panel(board, "stat")["targets"][0].pop("expr"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_what_grafana_does_not_know_is_found(mutation: str) -> None:
    described = board(ROOT / "json" / "rayzero-run.json")
    MUTATIONS[mutation](described)
    assert not SCHEMA.is_valid(described)
