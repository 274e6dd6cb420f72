"""``python -m lab scale_simulation``, with its smallest runs."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields

import pytest

from lab.campaigns import scale_simulation
from lab.simulation.machines import Costs

pytestmark = pytest.mark.thorough


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
