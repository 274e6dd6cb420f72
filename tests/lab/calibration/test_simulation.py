"""``python -m lab simulation``: what it measures, keeps and compares."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from lab.bench.work import Work
from lab.calibration import machine, simulation
from lab.calibration.simulation import Case
from lab.simulation.machines import Measured
from rayzero.errors import ConfigError

pytestmark = pytest.mark.thorough

TINY = Work(dim=64, layers=1, vocab=128, seq=16, batch=1)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A file of figures, each measured with few steps."""
    monkeypatch.setattr(machine, "_TINY_STEPS", 3)
    monkeypatch.setattr(machine, "_ROUNDS", 1)
    monkeypatch.setattr(machine, "_LARGE", 1 << 20)
    monkeypatch.setattr(simulation, "get_args", lambda _: ("inproc",))
    path = tmp_path / "here.json"
    simulation.main(["--save", str(path), "--json"])
    return path


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "measure_here", lambda _: pytest.fail("three minutes"))
    with pytest.raises(ConfigError, match=r"there is no folder .*/nowhere that can be written to"):
        simulation.main(["--save", str(tmp_path / "nowhere" / "here.json")])


@pytest.mark.soak
def test_it_measures_and_compares_a_case(here, monkeypatch, capsys):
    found = Measured.from_json(json.loads(here.read_text()))
    assert found.to_json() == json.loads(here.read_text())
    machine, costs = found.machine, found.costs["inproc"]
    assert min(machine.memory, machine.adam_core, machine.norm_core, machine.sum_core, machine.copy_core) > 1e8
    assert 0 < found.part_s < 1e-4
    assert costs.unit_s + costs.step_s > 0
    assert costs.aside_s == costs.message_s == costs.latency_s == 0, "its owner is in the rank's process"
    assert costs.shard_s >= 0, "which its threads beside the computing one work for"
    capsys.readouterr()
    monkeypatch.setattr(simulation, "cases", lambda: [Case(ranks=1, owners=1, transport="inproc", work=TINY)])
    simulation.main(["--load", str(here), "--compare", "--rounds", "2", "--steps", "2", "--patience", "0", "--json"])
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert case["ratio"] == pytest.approx(case["simulated"]["seconds"] / case["step"]["median"])
    assert case["simulated"]["seconds"] > case["computing"] > 0
    assert case["waits"].keys() == {"optimizer", "fetch", "push"}


def test_a_profile_spreads_the_whole_pass_over_the_units():
    account = {"forward": [1.0, 2.0, 3.0], "backward": [4.0, 4.0, 5.0], "units": [0.0, 1.5, 3.0], "cpu": 1.0}
    found = machine.profile_of([account], root=0)
    assert found.forward == pytest.approx((2 * 1.5 / 6, 2 * 1.5 / 6, 2 * 3.0 / 6)), "the root has what no unit computes"
    assert sum(found.backward) == pytest.approx(4.0)


def test_costs_of_streams_are_told_apart_by_way():
    """The owner has summed the norm of what was pushed."""
    fetch = {"seconds": 0.5, "cpu": 0.4, "threads": {1: 0.3, 2: 0.1}}
    push = {"seconds": 1.0, "cpu": 0.2, "threads": {1: 0.6, 2: 0.8}}
    assert asdict(machine.costs_of_stream([fetch, fetch], 1000)) == pytest.approx(
        {"speed": 2000, "rank_byte_s": 0.4e-3, "owner_byte_s": 0.4e-3}
    )
    assert asdict(machine.costs_of_stream([push], 1000, beside_s=0.5e-3)) == pytest.approx(
        {"speed": 1000, "rank_byte_s": 0.2e-3, "owner_byte_s": 0.9e-3}
    )


def test_wrong_cases_and_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--cases has \[99\], but there are only 0 to 7"):
        simulation.main(["--compare", "--cases", "99"])
    with pytest.raises(ConfigError, match="costs is missing; write the file with"):
        Measured.from_json({"machine": {}})
    (tmp_path / "none.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"none\.json has no figures"):
        simulation.main(["--load", str(tmp_path / "none.json")])
