"""The last reports of a loop are numbered and kept, so that its next life can make them again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rayzero.engine.loop.tracked import LoopReport, RecentReports, plain_metrics
from rayzero.errors import ConfigError


def test_reports_are_numbered_within_a_step_and_those_of_two_steps_are_kept() -> None:
    recent = RecentReports()
    recent.arrived(9, 0)
    made = [recent.add(step, {"loss": float(step)}, None) for step in (3, 4, 4, 5)]
    assert [(each.step, each.number) for each in made] == [(3, 0), (4, 0), (4, 1), (5, 0)]
    again = RecentReports()
    again.skip(7)
    assert again.restore(recent.state()) == made[1:]
    again.skip(5)
    assert again.add(5, {"loss": 9.0}, "a") == LoopReport(step=5, number=2, metrics={"loss": 9.0}, checkpoint="a")


def test_reports_that_have_not_arrived_are_kept() -> None:
    recent = RecentReports()
    for step in range(300):
        recent.add(step, {}, None)
    assert [each["step"] for each in recent.state()["recent"]] == list(range(200, 300)), "of a receiver that is dead"
    recent.arrived(297, 0)
    recent.add(300, {}, None)
    assert [each["step"] for each in recent.state()["recent"]] == [298, 299, 300]


def test_a_report_that_is_refused_takes_no_number() -> None:
    recent = RecentReports()
    with pytest.raises(ConfigError, match="'logits' is a Tensor"):
        recent.add(1, {"logits": torch.zeros(3)}, None)
    assert recent.add(1, {}, None).number == 0


def test_one_element_tensors_and_arrays_become_numbers():
    metrics = {"loss": torch.tensor(1.5), "n": np.int64(3), "x": np.array([2.0]), "note": "ok", "none": None}
    assert plain_metrics(metrics) == {"loss": 1.5, "n": 3, "x": 2.0, "note": "ok", "none": None}


def test_a_metric_that_is_no_number_is_refused_by_name():
    with pytest.raises(ConfigError, match="'logits' is a Tensor"):
        plain_metrics({"logits": torch.zeros(3)})
