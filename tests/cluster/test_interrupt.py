"""Ctrl-C, and SIGTERM to all, in a script of its own on a Ray that the run started: nothing is left behind."""

from __future__ import annotations

import os
import signal
import tempfile

import pytest

from rayzero.cluster.run_dir import read_record

from .processes import (
    everyone_of,
    left_in_shared_memory,
    listens,
    shared_memory,
    start_script,
    still_there,
    until_it_trains,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("number", "codes"),
    [
        (signal.SIGINT, (-signal.SIGINT, 128 + signal.SIGINT)),  # as a terminal does
        (signal.SIGTERM, (128 + signal.SIGTERM,)),  # as timeout(1), systemd and Slurm do: Ray's own processes end by it
    ],
)
def test_a_signal_to_everyone_tells_the_ranks_and_leaves_nothing_not_even_ray(tmp_path, number, codes):
    shm = shared_memory()
    with tempfile.TemporaryDirectory(prefix="rz", dir="/tmp") as ray_files:  # short: sockets have their path there
        script = start_script(tmp_path, 0, RAY_TMPDIR=ray_files)
        said = until_it_trains(script)
        processes = everyone_of(script.pid)
        record = read_record(tmp_path / "script")
        os.killpg(script.pid, number)
        said += script.communicate(timeout=100)[0]
        assert script.returncode in codes, said
        assert ("KeyboardInterrupt" in said) == (number == signal.SIGINT)
        assert still_there(processes, timeout_s=20) == []
    run = tmp_path / "script"
    assert read_record(run)["state"] == "stopped"
    assert sorted(path.name for path in run.glob("ended-*")) == ["ended-0", "ended-1"], "the loops' finally ran"
    assert not any(listens(address) for address in record["routing"]["addresses"])
    assert left_in_shared_memory(shm) == set()
