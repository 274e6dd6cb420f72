"""doctor: every line is something that was measured or run, and what is broken is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayzero.cli.doctor import (
    Finding,
    _cpu_quota,
    compiler,
    cpu,
    gpu,
    guarded,
    kernel,
    memory,
    shared_memory,
    step_over_grpc,
    versions,
)


@pytest.mark.parametrize(
    "check",
    [versions, cpu, gpu, memory, shared_memory, compiler, kernel],
    ids=lambda check: check.__name__,
)
def test_a_look_at_this_machine_finds_nothing_broken(check):
    found = guarded(check)
    assert found.ok is not False, found
    assert found.detail


def test_the_step_over_grpc_is_a_real_one():
    found = step_over_grpc()
    assert found.ok
    assert "lowered the loss" in found.detail


def broken_thing() -> Finding:
    raise OSError("no such device\nand more")


def test_a_check_that_raises_is_a_broken_thing_in_one_line():
    found = guarded(broken_thing)
    assert found == Finding(name="broken thing", ok=False, detail="OSError: no such device")


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
    ],
)
def test_the_cpu_limit_of_a_cgroup_is_read(tmp_path: Path, files, cpus):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _cpu_quota(tmp_path) == cpus
