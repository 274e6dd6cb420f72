"""What messages cost a lead, fitted to runs of ``lab/campaigns/many_ranks.py``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lab.calibration import simulation
from lab.calibration.lead_costs import LeadCosts, LeadRun, read_runs
from lab.simulation.machines import Measured
from rayzero.errors import ConfigError
from tests.lab.simulation.runs import FREE

CAMPAIGNS = Path(__file__).parents[3] / "lab" / "campaigns"
TRUE = LeadCosts(message_s=3e-4, question_s=4e-5, notice_s=2e-4)


def row(ranks: int, owners: int, together: int) -> dict[str, object]:
    """A line of the benchmark, of a lead with ``TRUE`` costs."""
    messages = 2 * (ranks // together + owners - 1)
    asked = messages * TRUE.message_s + (2 * ranks * TRUE.question_s if together > 1 else 0.0)
    seconds = {
        "finish of all but one": 0.75 * asked,
        "last finish to last answer": 0.25 * asked,
        "commit to last decision": asked + 0.5 * ranks * TRUE.notice_s,
        "notices": 1.5 * ranks * TRUE.notice_s,
        "mean": 1.0,
    }
    phases = {name: {"cpu_s": cpu_s} for name, cpu_s in seconds.items()}
    return {"ranks": ranks, "owners": owners, "door_of": together, "notices": 2.0, "phases": phases}


def written(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def test_the_costs_of_a_lead_are_found_in_what_its_runs_took(tmp_path: Path) -> None:
    runs = read_runs(written(tmp_path / "lead.json", row(400, 16, 1), row(400, 16, 8), row(1000, 64, 8)))
    assert [(run.messages, run.questions) for run in runs] == [(830, 0), (130, 800), (376, 2000)]
    found = LeadCosts.fit(runs)
    assert found.message_s == pytest.approx(TRUE.message_s)
    assert found.question_s == pytest.approx(TRUE.question_s)
    assert found.notice_s == pytest.approx(TRUE.notice_s)
    for run in runs:
        assert TRUE.seconds(run) == pytest.approx((run.finish_s, run.commit_s))


def test_a_step_of_one_rank_takes_the_lead_as_long_as_before() -> None:
    """6 messages of 1 ms; of hundreds, each takes 0.3 ms, and 4.2 ms are left that belong to no message."""
    costs = TRUE.put_into(replace(FREE, message_s=1e-3))
    assert (costs.message_s, costs.asked_s, costs.told_s) == (3e-4, 4e-5, 2e-4)
    assert costs.round_s == pytest.approx(4.2e-3)
    again = LeadCosts(message_s=2e-4, question_s=1e-5, notice_s=1e-4).put_into(costs)
    assert 6 * again.message_s + again.round_s == pytest.approx(6e-3)


def test_runs_from_which_nothing_follows_are_refused(tmp_path: Path) -> None:
    alike = [LeadRun.of(row(ranks, 16, 8)) for ranks in (64, 400)]
    with pytest.raises(ConfigError, match="runs with and without doors"):
        LeadCosts.fit(alike)
    slow = [replace(LeadRun.of(row(400, 16, 8)), finish_s=0.0), LeadRun.of(row(400, 16, 1))]
    with pytest.raises(ConfigError, match="a busy machine has disturbed the runs"):
        LeadCosts.fit(slow)
    with pytest.raises(ConfigError, match=r"none\.json has no lines of python -m lab many_ranks --json"):
        read_runs(written(tmp_path / "none.json", {"ranks": 1}))
    with pytest.raises(ConfigError, match=r"gone\.json has no lines of .* --json: No such file or directory$"):
        read_runs(tmp_path / "gone.json")


def test_they_are_put_into_the_costs_of_grpc(tmp_path: Path) -> None:
    here, lead = Measured.read(CAMPAIGNS / "scale_simulation.json"), tmp_path / "lead.json"
    found = simulation.with_lead(here, written(lead, row(400, 16, 1), row(400, 16, 8)))
    assert found.costs["grpc"].question_s == pytest.approx(TRUE.question_s)
    assert (found.costs["shm"], found.machine) == (here.costs["shm"], here.machine)
    with pytest.raises(ConfigError, match="costs of grpc, which were not measured"):
        simulation.with_lead(replace(here, costs={"shm": here.costs["shm"]}), lead)


def test_the_pages_of_scale_have_the_costs_of_their_runs() -> None:
    """docs/scale_simulation.md; the fit is within a fifth of what each run took."""
    runs = read_runs(CAMPAIGNS / "many_ranks.json")
    found, costs = LeadCosts.fit(runs), Measured.read(CAMPAIGNS / "scale_simulation.json").costs["grpc"]
    assert (costs.message_s, costs.question_s, costs.notice_s) == pytest.approx(
        (found.message_s, found.question_s, found.notice_s)
    )
    for run in runs:
        assert found.seconds(run) == pytest.approx((run.finish_s, run.commit_s), rel=0.2)
