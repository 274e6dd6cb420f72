"""A run on Ray goes on when processes are killed, and ends with the bits of one that was not disturbed."""

from __future__ import annotations

import os
import signal
import ssl
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ray
from cryptography.x509 import load_pem_x509_certificate
from telemetry.web_configs import TestAuthority, written

from rayzero.cluster.actor_calls import make_coordinator
from rayzero.cluster.files.metrics_log import read_log
from rayzero.cluster.files.run_record import read_record
from rayzero.cluster.processes.coordinator import Received
from rayzero.cluster.run import NAMESPACE, Report, coordinator_name
from rayzero.cluster.upkeep import renewal
from rayzero.config import ZeroConfig
from rayzero.engine import get_context, report
from rayzero.security import authority
from rayzero.telemetry.scrape import Viewer
from tests.support import needs
from tests.support.waiting import until

from .compared_run import STEPS, losses, same, train
from .processes import Kills, until_killed

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(400),
    needs.shared_memory,
]


def train_through_kills(steps: list[int]) -> None:
    """Like ``train``. ``steps``: at which ``Kills`` kills."""
    train(None, lambda step: until_killed(own_run_dir(), steps, step))


def own_run_dir() -> Path:
    run_dir = get_context().run_dir
    assert run_dir is not None
    return Path(run_dir)


def train_beside_a_spare(config: Any) -> None:
    """Like ``train``, but only once a spare process is up, and until another one is."""
    wait_for("spare 0")
    train(config)
    wait_for("spare 1")


def wait_for(spare: str) -> None:
    deadline = time.monotonic() + 60
    while spare not in [one["who"] for one in read_record(own_run_dir())["spares"]]:
        assert time.monotonic() < deadline, f"there is no {spare}"
        report({"done": 0, "loss": 0.0, "pid": os.getpid()})  # so that the driver writes its record
        time.sleep(0.2)


@pytest.mark.promise("recoverable", "jobs")
def test_killed_optimizers_and_ranks_are_replaced(trainer, nothing_left, tmp_path, undisturbed):
    said: list[str] = []
    kills = Kills(tmp_path / "demo", {5: "rank 1", 20: "optimizer 0"})
    result = trainer(train_through_kills, kills.steps, on_report=kills, on_phase=said.append).fit()
    assert same(result.path, undisturbed)
    assert losses(result.path) == undisturbed.losses
    record = read_record(tmp_path / "demo")
    assert [one["who"] for one in record["recoveries"]] == ["rank 1", "optimizer 0"]
    assert {one["who"]: one["pid"] for one in record["recoveries"]}.items() <= {
        (member["who"], member["pid"]) for member in record["members"]
    }
    for one in record["recoveries"]:
        assert set(one["phases"]) == {"detect", "start", "re-form"}
        assert one["phases"]["detect"] < 0.5, "the kernel tells the driver at once, and Ray later"
        assert sum(one["phases"].values()) == pytest.approx(one["seconds"])
    died = [line for line in said if " died: " in line]
    assert [line.split(" died")[0] for line in died] == ["rank 1", "optimizer 0"]
    assert died[0].endswith("Another process takes its place (2 more failures would be outlived)")
    assert sum(" is back as pid " in line for line in said) == 2


@pytest.mark.thorough
def test_nobody_notices_a_killed_coordinator_and_a_stopped_process_is_killed_and_replaced(
    trainer, nothing_left, tmp_path, undisturbed
):
    kills = Kills(tmp_path / "demo", {20: "optimizer 1"}, signal.SIGSTOP)
    said: list[str] = []
    done: list[tuple[int, int]] = []

    def take(one: Any) -> None:
        done.append((one.rank, one.metrics["done"]))
        if done[-1] == (0, 10):
            actor = ray.get_actor(coordinator_name("demo"), namespace=NAMESPACE)
            os.kill(ray.get(actor.hello.remote()).pid, signal.SIGKILL)
        kills(one)

    stalls = ZeroConfig(stall_timeout=20.0)
    settings = {"on_report": take, "on_phase": said.append, "zero_config": stalls}
    result = trainer(train_through_kills, kills.steps, **settings).fit()
    assert same(result.path, undisturbed)
    assert losses(result.path) == undisturbed.losses
    assert len(read_log(result.path)) == 2 * STEPS, "each row once"
    assert sorted(done) == sorted((rank, step) for rank in range(2) for step in range(1, STEPS + 1))
    record = read_record(tmp_path / "demo")
    assert [one["who"] for one in record["recoveries"]] == ["coordinator", "optimizer 1"]
    assert any("coordinator died, and is back as pid" in line for line in said)


@pytest.mark.thorough
@pytest.mark.parametrize("last", [21, STEPS], ids=["loops that wait for it", "loops that have ended"])
def test_what_a_killed_coordinator_had_not_passed_on_comes_again_from(last, trainer, nothing_left, tmp_path):
    """Also from ranks that report nothing after it."""
    done: list[tuple[int, int]] = []
    kills = Kills(tmp_path / "demo", {20: "rank 1"} if last < STEPS else {})

    def take(one: Any) -> None:
        done.append((one.rank, one.metrics["done"]))
        if done[-1] == (0, 10):
            until(lambda: len(read_log(tmp_path / "demo")) == 2 * last)
            actor = ray.get_actor(coordinator_name("demo"), namespace=NAMESPACE)
            os.kill(ray.get(actor.hello.remote()).pid, signal.SIGKILL)
        kills(one)

    result = trainer(train_through_kills, kills.steps, on_report=take).fit()
    assert sorted(done) == sorted((rank, step) for rank in range(2) for step in range(1, STEPS + 1))
    assert len(read_log(result.path)) == 2 * STEPS, "each row once"


@pytest.mark.thorough
def test_another_coordinator_hears_the_driver_while_many_ranks_wait_for_it(local_ray):
    ranks = 150
    coordinator = make_coordinator("demo", None, 1, ranks)
    calls = [coordinator.report.remote([Report(rank=rank, step=1)], None) for rank in range(ranks)]
    ray.get(coordinator.resume.remote([], [], None, Viewer()), timeout=60)
    life = ray.get(coordinator.life.remote())
    assert ray.get(calls, timeout=60) == [Received(life)] * ranks


@pytest.mark.thorough
def test_a_spare_takes_the_place_of_an_optimizer_and_another_spare_is_started(
    trainer, nothing_left, tmp_path, undisturbed
):
    spares: list[int] = []

    def kill(one: Any) -> None:
        record = read_record(tmp_path / "demo")
        if one.rank == 0 and one.metrics["done"] == 5 and not spares:
            [spare] = record["spares"]
            spares.append(spare["pid"])
            os.kill(next(m["pid"] for m in record["members"] if m["who"] == "optimizer 1"), signal.SIGKILL)

    result = trainer(train_beside_a_spare, on_report=kill, run={"warm_spares": 1}).fit()
    record = read_record(result.path)
    [recovery] = record["recoveries"]
    assert [recovery["pid"]] == spares
    assert [m["pid"] for m in record["members"] if m["who"] == "optimizer 1"] == spares
    assert [spare["who"] for spare in record["spares"]] == ["spare 1"]
    assert same(result.path, undisturbed)


def train_beyond_the_first_certificates(steps: list[int]) -> None:
    """Like ``train_through_kills``. Step 25 begins when those of the start have ended."""
    began = time.time()

    def before(step: int) -> None:
        until_killed(own_run_dir(), steps, step)
        time.sleep(max(0.0, began + LASTS_S + 1 - time.time()) if step == 25 else 0.0)

    train(None, before)


LASTS_S = 20  # the run has to start in that time on a busy machine
RENEW_S = 5


@pytest.mark.thorough
def test_certificates_are_renewed_while_the_run_goes_on_and_processes_are_replaced(
    trainer, nothing_left, tmp_path, undisturbed, monkeypatch
):
    """Who takes a place opens connections when the certificates of the run's start have ended."""
    monkeypatch.setattr(authority, "LASTS", timedelta(seconds=LASTS_S))
    monkeypatch.setattr(authority, "RENEW_EVERY", timedelta(seconds=RENEW_S))
    monkeypatch.setattr(renewal, "LOOK_S", 0.3)
    files = TestAuthority(tmp_path)
    first = files.issue("server")[0].read_bytes()
    web = written(tmp_path, "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n")
    kills = Kills(tmp_path / "demo", {30: "optimizer 0", 35: "rank 1"})
    shown: dict[str, list[Any]] = {"owner": [], "metrics": []}

    def look(one: Any) -> None:
        kills(one)
        if one.rank == 0 and one.metrics["done"] in (1, 26):
            record = read_record(tmp_path / "demo")
            shown["owner"].append(certificate_at(record["addresses"][1]))
            shown["metrics"].append(certificate_at(record["telemetry"]["targets"][-1]["address"]))
            files.issue("server")

    run = {"security": {"tls": "always"}, "telemetry": {"web_config": web}}
    said: list[str] = []
    result = trainer(
        train_beyond_the_first_certificates, kills.steps, on_report=look, on_phase=said.append, run=run
    ).fit()
    assert same(result.path, undisturbed)
    assert [one["who"] for one in read_record(result.path)["recoveries"]] == ["optimizer 0", "rank 1"]
    early, late = shown["owner"]
    assert late.not_valid_after_utc - early.not_valid_after_utc >= timedelta(seconds=LASTS_S - RENEW_S)
    assert shown["metrics"][0] == load_pem_x509_certificate(first) != shown["metrics"][1]
    assert [line for line in said if "certificates cannot" in line or "does not take its new certificate" in line] == []
    assert any("server.pem" in line or "cert_file is valid until" in line for line in said), "it lasts a day"


def certificate_at(address: str) -> Any:
    host, _, port = address.rpartition(":")
    return load_pem_x509_certificate(ssl.get_server_certificate((host, int(port)), timeout=20).encode())
