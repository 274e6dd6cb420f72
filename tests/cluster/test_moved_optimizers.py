"""Optimizers move to a node that joins while the run trains, and back: the same bits, and nothing left."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayzero.cluster.files.run_record import read_record

from .processes import left_in_shared_memory, shared_memory, start_script, still_there, until_it_trains
from .ray_cluster import can_be_apart, one_node

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.ray,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not can_be_apart(), reason="a node cannot have a /dev/shm of its own here"),
]

SCRIPT, STEPS = Path(__file__).with_name("moved_run.py"), 20


def test_to_a_host_that_joins_later_and_back(tmp_path: Path) -> None:
    """While half of the states stay on the ranks' devices; the other run has all of them on the host."""
    before = shared_memory()
    plain, moved = tmp_path / "plain", tmp_path / "moved"
    with one_node() as cluster:
        for folder in (plain, moved):
            folder.mkdir()
        alone = start_script(plain, STEPS, script=SCRIPT, RAY_ADDRESS=cluster.address)
        said = alone.communicate(timeout=200)[0]
        assert alone.returncode == 0, said
        script = start_script(moved, STEPS, "moves", "0.5", script=SCRIPT, RAY_ADDRESS=cluster.address)
        said = until_it_trains(script)
        assert all("127.0.0.1" in one for one in read_record(moved / "demo")["routing"]["addresses"]), "on one node"
        cluster.add_node(apart=True)
        said += script.communicate(timeout=300)[0]
        assert script.returncode == 0, said
        record = read_record(moved / "demo")
        assert [(one["before"], one["after"], one["failed"]) for one in record["rescales"]] == [
            (2, 2, None), (2, 3, None), (3, 1, None),
        ], said  # fmt: skip
        assert all(one["moved_bytes"] > 0 for one in record["rescales"])
        nodes = {member["who"]: member["node"] for member in record["members"]}
        assert nodes["rank 0"] == nodes["rank 1"] != nodes["optimizer 0"], "the last ones are on the other node"
        assert (moved / "weights.safetensors").read_bytes() == (plain / "weights.safetensors").read_bytes()
        raylets = [one for one in cluster.processes if one.is_running() and one.name() == "raylet"]
        workers = [worker for one in raylets for worker in one.children()]
        assert still_there([one for one in workers if "OptimizerActor" in one.name()], timeout_s=20) == []
    assert left_in_shared_memory(before) == set()
