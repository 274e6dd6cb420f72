"""The dashboards and rules as they are committed: current, legal, and about metrics that exist."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from promql_parser import parse

from rayzero.telemetry import names
from rayzero.telemetry.metric import Kind, Metric

from .queries import BOARDS, ROOT, RULES, board, in_rules, metrics_in, on_boards, panels, with_values

METRICS = {metric.name: metric for metric in vars(names).values() if isinstance(metric, Metric)}
ALL = [*on_boards(), *in_rules()]


def test_the_committed_files_are_what_the_generator_writes() -> None:
    done = subprocess.run([sys.executable, ROOT / "generate.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("found", ALL, ids=lambda found: found.where)
def test_every_expression_is_promql(found) -> None:
    parse(with_values(found.expr))


def test_every_metric_of_a_query_exists_and_every_metric_is_shown() -> None:
    used = set().union(*(metrics_in(found.expr) for found in ALL))
    recorded = {found.where for found in in_rules() if found.kind == "record"}
    assert used - set(METRICS) == set(), "queried, but in no process"
    shown = set().union(*(metrics_in(found.expr) for found in on_boards()))
    assert set(METRICS) - shown == set(), "measured, but on no panel"
    assert not recorded & set(METRICS)


@pytest.mark.parametrize("found", ALL, ids=lambda found: found.where)
def test_counters_are_rated_and_histograms_are_read_as_such(found) -> None:
    for name in metrics_in(found.expr):
        metric = METRICS[name]
        after = [part.split("[")[0] for part in found.expr.split(name)[1:]]
        if metric.kind is Kind.COUNTER:
            assert any(verb in found.expr for verb in ("rate(", "increase(")), f"{name} only grows"
        if metric.kind is Kind.HISTOGRAM:
            assert all(rest.startswith(("_bucket", "_sum", "_count")) for rest in after), name
        if "_bucket" in found.expr:
            assert "le" in found.expr.partition("by (")[2].partition(")")[0], "a quantile needs le"


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_dashboard_keeps_the_rules(path: Path) -> None:
    described = board(path)
    assert described["id"] is None
    assert described["uid"] == path.stem
    assert 36 <= described["schemaVersion"] <= 42
    assert described["graphTooltip"] == 1
    assert described["tags"] == ["rayzero"]
    assert described["links"][0]["tags"] == ["rayzero"]
    marks = ["Checkpoints", "Recoveries", "Rescales", "Starts"]
    assert [one["name"] for one in described["annotations"]["list"]] == marks
    variables = {one["name"]: one for one in described["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    for name, one in variables.items():
        if name != "datasource":
            assert one["datasource"]["uid"] == "${datasource}"
            assert one["multi"]
            assert one["includeAll"]
    assert "run" in variables
    uids = {other.stem for other in BOARDS}
    for one in panels(described):
        assert one["title"], one["id"]
        assert len(one["description"]) > 8, one["title"]
        assert one["fieldConfig"]["defaults"]["unit"], one["title"]
        assert one["datasource"]["uid"] == "${datasource}"
        for target in one["targets"]:
            assert 'run=~"$run"' in target["expr"], target["expr"]
            used = {word.split('"')[0] for word in target["expr"].split('=~"$')[1:]}
            assert used <= set(variables), target["expr"]
        for link in one.get("links", []):
            assert link["url"].removeprefix("/d/") in uids


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap(path: Path) -> None:
    places = [one["gridPos"] for one in board(path)["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for a, b in itertools.combinations(places, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"] or a["y"] + a["h"] <= b["y"]
        assert apart or b["y"] + b["h"] <= a["y"], (a, b)


@pytest.mark.promise("observable", "alerts")
def test_every_alert_says_what_to_do_and_is_tested() -> None:
    tested = (ROOT / "prometheus" / "tests.yaml").read_text()
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                assert rule["labels"]["severity"] in ("warning", "critical")
                assert set(rule["annotations"]) == {"summary", "description", "runbook"}
                fires = f"alertname: {rule['alert']}\n        exp_alerts:\n          - exp_labels"
                assert fires in tested, rule["alert"]


@pytest.mark.promise("installs", "alerts")
@pytest.mark.parametrize(
    "command",
    [("check", "rules", "rules.yaml"), pytest.param(("test", "rules", "tests.yaml"), marks=pytest.mark.thorough)],
    ids=lambda command: command[0],
)
def test_promtool_agrees(command: tuple[str, ...], promtool: str) -> None:
    done = subprocess.run([promtool, *command], cwd=RULES.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def agrees(promtool: str, folder: Path, asked: list[dict[str, Any]], **series: str) -> None:
    """What promtool computes of series, a sample in 15 s, is what was expected."""
    given = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "15s", "input_series": given, "promql_expr_test": asked}
    (folder / "test.yaml").write_text(yaml.safe_dump({"rule_files": [], "tests": [test]}))
    done = subprocess.run([promtool, "test", "rules", "test.yaml"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_checkpoints_are_marked_the_first_of_a_run_too(promtool: str, tmp_path: Path) -> None:
    """The metric is not there before a run's first checkpoint: a change of its value alone would miss that one."""
    (marks,) = {found.expr for found in on_boards() if found.where.endswith(": Checkpoints")}
    expr = with_values(marks)
    values = "_x8 100+0x15 700+0x15"  # one every 15 s: checkpoints at 2m and 6m
    name = 'rayzero_checkpoint_last_success_timestamp_seconds{run="a"}'
    asked = [
        {"expr": f"count({expr})", "eval_time": at, "exp_samples": [{"labels": "{}", "value": 1}] if marked else []}
        for at, marked in (("90s", False), ("2m30s", True), ("4m30s", False), ("6m30s", True), ("8m30s", False))
    ]
    agrees(promtool, tmp_path, asked, **{name: values})


def test_changes_of_the_optimizers_are_counted_and_marked_the_first_of_a_run_too(promtool: str, tmp_path: Path) -> None:
    """The metrics are not there before a run's first change: ``increase`` alone would miss that one."""
    exprs = {found.where.partition(": ")[2]: with_values(found.expr) for found in on_boards()}
    counted, seconds, marks = exprs["Changes A"], exprs["Seconds of changes A"], exprs["Rescales"]
    values = {  # a sample in 15 s: changes at 2m and 6m, one that is given up at 4m
        'rayzero_rescales_total{run="a",outcome="done"}': "_x8 1x15 2x400",
        'rayzero_rescales_total{run="a",outcome="given_up"}': "_x16 1x400",
        'rayzero_rescale_seconds_total{run="a",step="hold"}': "_x8 2x15 6x400",
    }

    def is_at(eval_time: str, expr: str, **samples: float) -> dict[str, object]:
        told = [{"labels": labels, "value": value} for labels, value in samples.items()]
        return {"expr": expr, "eval_time": eval_time, "exp_samples": told}

    done, given_up, hold = ('{run="a",outcome="done"}', '{run="a",outcome="given_up"}', '{run="a",step="hold"}')
    asked = [
        is_at("90s", counted),
        is_at("3m", counted, **{done: 1}),
        is_at("50m", counted, **{done: 2, given_up: 1}),
        is_at("100m", counted, **{done: 0, given_up: 0}),
        is_at("50m", seconds, **{hold: 6}),
        *(is_at(at, f"count({marks})", **{"{}": 1}) for at in ("2m30s", "6m30s")),
        *(is_at(at, f"count({marks})") for at in ("90s", "4m30s", "8m30s")),
    ]
    agrees(promtool, tmp_path, asked, **values)


def test_clipped_steps_are_a_share_of_the_steps_that_the_same_process_decided(promtool: str, tmp_path: Path) -> None:
    """Ranks count their steps elsewhere and later: over theirs, a run that clips every step had more than all."""
    (share,) = {f.expr for f in on_boards() if "rayzero_clipped_steps_total" in f.expr}
    counted = {
        'rayzero_decided_steps_total{run="a",actor="0"}': "0+10x4 60+20x30",
        'rayzero_clipped_steps_total{run="a",actor="0"}': "0+10x4 60+20x30",
        'rayzero_step_seconds_count{run="a",rank="0"}': "_ _ 0+10x4 60+20x30",
    }
    asked = [
        {
            "expr": f"round({with_values(share, interval='1m')}, 0.001)",
            "eval_time": at,
            "exp_samples": [{"labels": '{run="a"}', "value": 1}],
        }
        for at in ("45s", "75s", "90s", "3m")
    ]
    agrees(promtool, tmp_path, asked, **counted)


def test_provisioning_names_what_is_there() -> None:
    provider = yaml.safe_load((ROOT / "provisioning/dashboards/rayzero.yaml").read_text())["providers"][0]
    source = yaml.safe_load((ROOT / "provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    assert (provider["type"], source["type"]) == ("file", "prometheus")


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    return found
