"""Optimizers move to a node that joins while the run trains, and back: the same bits, and nothing left."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayzero.cluster.files.run_record import read_record

from .compared_run import STEPS, Undisturbed, same
from .processes import left_in_shared_memory, shared_memory, start_script, still_there, until_it_trains
from .ray_cluster import can_be_apart, one_node

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.ray,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not can_be_apart(), reason="a node cannot have a /dev/shm of its own here"),
]

SCRIPT = Path(__file__).with_name("moved_run.py")


def test_to_a_host_that_joins_later_and_back(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """While half of the states stay on the ranks' devices."""
    before = shared_memory()
    with one_node() as cluster:
        script = start_script(tmp_path, STEPS, script=SCRIPT, RAY_ADDRESS=cluster.address)
        said = until_it_trains(script)
        assert all("127.0.0.1" in one for one in read_record(tmp_path / "demo")["addresses"]), "on one node"
        cluster.add_node(apart=True)
        said += script.communicate(timeout=300)[0]
        assert script.returncode == 0, said
        record = read_record(tmp_path / "demo")
        assert [(one["before"], one["after"], one["failed"]) for one in record["rescales"]] == [
            (2, 2, None), (2, 3, None), (3, 1, None),
        ], said  # fmt: skip
        assert all(one["moved_bytes"] > 0 for one in record["rescales"])
        nodes = {member["who"]: member["node"] for member in record["members"]}
        assert nodes["rank 0"] == nodes["rank 1"] != nodes["optimizer 0"], "the last ones are on the other node"
        assert same(tmp_path / "demo", undisturbed)
        raylets = [one for one in cluster.processes if one.is_running() and one.name() == "raylet"]
        workers = [worker for one in raylets for worker in one.children()]
        assert still_there([one for one in workers if "OptimizerActor" in one.name()], timeout_s=20) == []
    assert left_in_shared_memory(before) == set()
