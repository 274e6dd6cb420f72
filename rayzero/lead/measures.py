"""What the lead tells of its decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rayzero.lead.decide import clip_factor, unscaling
from rayzero.protocol.messages import Action, Decision, Edit
from rayzero.telemetry.names import (
    CLIP_FACTOR,
    CLIPPED_STEPS,
    DECIDED_STEPS,
    GRAD_NORM,
    LOSS_SCALE,
    SKIPPED_STEPS,
)
from rayzero.telemetry.recorder import Recorder

_ROUNDING = 1e-9  # of a clip factor that is 1


def tell_decision(recorder: Recorder, decision: Decision, edits: Sequence[Edit], world_size: int) -> None:
    """What a step was decided to be, of gradients that ranks edited so; the lead alone tells it: once a run."""
    recorder.add(DECIDED_STEPS)
    recorder.set(GRAD_NORM, decision.norm)
    back = unscaling(edits)
    recorder.set(LOSS_SCALE, 1 / back if back else math.inf)
    recorder.add(SKIPPED_STEPS, decision.action is Action.SKIP, reason="nonfinite")
    if decision.action is Action.SKIP:
        return
    factor = clip_factor(decision, edits, world_size)
    recorder.set(CLIP_FACTOR, factor)
    recorder.add(CLIPPED_STEPS, factor < 1 - _ROUNDING)
