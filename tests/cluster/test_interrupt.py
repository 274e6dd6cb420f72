"""Ctrl-C, and SIGTERM to all, in a script of its own on a Ray that the run started: nothing is left behind."""

from __future__ import annotations

import json
import os
import signal

import pytest

from rayzero.cluster.files.metrics_log import read_log
from rayzero.cluster.files.run_record import read_record, run_status
from rayzero.slabs.sweep import list_slabs
from tests.support.leftovers import still_there

from .processes import (
    everyone_of,
    left_in_shared_memory,
    listens,
    shared_memory,
    start_script,
    until_it_trains,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.thorough]


@pytest.mark.parametrize(
    ("number", "codes"),
    [
        (signal.SIGINT, (-signal.SIGINT, 128 + signal.SIGINT)),  # as a terminal does
        (signal.SIGTERM, (128 + signal.SIGTERM,)),  # as timeout(1), systemd and Slurm do
    ],
)
def test_a_signal_to_everyone_tells_the_ranks_and_leaves_nothing_not_even_ray(tmp_path, ray_files, number, codes):
    """Ray's own processes block SIGINT but not SIGTERM: a raylet that leaves its cluster in order kills its workers at
    once (SIGKILL), so after SIGTERM to everyone only most loops get to their ``finally``."""
    shm = shared_memory()
    script = start_script(tmp_path, 0, RAY_TMPDIR=str(ray_files))
    said = until_it_trains(script)
    processes = everyone_of(script.pid)
    run = tmp_path / "script"
    record = read_record(run)
    os.killpg(script.pid, number)
    said += script.communicate(timeout=100)[0]
    assert script.returncode in codes, said
    assert ("KeyboardInterrupt" in said) == (number == signal.SIGINT)
    assert still_there(processes, timeout_s=20) == []
    assert read_record(run)["state"] == "stopped"
    if number == signal.SIGINT:
        assert sorted(path.name for path in run.glob("ended-*")) == ["ended-0", "ended-1"], "the loops' finally ran"
    assert not any(listens(address) for address in record["addresses"])
    assert left_in_shared_memory(shm) == set()


def test_a_killed_driver_leaves_no_process_no_shared_memory_and_no_target(tmp_path, ray_files):
    """Its last rows are there, too: the coordinator wrote them."""
    script = start_script(tmp_path, 0, RAY_TMPDIR=str(ray_files))
    said = until_it_trains(script)
    processes = everyone_of(script.pid)
    pids = {process.pid for process in processes}
    assert len(list((tmp_path / ".targets").glob("*.json"))) == 1
    slabs = [slab.path for slab in list_slabs() if slab.header is not None and slab.header.pid in pids]
    assert slabs
    os.kill(script.pid, signal.SIGKILL)
    script.communicate(timeout=100)
    assert still_there(processes, timeout_s=90) == [], "the janitor was the last of them"
    assert [path for path in slabs if path.exists()] == []
    assert list((tmp_path / ".targets").iterdir()) == []
    assert run_status(tmp_path / "script")["state"] == "lost"
    reported = [json.loads(line)["step"] for line in said.splitlines() if line.startswith('{"rank": 0')]
    rows = [row["reported_step"] for row in read_log(tmp_path / "script") if row["rank"] == 0]
    assert rows[: len(reported)] == reported
