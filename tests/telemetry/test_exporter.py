"""Exporters: what a recorder holds is what Prometheus' own parser reads, whoever else is connected."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rayzero.errors import ConfigError
from rayzero.telemetry import http, names
from rayzero.telemetry.discovery import Target, service_discovery
from rayzero.telemetry.exporter import Exporter
from rayzero.telemetry.http import Page
from rayzero.telemetry.metric import Role
from rayzero.telemetry.recorder import MemoryRecorder, Reading

HOST = "127.0.0.1"


def scrape(exporter: Exporter, path: str = "/metrics") -> str:
    with urlopen(f"http://{exporter.address}{path}", timeout=20) as answer:
        return answer.read().decode()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


@pytest.fixture
def recorder() -> MemoryRecorder:
    return MemoryRecorder()


@pytest.fixture
def exporter(recorder: MemoryRecorder) -> Iterator[Exporter]:
    made = Exporter(recorder, Role.RANK, host=HOST)
    yield made
    made.close()


def test_counters_gauges_and_histograms_arrive_as_they_were_told(recorder, exporter) -> None:
    recorder.add(names.EXPOSED_WAIT_SECONDS, 1.5, cause="fetch")
    recorder.set(names.STEP, 7)
    for seconds in (0.02, 0.3, 1e6):
        recorder.observe(names.STEP_SECONDS, seconds)
    recorder.watch(lambda: [Reading(names.MEMORY_BYTES, 5, {"kind": "param", "tier": "ram"})])
    found = samples(scrape(exporter))
    assert found["rayzero_exposed_wait_seconds_total", (("cause", "fetch"),)] == 1.5
    assert found["rayzero_step", ()] == 7
    assert found["rayzero_memory_bytes", (("kind", "param"), ("tier", "ram"))] == 5
    assert found["rayzero_step_seconds_count", ()] == 3
    assert found["rayzero_step_seconds_sum", ()] == pytest.approx(1e6 + 0.32)
    assert found["rayzero_step_seconds_bucket", (("le", "0.01"),)] == 0
    assert found["rayzero_step_seconds_bucket", (("le", "0.025"),)] == 1
    assert found["rayzero_step_seconds_bucket", (("le", "300.0"),)] == 2
    assert found["rayzero_step_seconds_bucket", (("le", "+Inf"),)] == 3


def test_counters_of_the_role_are_zero_before_they_are_counted(exporter) -> None:
    found = samples(scrape(exporter))
    assert found["rayzero_tokens_total", ()] == 0
    assert ("rayzero_optimizer_params_total", ()) not in found, "another role's"


def test_two_runs_in_one_process_do_not_mix(recorder, exporter) -> None:
    other = MemoryRecorder()
    recorder.add(names.TOKENS, 1)
    other.add(names.TOKENS, 2)
    second = Exporter(other, Role.RANK, host=HOST)
    try:
        assert samples(scrape(exporter))["rayzero_tokens_total", ()] == 1
        assert samples(scrape(second))["rayzero_tokens_total", ()] == 2
    finally:
        second.close()


def test_sockets_that_never_read_or_ask_hinder_nobody(recorder, exporter, monkeypatch) -> None:
    monkeypatch.setattr(http, "_MOST", 8)
    host, _, port = exporter.address.partition(":")
    hanging = [socket.create_connection((host, int(port))) for _ in range(20)]
    try:
        recorder.set(names.STEP, 1)  # before the first page is made: it is kept for a while
        for connection in hanging[::2]:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" * 20)  # answers that nobody reads
        recorder.add(names.TOKENS, 1)  # counting waits for nobody
        assert samples(scrape(exporter))["rayzero_step", ()] == 1
        assert sum(thread.name.startswith("rayzero-exporter") for thread in threading.enumerate()) == 1
    finally:
        for connection in hanging:
            connection.close()


def test_a_thousand_scrapes_on_one_connection_give_a_thousand_answers(recorder, exporter) -> None:
    recorder.set(names.STEP, 1)
    host, _, port = exporter.address.partition(":")
    with socket.create_connection((host, int(port))) as connection, connection.makefile("rb") as answers:
        for _ in range(1000):
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
            size = 0
            while (line := answers.readline()) != b"\r\n":
                size = int(line.split()[1]) if line.startswith(b"Content-Length") else size
            assert b"rayzero_step 1.0" in answers.read(size)


def test_many_scrapes_at_once_make_a_page_once(recorder, monkeypatch) -> None:
    monkeypatch.setattr(http, "REFRESH_S", 3600.0)
    made = []
    page = Page("text/plain", lambda: bytes(made.append(1) or 3))
    exporter = Exporter(recorder, Role.RANK, host=HOST, pages={"/n": page})
    try:
        assert [len(scrape(exporter, "/n")) for _ in range(5)] == [3] * 5
        assert len(made) == 1
    finally:
        exporter.close()


def test_a_source_that_fails_is_told_to_the_scraper_alone(recorder, exporter, monkeypatch, caplog) -> None:
    monkeypatch.setattr(http, "REFRESH_S", 0.0)

    def broken() -> list[Reading]:
        raise RuntimeError("half made")

    end = recorder.watch(broken)
    with pytest.raises(HTTPError, match="500") as told:
        scrape(exporter)
    assert b"RuntimeError: half made" in told.value.read()
    assert "cannot make /metrics" in caplog.text
    end()
    assert "rayzero_tokens_total" in scrape(exporter)


@pytest.mark.parametrize(("path", "status"), [("/", "404"), ("/metric", "404")])
def test_other_paths_are_not_there(exporter, path, status) -> None:
    with pytest.raises(HTTPError, match=status) as told:
        scrape(exporter, path)
    assert b"there is /metrics" in told.value.read()


def test_what_is_no_request_ends_its_connection_alone(exporter) -> None:
    host, _, port = exporter.address.partition(":")
    for nonsense in (b"\r\n\r\n", b"POST /metrics HTTP/1.1\r\n\r\n", b"x" * (1 << 16)):
        with socket.create_connection((host, int(port))) as connection:
            connection.settimeout(20)
            try:
                connection.sendall(nonsense)
                while connection.recv(1 << 16):
                    pass
            except ConnectionResetError:  # cut while we were talking
                continue
    assert "rayzero_tokens_total" in scrape(exporter)


def test_a_port_that_is_taken_is_one_clear_line(recorder, exporter) -> None:
    port = int(exporter.address.rpartition(":")[2])
    with pytest.raises(ConfigError) as refused:
        Exporter(recorder, Role.RANK, host=HOST, port=port, who="rank 0")
    assert str(refused.value) == (
        f"telemetry of rank 0 cannot listen on 127.0.0.1:{port}: Address already in use; choose other ports with "
        "run.telemetry.port and run.telemetry.exporter_ports (0: any free one)"
    )


def test_closing_frees_the_port_and_cuts_connections(recorder) -> None:
    exporter = Exporter(recorder, Role.RANK, host=HOST)
    host, _, port = exporter.address.partition(":")
    with socket.create_connection((host, int(port))) as idle:
        exporter.close()
        exporter.close()
        idle.settimeout(20)
        with suppress(ConnectionResetError):
            assert idle.recv(1) == b""
    Exporter(recorder, Role.RANK, host=HOST, port=int(port)).close()


def test_a_connection_that_comes_while_it_closes_is_cut_too(recorder) -> None:
    for _ in range(100):
        exporter = Exporter(recorder, Role.RANK, host=HOST)
        host, _, port = exporter.address.partition(":")
        with socket.create_connection((host, int(port))) as idle:
            exporter.close()
            idle.settimeout(5)
            with suppress(ConnectionResetError):
                assert idle.recv(1) == b""


def test_targets_have_the_labels_that_names_promises_and_no_others() -> None:
    targets = [
        Target(address="10.0.0.1:1", run="demo", role=Role.COORDINATOR, node="10.0.0.1"),
        Target(address="10.0.0.1:2", run="demo", role=Role.OPTIMIZER, node="10.0.0.1", index=1),
        Target(address="10.0.0.2:3", run="demo", role=Role.RANK, node="10.0.0.2", index=0),
    ]
    assert json.loads(service_discovery(targets)) == [
        {"targets": ["10.0.0.1:1"], "labels": {"run": "demo", "role": "coordinator", "node": "10.0.0.1"}},
        {"targets": ["10.0.0.1:2"], "labels": {"run": "demo", "role": "optimizer", "node": "10.0.0.1", "actor": "1"}},
        {"targets": ["10.0.0.2:3"], "labels": {"run": "demo", "role": "rank", "node": "10.0.0.2", "rank": "0"}},
    ]
    assert {name for target in targets for name in target.labels} == set(names.TARGET_LABELS)
    assert json.loads(service_discovery([])) == []
