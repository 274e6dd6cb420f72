"""Memory pressure is measured, resource by resource."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from pathlib import Path

import pytest
import torch

from rayzero.config import AutoMemoryStrategy
from rayzero.engine.engine_memory import Relief, measures
from rayzero.memory.pressure import (
    Pressure,
    PressureGauge,
    PressureLimits,
    Resource,
    cgroup_share,
    read_pressure,
)
from rayzero.memory.process_memory import HostLimits, Stalls, memory_stalls, parse_stalls, resident_bytes

MIB = 1 << 20
CPU = torch.device("cpu")
LIMITS = PressureLimits(max_cpu_memory_mb=64 * 1024, max_gpu_memory_mb=8 * 1024, slab_dir=Path("/dev/shm"))


def test_pressure_is_that_of_the_fullest_resource() -> None:
    found = Pressure(shares={Resource.HOST: 0.3, Resource.SHM: 0.7, Resource.MAX_CPU: 0.5})
    assert (found.fullest, found.share) == (Resource.SHM, 0.7)


@pytest.mark.parametrize(
    ("cpu", "gpu", "expected"),
    [(1024, 512, 0.5), (1024, 768, 0.75), (1843, 0, 1843 / 2048), (9999, 0, 1.0), (0, 0, 0.0)],  # the documented vector
)
def test_pressure_is_that_of_the_fuller_side_and_at_most_one(
    cpu: int, gpu: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the config's limits, with a device and a host that are empty."""
    monkeypatch.setattr("rayzero.memory.pressure.resident_bytes", lambda: cpu * MIB)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: gpu * MIB)
    monkeypatch.setattr("rayzero.memory.pressure._device_share", lambda _: 0.0)
    limits = PressureLimits(max_cpu_memory_mb=2048, max_gpu_memory_mb=1024)
    shares = read_pressure(torch.device("cuda"), limits).shares
    assert max(shares[Resource.MAX_CPU], shares[Resource.MAX_GPU]) == expected


@pytest.mark.parametrize(
    ("limits", "collects"), [(PressureLimits(), False), (PressureLimits(max_gpu_memory_mb=8192), True)]
)
def test_a_large_device_is_not_full_before_it_is_unless_a_limit_says_so(
    limits: PressureLimits, collects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card of 80 GiB, of which torch has 10."""
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: 10 << 30)
    monkeypatch.setattr("rayzero.memory.pressure._device_share", lambda _: 10 / 80)
    monkeypatch.setattr("rayzero.memory.pressure.read_host_pressure", lambda _: Pressure(shares={Resource.HOST: 0.2}))
    found = read_pressure(torch.device("cuda"), limits)
    relief = Relief.of_rank(cuda=True, own_buffers=True)
    asked = measures(AutoMemoryStrategy.AGGRESSIVE, found.shares, 16, relief)
    assert (asked.collect, asked.depth < 16) == (collects, collects)
    assert found.shares[Resource.DEVICE] == 0.125


def test_a_full_machine_counts_without_any_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayzero.memory.pressure.tightest_cgroup", lambda: HostLimits(available=1, total=10, source=""))
    found = read_pressure(CPU, PressureLimits(slab_dir=Path("/dev/shm")))
    assert found.fullest is Resource.CGROUP
    assert set(found.shares) == {Resource.HOST, Resource.CGROUP, Resource.SHM}
    assert measures(AutoMemoryStrategy.AGGRESSIVE, found.shares, 16, Relief()).collect


def test_a_rank_without_a_device_reads_what_the_host_has() -> None:
    found = read_pressure(CPU, LIMITS)
    assert set(found.shares) - {Resource.CGROUP} == {Resource.HOST, Resource.SHM, Resource.MAX_CPU}
    assert all(0 <= share < 1 for share in found.shares.values())
    assert 0 < found.shares[Resource.MAX_CPU] == pytest.approx(resident_bytes() / (64 << 30), rel=0.1)
    assert Resource.SHM not in read_pressure(CPU, PressureLimits(max_cpu_memory_mb=1, max_gpu_memory_mb=1)).shares


def test_shared_memory_is_as_full_as_its_file_system(tmp_path: Path) -> None:
    """A file of 256 MiB, of which every page is written, in the real /dev/shm."""
    size, total = 256 * MIB, os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize
    before = read_pressure(CPU, LIMITS).shares[Resource.SHM]
    path = Path(f"/dev/shm/rayzero-test-pressure-{os.getpid()}")
    try:
        path.write_bytes(b"x" * size)
        after = read_pressure(CPU, LIMITS).shares[Resource.SHM]
    finally:
        path.unlink()
    assert after - before == pytest.approx(size / total, rel=0.3)


def test_a_cgroups_share_is_what_is_not_free() -> None:
    assert cgroup_share(HostLimits(available=256, total=1024, source="memory.max")) == 0.75
    assert cgroup_share(HostLimits(available=0, total=0, source="memory.max")) == 1.0


# ---- stalls -----------------------------------------------------------------------------------------------------

STALLS = """\
some avg10=12.50 avg60=0.70 avg300=0.20 total=123456
full avg10=1.25 avg60=0.00 avg300=0.00 total=456
"""


def test_stalls_are_shares_of_ten_seconds() -> None:
    assert parse_stalls(STALLS) == Stalls(some=0.125, full=0.0125)


def test_stalls_are_the_cgroups_where_it_has_them_else_the_hosts(tmp_path: Path) -> None:
    own, host, proc = tmp_path / "cgroup/pod/memory.pressure", tmp_path / "host", tmp_path / "proc_cgroup"
    proc.write_text("4:memory:/docker/abc\n0::/pod\n")
    assert memory_stalls(tmp_path / "cgroup", proc, host) is None
    host.write_text(STALLS)
    assert memory_stalls(tmp_path / "cgroup", proc, host) == Stalls(some=0.125, full=0.0125)
    own.parent.mkdir(parents=True)
    own.write_text(STALLS.replace("12.50", "50.00"))
    assert memory_stalls(tmp_path / "cgroup", proc, host) == Stalls(some=0.5, full=0.0125)
    proc.unlink()  # not Linux
    assert memory_stalls(tmp_path / "cgroup", proc, host) == Stalls(some=0.125, full=0.0125)


# ---- readings ---------------------------------------------------------------------------------------------------


def test_the_reading_follows_the_process() -> None:
    before = resident_bytes()
    fresh = mmap.mmap(-1, 64 * MIB)  # an allocator may have as much that is resident already
    held = torch.frombuffer(fresh, dtype=torch.uint8).fill_(1)
    assert 48 * MIB < resident_bytes() - before < 128 * MIB
    assert held.numel() == 64 * MIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_devices_share_counts_what_torch_has_given_out_and_not_what_it_keeps() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.empty_cache()
    before = read_pressure(device, LIMITS).shares[Resource.DEVICE]
    held = torch.ones(total // 10, dtype=torch.uint8, device=device)
    full = read_pressure(device, LIMITS).shares[Resource.DEVICE]
    assert full - before == pytest.approx(0.1, abs=0.01)
    del held  # torch keeps the block
    assert read_pressure(device, LIMITS).shares[Resource.DEVICE] == pytest.approx(before, abs=0.01)


def test_pressure_is_measured_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("rayzero.memory.pressure.monotonic", lambda: now)
    gauge = PressureGauge(CPU, LIMITS)
    first = gauge.read()
    assert 0 < first.share < 1
    ballast = mmap.mmap(-1, 64 << 20)  # a thousandth of the limit, in pages that nobody had before
    ballast.write(b"x" * len(ballast))
    now = 0.9
    assert gauge.read() is first
    now = 1.0
    assert gauge.read().shares[Resource.MAX_CPU] > first.shares[Resource.MAX_CPU]
    ballast.close()
    assert (gauge.taken, gauge.readings.value.count, gauge.resources[Resource.HOST].value.count) == (2, 2, 2)
    gauge.restart()
    assert (gauge.pressure, gauge.readings.value.count, gauge.resources) == (None, 0, {})
    assert gauge.taken == 2, "who acts on readings counts them all"


def test_a_reading_costs_at_most_two_thousandths_of_its_second() -> None:
    gauge = PressureGauge(CPU, LIMITS)
    seconds = []
    for _ in range(50):
        before = time.thread_time()  # a loaded machine makes a reading later, not dearer
        gauge.measure()
        seconds.append(time.thread_time() - before)
    assert statistics.median(seconds) < 2e-3, seconds
