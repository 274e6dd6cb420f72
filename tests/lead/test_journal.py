"""What is told of a decision: a loss scale is no clipping."""

from __future__ import annotations

import math

import pytest

from rayzero.lead.decide import decide, tell_decision
from rayzero.protocol.messages import Edit, EditKind, FinishReport, Norm, StepInputs
from rayzero.telemetry.names import CLIP_FACTOR, CLIPPED_STEPS, DECIDED_STEPS, GRAD_NORM, LOSS_SCALE, SKIPPED_STEPS
from rayzero.telemetry.recorder import MemoryRecorder

WORLD = 3


def told(recorder: MemoryRecorder, norm: float, *edits: Edit) -> None:
    """A step whose averaged gradients have that norm, and which every rank edits so."""
    found = Norm(step=0, total=norm, finite=math.isfinite(norm))
    reports = {rank: FinishReport(step=0, attempt=0, rank=rank, counts=()) for rank in range(WORLD)}
    decision = decide([found], reports, StepInputs(edits=edits, hyper=()), WORLD)
    tell_decision(recorder, decision, edits, WORLD)


@pytest.mark.parametrize("scale", [2.0**16, 3.0, 1.0, 0.125])
def test_a_loss_scale_is_told_and_clips_nothing(scale: float) -> None:
    recorder, unscale = MemoryRecorder(), Edit(EditKind.UNSCALE, 1 / scale)
    told(recorder, 2.0 * scale, unscale, Edit(EditKind.CLIP_NORM, 5.0))
    assert recorder.total(CLIPPED_STEPS) == 0
    assert recorder.gauge(CLIP_FACTOR) == pytest.approx(1.0)
    assert recorder.gauge(LOSS_SCALE) == pytest.approx(scale)
    assert recorder.gauge(GRAD_NORM) == pytest.approx(2.0)
    told(recorder, 2.0 * scale, unscale, Edit(EditKind.CLIP_NORM, 0.5))
    assert recorder.total(CLIPPED_STEPS) == 1
    assert recorder.gauge(CLIP_FACTOR) == pytest.approx(0.25)
    assert recorder.total(DECIDED_STEPS) == 2


def test_without_a_scaler_it_is_1_and_a_skipped_step_is_decided_and_not_clipped() -> None:
    recorder = MemoryRecorder()
    told(recorder, math.inf, Edit(EditKind.CLIP_NORM, 0.5))
    assert recorder.gauge(LOSS_SCALE) == 1
    assert (recorder.total(DECIDED_STEPS), recorder.total(SKIPPED_STEPS, reason="nonfinite")) == (1, 1)
    assert recorder.total(CLIPPED_STEPS) == 0


def test_a_scale_that_leaves_nothing_of_the_gradients_is_no_clipping_either() -> None:
    recorder = MemoryRecorder()
    told(recorder, 1.0, Edit(EditKind.UNSCALE, 0.0))
    assert (recorder.gauge(LOSS_SCALE), recorder.gauge(CLIP_FACTOR)) == (math.inf, 1.0)
