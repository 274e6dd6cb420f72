"""Campaigns with their smallest runs: two hundred ranks over a real server, each of which sends what a rank's store
sends; described hosts at scale; and a run that the OOM killer ends without a strategy and that lives with one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from lab.campaigns import scale_simulation
from lab.campaigns.many_ranks import TOKEN, Case, FakeRank
from lab.campaigns.strategies import memory_group
from lab.simulation.machines import Costs
from rayzero.concurrency.event_loop import shared_loop
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.server import serve_models
from rayzero.store.wire import translate

pytestmark = pytest.mark.thorough

RANKS = 200
WAIT = 60.0


def test_two_hundred_ranks_attach_with_one_spec_and_take_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Case(ranks=RANKS, owners=1, units=3, steps=1).spec
    described = translate.spec_to_bytes(spec)
    read, packed = [], []
    from_bytes, to_pb = translate.spec_from_bytes, translate.decision_to_pb
    monkeypatch.setattr(translate, "spec_from_bytes", lambda content: read.append(1) or from_bytes(content))
    monkeypatch.setattr(translate, "decision_to_pb", lambda decision: packed.append(decision.step) or to_pb(decision))

    async def train(address: str) -> None:
        ranks = [FakeRank(rank, address, spec, 1) for rank in range(RANKS)]
        await asyncio.gather(*(rank.attach(described, spec.layout.digest) for rank in ranks))
        assert sum(rank.sent for rank in ranks) < len(described) + RANKS * 512
        await ranks[0].load()
        for step in range(2):
            await asyncio.gather(*(rank.published(step) for rank in ranks))
            await asyncio.gather(*(rank.push(step) for rank in ranks))
            await asyncio.gather(*(rank.ask("Finish", rank.finish(step, 1)) for rank in ranks))
            await asyncio.gather(*(rank.ask("Commit", rank.commit(step)) for rank in ranks))
            await asyncio.gather(*(rank.ask("Mean", rank.mean(step + 1)) for rank in ranks))
        await asyncio.gather(*(rank.published(2) for rank in ranks))
        await asyncio.gather(*(rank.close() for rank in ranks))

    models = HostedModels(0, 1)
    with serve_models(models, token=TOKEN) as server:
        server.connect_peers([server.address])
        shared_loop().run(train(server.address), WAIT)
    models.close()
    assert (len(read), packed) == (1, [0, 1])


# ---- described hosts ------------------------------------------------------------------------------------------------


def test_described_hosts_are_simulated_at_scale(tmp_path, capsys):
    """The command of docs/scale_simulation.md, with its smallest runs."""
    machine = {"cores": 2, "memory": 1e11, "owner_threads": 1}
    machine |= dict.fromkeys(("adam_core", "norm_core", "sum_core", "host_sum_core", "copy_core"), 1e10)
    costs = {field.name: 0.0 for field in fields(Costs) if field.default is MISSING}
    stream = {"speed": 3e9, "rank_byte_s": 0.0, "owner_byte_s": 0.0}
    moving = {moving: {"fetch": stream, "push": stream} for moving in ("plain", "encrypted")}
    costs |= {"moving": moving, "message_s": 1e-4}
    (tmp_path / "here.json").write_text(json.dumps({"machine": machine, "costs": {"grpc": costs}, "part_s": 0.0}))
    scale_simulation.main(["--here", str(tmp_path / "here.json"), "--quick", "--json", str(tmp_path / "out.json")])
    points = json.loads((tmp_path / "out.json").read_text())
    assert [(p["ranks"], p["owners"]) for p in points] == [(8, 8)] * 3 + [(32, 8)] * 3
    assert all(p["found"]["seconds"] >= p["found"]["bound"] for p in points)
    plain, copied, both = (p["found"]["seconds"] for p in points[:3])
    assert plain > copied > both
    assert len(capsys.readouterr().out.splitlines()) == 2 + 6 + 1


# ---- a real memory cgroup -------------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[3]


@pytest.fixture
def can_limit() -> None:
    """Skip by name where this process may make no memory cgroup."""
    try:
        with memory_group(1 << 30):
            pass
    except OSError as exc:
        pytest.skip(f"no memory cgroup can be made here: {exc}")


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("can_limit")
def test_a_run_that_dies_of_its_memory_lives_with_a_strategy_and_has_the_same_weights() -> None:
    command = [sys.executable, "-m", "lab", "strategies", "--strategies", "off", "balanced", "--json"]
    done = subprocess.run([*command, "--steps", "70"], cwd=ROOT, capture_output=True, text=True, check=True)
    free, off, balanced = json.loads(done.stdout)
    assert (free["killed"], off["killed"], balanced["killed"]) == (False, True, False), done.stderr
    assert (off["kills"], off["digest"], off["actions"]) == (1, None, [])
    assert balanced["kills"] == 0
    assert balanced["digest"] == free["digest"] is not None
    assert sum(action["bytes"] for action in balanced["actions"]) > 100 << 20
    assert max(used for _, used in off["used"]) > 0.9 * off["limit"] > max(used for _, used in balanced["used"])
