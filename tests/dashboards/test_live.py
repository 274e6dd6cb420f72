"""The proof: a real training, a real Prometheus that finds its processes by http_sd, and every query that there is."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from rayzero.cluster.files.run_record import read_record
from rayzero.telemetry import names
from rayzero.telemetry.metric import Metric

from .queries import RULES, in_rules, metrics_in, on_boards, with_values

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420), pytest.mark.thorough]

METRICS = {metric.name: metric for metric in vars(names).values() if isinstance(metric, Metric)}
HAD = {
    "",
    "20 steps",
    "a change of the optimizers",
    "checkpoints",
    "rayzero.report",
    "rayzero train",
    "telemetry.measure_bandwidth and the native library",
}
"""Conditions of metrics (``Metric.only``) that this run meets."""

SETTINGS = {
    "num_layers": 3,
    "dim": 64,
    "seq_len": 32,
    "batch_size": 2,
    "steps": 1000000,
    "eval_every": 1000000,
    "zero.min_unit_bytes": 4096,
    "zero.gpu_param_memory_budget": 400000,  # some units come and go
    "run.checkpoint_every": 40,
    "run.name": "live",
    "run.telemetry.norms_every": 1,
    "run.telemetry.bind": "loopback",
}


LISTENS = re.compile(r'msg="Listening on".* address=(\S+)')

Found = TypeVar("Found")


class Prometheus:
    """One that runs, and its API."""

    def __init__(self, address: str) -> None:
        self._api = f"http://{address}/api/v1"

    def ask(self, what: str, **parameters: str) -> Any:
        """The data of an answer; raises on an error, a query that is not legal among them."""
        with urllib.request.urlopen(f"{self._api}/{what}?{urllib.parse.urlencode(parameters)}", timeout=20) as answer:
            described = json.load(answer)
        assert described["status"] == "success", described
        return described["data"]

    def values(self, expr: str) -> list[dict[str, Any]]:
        """Of a query, now."""
        return list(self.ask("query", query=expr)["result"])


@contextmanager
def process(*command: str, cwd: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs as long as the block; ends by SIGTERM."""
    with log.open("wb") as said:
        running = subprocess.Popen(command, cwd=cwd, stdout=said, stderr=subprocess.STDOUT)
        try:
            yield running
        finally:
            running.send_signal(signal.SIGTERM)
            running.wait(timeout=60)


def until(true: Callable[[], Found], what: str, log: Path, seconds: float = 150) -> Found:
    """What ``true`` returns once it is true."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if found := true():
                return found
        except OSError:  # not up yet
            pass
        assert time.monotonic() < deadline, f"{what}\n{log.read_text()[-3000:]}"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A run of 2 ranks and 2 optimizer actors that has trained for a while under a Prometheus."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    folder = tmp_path_factory.mktemp("live")
    shutil.copy(RULES, folder)
    (folder / "text.txt").write_text("Call me Ishmael. Some years ago, never mind how long precisely. " * 500)
    settings = SETTINGS | {"data": folder / "text.txt", "split": "tail", "run.storage_path": folder}
    train = [sys.executable, "-m", "rayzero", "train", *(f"{key}={value}" for key, value in settings.items())]
    serve = [
        "prometheus",
        "--config.file=prometheus.yaml",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        "--web.listen-address=127.0.0.1:0",  # any free port: its log says which
    ]
    logs = folder / "train.log", folder / "prometheus.log"
    with process(*train, cwd=folder, log=logs[0]):
        told = until(lambda: (read_record(folder / "live") or {}).get("telemetry"), "no run", logs[0])
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration(told["http_sd"])))
        with process(*serve, cwd=folder, log=logs[1]):
            listens = until(lambda: LISTENS.search(logs[1].read_text()), "Prometheus does not listen", logs[1])
            prometheus = Prometheus(listens[1])
            until(lambda: prometheus.ask("targets")["activeTargets"] is not None, "Prometheus is not up", logs[1])
            until(lambda: len(prometheus.values('up{job="rayzero"} == 1')) == 5, "five exporters are not up", logs[0])
            last = "min(rayzero_step) > 60 and min(rayzero_checkpoint_last_success_timestamp_seconds) > 0"
            until(lambda: prometheus.values(last), "no 60 steps and a checkpoint", logs[0])
            seen = "min(increase(rayzero_step_seconds_count[5m])) > 0"  # between two scrapes: rates have values
            until(lambda: prometheus.values(seen), "no rank took a step between two scrapes", logs[0])
            until(lambda: prometheus.values("run:rayzero_tokens:rate1m"), "no recorded rule", logs[1])
            change_the_optimizers(folder, prometheus)
            yield prometheus


def change_the_optimizers(folder: Path, prometheus: Prometheus) -> None:
    """From two to three, while it trains and is scraped."""
    command = [sys.executable, "-m", "rayzero", "scale", "live", "--optimizers", "3"]
    with (folder / "scale.log").open("w") as said:
        done = subprocess.run(command, cwd=folder, stdout=said, stderr=subprocess.STDOUT, timeout=150, check=False)
    assert done.returncode == 0, (folder / "scale.log").read_text()
    log = folder / "train.log"
    updated = 'count(rate(rayzero_optimizer_update_seconds_count{actor="2"}[5m]) > 0)'
    until(lambda: prometheus.values(updated), "the third actor has updated nothing", log)
    until(lambda: prometheus.values("rayzero_rescale_pause_seconds"), "the change is in no metric", log)
    # Owners compare their memory with the plan after some steps, those of the new epoch too.
    until(lambda: prometheus.values("rayzero_plan_error_ratio"), "no owner has compared its memory with the plan", log)


def configuration(http_sd: str) -> dict[str, Any]:
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "2s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {
                "job_name": "rayzero",
                "http_sd_configs": [{"url": http_sd, "refresh_interval": "1s"}],
            }
        ],
    }


def test_every_panel_and_recorded_rule_has_data_and_every_alert_is_legal(live: Prometheus) -> None:
    empty = []
    for found in [*on_boards(), *in_rules()]:
        answer = live.values(with_values(found.expr, interval="30s"))
        had = all(METRICS[name].only in HAD for name in metrics_in(found.expr))
        if found.kind in ("panel", "record") and had and not answer:
            empty.append(f"{found.where}: {found.expr}")
    assert empty == []


def test_variables_of_dashboards_have_values(live: Prometheus) -> None:
    assert live.ask("label/run/values") == ["live"]
    assert live.ask("label/rank/values") == ["0", "1"]
    assert live.ask("label/actor/values") == ["0", "1", "2"]
    assert live.ask("label/role/values") == ["coordinator", "optimizer", "rank"]


def test_a_change_of_the_optimizers_is_counted_once_and_marked(live: Prometheus) -> None:
    exprs = {found.where.partition(": ")[2]: with_values(found.expr) for found in on_boards()}
    (changes,) = live.values(exprs["Changes A"])
    assert (changes["metric"]["outcome"], changes["value"][1]) == ("done", "1")
    actors = {one["metric"]["state"]: one["value"][1] for one in live.values(exprs["Optimizer actors A"])}
    assert actors == {"desired": "3", "ready": "3"}
    assert live.values(f"max_over_time(({exprs['Rescales']})[10m:1s])"), "no mark"


def test_no_alert_fires_on_a_healthy_run(live: Prometheus) -> None:
    assert live.values('ALERTS{alertstate="firing",severity="critical"}') == []
