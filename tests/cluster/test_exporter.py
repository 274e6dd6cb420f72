"""Exporters: what a recorder holds is what Prometheus' own parser reads, whoever else is connected."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from telemetry.exposed import Series, get, series_of

from rayzero.cluster.processes.process_exporter import Exporter
from rayzero.errors import ConfigError
from rayzero.telemetry import names
from rayzero.telemetry.metric import Role
from rayzero.telemetry.recorder import MemoryRecorder, Reading

HOST = "127.0.0.1"


def served(exporter: Exporter) -> Series:
    return series_of(get(f"http://{exporter.address}/metrics"))


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
    found = served(exporter)
    assert found["rayzero_exposed_wait_seconds_total", (("cause", "fetch"),)] == 1.5
    assert found["rayzero_step", ()] == 7
    assert found["rayzero_memory_bytes", (("kind", "param"), ("tier", "ram"))] == 5
    assert found["rayzero_step_seconds_count", ()] == 3
    assert found["rayzero_step_seconds_sum", ()] == pytest.approx(1e6 + 0.32)
    assert found["rayzero_step_seconds_bucket", (("le", "0.01"),)] == 0
    assert found["rayzero_step_seconds_bucket", (("le", "0.025"),)] == 1
    assert found["rayzero_step_seconds_bucket", (("le", "300.0"),)] == 2
    assert found["rayzero_step_seconds_bucket", (("le", "+Inf"),)] == 3


def test_what_a_page_counts_is_of_one_moment_however_long_its_gauges_take(recorder, exporter) -> None:
    def train_a_step() -> None:
        recorder.add(names.TOKENS, 128)
        recorder.observe(names.STEP_SECONDS, 0.1)

    def slow() -> list[Reading]:
        train_a_step()  # the rank goes on meanwhile
        return [Reading(names.MEMORY_BYTES, 5, {"kind": "param", "tier": "ram"})]

    train_a_step()
    recorder.watch(slow)
    found = served(exporter)
    assert found["rayzero_memory_bytes", (("kind", "param"), ("tier", "ram"))] == 5
    assert found["rayzero_tokens_total", ()] == 128 * found["rayzero_step_seconds_count", ()]


def test_counters_of_the_role_are_zero_before_they_are_counted(exporter) -> None:
    found = served(exporter)
    assert found["rayzero_tokens_total", ()] == 0
    assert ("rayzero_optimizer_params_total", ()) not in found, "another role's"


def test_a_port_that_is_taken_is_one_clear_line(recorder, exporter) -> None:
    port = int(exporter.address.rpartition(":")[2])
    with pytest.raises(ConfigError) as refused:
        Exporter(recorder, Role.RANK, host=HOST, port=port, who="rank 0")
    assert str(refused.value) == (
        f"telemetry of rank 0 cannot listen on 127.0.0.1:{port}: Address already in use; choose other ports with "
        "run.telemetry.port and run.telemetry.exporter_ports (0: any free one)"
    )


def test_a_port_beyond_the_last_one_is_one_clear_line(recorder) -> None:
    """exporter_ports is that of the first exporter: the others count up from it."""
    with pytest.raises(ConfigError, match=r"rank 0 cannot listen on 127.0.0.1:65536: ports end at 65535; choose other"):
        Exporter(recorder, Role.RANK, host=HOST, port=65_536, who="rank 0")
