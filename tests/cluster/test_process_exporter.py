"""What an exporter measures, where a run is announced, and when a process is late: without Ray."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clock import Clock

from rayzero.cluster.janitor import announced, sweep_announcements
from rayzero.cluster.processes import process_exporter
from rayzero.cluster.processes.coordinator import LATE_S, Heartbeats
from rayzero.cluster.processes.process_exporter import MemorySource
from rayzero.config import RunConfig, TelemetryConfig
from rayzero.errors import ConfigError
from rayzero.memory.process_memory import ProcessMemory, give_back_freed, process_memory
from rayzero.telemetry.names import (
    ACTORS,
    HEAP_BYTES,
    HEARTBEAT_AGE_SECONDS,
    MEMORY_BYTES,
    PROCESS_MEMORY_BYTES,
    SHARD_IMBALANCE,
)
from rayzero.telemetry.recorder import MemoryRecorder

SHM = Path("/dev/shm")


# ---- memory -----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the pages of files out: 1/n of a library's counts, and other processes that have it come and go."""

    def measured() -> ProcessMemory:
        found = process_memory()
        return replace(found, pss=found.pss - found.file, file=0)

    monkeypatch.setattr(process_exporter, "process_memory", measured)


def test_what_a_loop_imports_and_reads_before_it_hands_its_model_over_is_the_processs(no_files: None) -> None:
    give_back_freed()  # what earlier tests have freed: else begin_run() gives it back and the process is as much less
    recorder, mib = MemoryRecorder(), 1 << 20
    memory = MemorySource(SHM, recorder)
    recorder.watch(memory)
    before = recorder.gauge(MEMORY_BYTES, kind="process", tier="ram")
    text, model = torch.ones(48 * mib, dtype=torch.uint8), torch.ones(80 * mib, dtype=torch.uint8)
    memory.begin_run(model.nbytes)
    del model
    process = recorder.gauge(MEMORY_BYTES, kind="process", tier="ram")
    assert process - before == pytest.approx(text.nbytes, abs=8 * mib)
    assert recorder.gauge(MEMORY_BYTES, kind="other", tier="ram") < 8 * mib, "both are counted anew"
    assert recorder.gauge(HEAP_BYTES, kind="used") > text.nbytes


# ---- heartbeats -------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("coordinator", "process_exporter"):
        monkeypatch.setattr(f"rayzero.cluster.processes.{module}.monotonic", clock)
    return clock


@pytest.fixture
def heard(clock: Clock) -> tuple[Heartbeats, MemoryRecorder]:
    heartbeats, recorder = Heartbeats(), MemoryRecorder()
    heartbeats.enlist(["optimizer 0", "optimizer 1", "rank 0"])
    recorder.watch(heartbeats.readings)
    return heartbeats, recorder


def test_a_process_that_is_not_heard_of_is_late_and_one_that_left_is_not_counted(clock, heard) -> None:
    heartbeats, recorder = heard
    clock.now += LATE_S + 1
    heartbeats.beat("rank 0", None)
    clock.now += 1
    assert recorder.gauge(HEARTBEAT_AGE_SECONDS, process="rank 0") == 1
    assert recorder.gauge(HEARTBEAT_AGE_SECONDS, process="optimizer 1") == LATE_S + 2
    assert recorder.gauge(ACTORS, kind="rank", state="ready") == 1
    assert recorder.gauge(ACTORS, kind="optimizer", state="late") == 2
    assert recorder.gauge(ACTORS, kind="optimizer", state="desired") == 2
    heartbeats.enlist(["optimizer 0", "rank 0"])
    heartbeats.beat("optimizer 1", 9.0)
    assert recorder.gauge(ACTORS, kind="optimizer", state="desired") == 1
    assert recorder.gauge(HEARTBEAT_AGE_SECONDS, process="optimizer 1") == 0


def test_imbalance_is_of_the_work_since_it_was_taken_last(heard) -> None:
    heartbeats, recorder = heard
    heartbeats.beat("optimizer 0", 1.0)
    assert recorder.gauge(SHARD_IMBALANCE) == 0, "the other owner has not told yet"
    heartbeats.beat("optimizer 1", 3.0)
    assert recorder.gauge(SHARD_IMBALANCE) == 1.5
    heartbeats.beat("optimizer 1", 3.0)
    assert recorder.gauge(SHARD_IMBALANCE) == 1.5, "no work, no news"
    heartbeats.beat("optimizer 0", 2.0)
    heartbeats.beat("optimizer 1", 4.0)
    assert recorder.gauge(SHARD_IMBALANCE) == 1.0


# ---- files for Prometheus ---------------------------------------------------------------------------------------


def test_a_run_is_announced_as_long_as_it_lasts(tmp_path) -> None:
    directory = RunConfig(storage_path=str(tmp_path)).discovery_dir
    with announced(directory, "demo", b"[]\n") as path:
        assert json.loads(path.read_text()) == []
        assert [path] == list(directory.glob("*.json"))
    assert list(directory.iterdir()) == []
    assert RunConfig(telemetry=TelemetryConfig(discovery_dir="/etc/targets")).discovery_dir == Path("/etc/targets")


def test_announcements_of_drivers_that_are_gone_are_swept(tmp_path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    host = socket.gethostname()
    stale, alive, elsewhere = (
        tmp_path / name
        for name in (f"a.{host}.{gone.pid}.json", f"b.{host}.{os.getpid()}.json", f"c.other-host.{gone.pid}.json")
    )
    for path in (stale, alive, elsewhere):
        path.write_text("[]")
    assert sweep_announcements(tmp_path) == [stale]
    assert sorted(tmp_path.iterdir()) == [alive, elsewhere]


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"run.telemetry.discovery_dir: cannot write .*; choose another directory"),
        announced(tmp_path / "file", "demo", b"[]"),
    ):
        pass


def test_the_memory_of_the_process_is_as_the_kernel_counts(clock) -> None:
    recorder = MemoryRecorder()
    recorder.watch(MemorySource(SHM, recorder))  # it stands: all of one count
    found = recorder.gauges()
    rss, pss, uss = (recorder.gauge(PROCESS_MEMORY_BYTES, kind=kind) for kind in ("rss", "pss", "uss"))
    assert 0 < uss <= pss <= rss
    assert recorder.gauge(MEMORY_BYTES, kind="process", tier="ram") == pss, "nothing was made since"
    assert len(found[PROCESS_MEMORY_BYTES]) == 4
