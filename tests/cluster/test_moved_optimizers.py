"""Optimizers move to a node that joins while the run trains, and back: the same bits, and nothing left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rayzero
from rayzero.cluster.files.run_record import read_record
from rayzero.engine.context import RankContext
from rayzero.testing import run_ranks

from .processes import left_in_shared_memory, shared_memory, start_script, still_there, until_it_trains
from .ray_cluster import can_be_apart, one_node
from .tiny import MAX_NORM, batch, make

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.ray,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not can_be_apart(), reason="a node cannot have a /dev/shm of its own here"),
]

SCRIPT, STEPS = Path(__file__).with_name("moved_run.py"), 20


def undisturbed(context: RankContext) -> Any:
    """The weights of the script's loop without a run, with all states on the host."""
    model, plain = make()
    model, optimizer = rayzero.prepare(model, plain)
    for step in range(STEPS):
        model(batch(step, context.rank)).square().mean().backward()
        optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return rayzero.full_state_dict(model)


def test_to_a_host_that_joins_later_and_back(tmp_path: Path) -> None:
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
        ours, theirs = load_file(tmp_path / "weights.safetensors"), run_ranks(undisturbed, 2, 2, "shm", True)[0]
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
        raylets = [one for one in cluster.processes if one.is_running() and one.name() == "raylet"]
        workers = [worker for one in raylets for worker in one.children()]
        assert still_there([one for one in workers if "OptimizerActor" in one.name()], timeout_s=20) == []
    assert left_in_shared_memory(before) == set()
