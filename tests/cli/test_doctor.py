"""doctor: every line is something that was measured or run, and what is broken is named."""

from __future__ import annotations

import os
import re
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
from forked import forked
from typer.testing import CliRunner

from rayzero.cli import app
from rayzero.cli.doctor import (
    Finding,
    _cpu_quota,
    compiler,
    cpu,
    gpu,
    guarded,
    kernel,
    locked_memory,
    memory,
    open_files,
    shared_memory,
    signals,
    slabs,
    step_over_grpc,
    versions,
)
from rayzero.errors import ConfigError
from rayzero.slabs.header import SlabFacts, lay_out_slab
from rayzero.slabs.slab import Slab

SHM = Path("/dev/shm")


@pytest.mark.parametrize(
    "check",
    [
        versions,
        cpu,
        gpu,
        memory,
        partial(shared_memory, SHM),
        partial(slabs, SHM),
        locked_memory,
        open_files,
        compiler,
        kernel,
        signals,
    ],
    ids=lambda check: getattr(check, "func", check).__name__,
)
def test_a_look_at_this_machine_finds_nothing_broken(check):
    found = guarded(check)
    assert found.ok is not False, found
    assert found.detail


def test_too_little_shared_memory_says_how_much_is_needed(monkeypatch):
    monkeypatch.setattr(sys.modules["rayzero.cli.doctor"], "_LEAST_SHM", 1 << 50)
    found = guarded(partial(shared_memory, SHM))
    assert found.ok is False
    assert re.search(
        r", writable, (huge|small) pages.*; at least 1024 TiB are needed: docker --shm-size$", found.detail
    )


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


# ---- slabs ------------------------------------------------------------------------------------------------------

DEAD_MAKER = """
import os, signal, sys
from pathlib import Path
from rayzero.slabs.header import SlabFacts, lay_out_slab
from rayzero.slabs.slab import Slab
facts = SlabFacts(run="gone", role="grads", index=2, incarnation=1, layout_digest="d", kernel="k")
slab = Slab.create(lay_out_slab(facts, [("data", 4096, 0)]), Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def living(tmp_path: Path):
    """A slab of this process, beside one of a process that was killed."""
    with forked(DEAD_MAKER, tmp_path) as process:
        assert process.wait() == -signal.SIGKILL
    facts = SlabFacts(run="here", role="params", index=0, incarnation=1, layout_digest="d", kernel="k")
    slab = Slab.create(lay_out_slab(facts, [("data", 1 << 20, 0)]), tmp_path)
    yield slab
    slab.close()


def test_slabs_are_listed_with_their_run_and_whether_their_maker_lives(tmp_path: Path, living: Slab):
    found = slabs(tmp_path)
    assert found.detail.startswith(f"2 in {tmp_path}, 1.012 MiB; 1 of dead processes, 8 KiB: rayzero doctor --sweep")
    dead, alive = found.lines
    assert "grads 2 of run gone, pid " in dead
    assert dead.endswith("DEAD")
    assert alive == f"{living.path}: 1.004 MiB, params 0 of run here, pid {os.getpid()}, in use"


def test_sweep_names_a_directory_that_is_none(tmp_path: Path):
    done = CliRunner().invoke(app, ["doctor", "--sweep", "--slab-dir", str(tmp_path / "none")])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception) == f"--slab-dir is '{tmp_path}/none', which is not a directory here: name the runs'"


def test_sweep_removes_what_dead_processes_left_and_nothing_else(tmp_path: Path, living: Slab):
    done = CliRunner().invoke(app, ["doctor", "--sweep", "--slab-dir", str(tmp_path)])
    assert done.exit_code == 0
    removed, total = done.output.splitlines()
    assert removed.startswith(f"removed {tmp_path}/rayzero-gone-grads-2.0-")
    assert total == "slabs of dead processes removed: 1, 8 KiB"
    assert list(tmp_path.iterdir()) == [living.path]
