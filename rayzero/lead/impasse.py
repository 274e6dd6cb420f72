"""Detects steps that can never be decided, in pure functions: from what ranks have sent to None or the error that names
them.

The lead fails the step with that error for all ranks."""

from __future__ import annotations

from collections.abc import Mapping

from rayzero.errors import RankLeftError, StepMismatchError
from rayzero.lead.attempt import Attempt, Pass, have
from rayzero.lead.means import Means
from rayzero.lead.writes import WriteRequests
from rayzero.protocol.messages import FinishReport, ModelSpec

Asked = tuple[int, frozenset[int]] | None  # the version that is to be saved, and the ranks that have asked for it


def impasse(
    current: Attempt, asked: Asked, writes: WriteRequests, means: Means, spec: ModelSpec
) -> StepMismatchError | None:
    """The error if some ranks wait for what others will not do any more. ``asked``: who requested a checkpoint.

    The lead asks after every call of a rank, so what is usual must not cost a walk over all ranks."""
    return (
        _gone_on_without_saving(current, asked, spec)
        or _gone_on_without_writing(current, asked, writes, spec)
        or _waits_in_a_mean(current, asked, writes, means, spec)
        or _torn(current)
        or _left_behind(current)
    )


def _gone_on_without_saving(current: Attempt, asked: Asked, spec: ModelSpec) -> StepMismatchError | None:
    """The error if a rank that has not requested the checkpoint has committed its step, or waits for a norm that the
    requesting ranks have not finished."""
    if asked is None or asked[0] != current.step or len(asked[1]) == spec.world_size:
        return None
    step, savers = asked
    gone = current.gone_on_without(savers)
    if not gone:
        return None
    return StepMismatchError(
        f"{have(sorted(savers))} asked to save v{step}, but {have(gone)} finished step {step} without saving it; "
        "every rank must save at the same step"
    )


def _gone_on_without_writing(
    current: Attempt, asked: Asked, writes: WriteRequests, spec: ModelSpec
) -> StepMismatchError | None:
    """The error if a rank has finished the step, or waits for a checkpoint, without a write that others requested."""
    writers = writes.ranks
    if not writers or len(writers) == spec.world_size:
        return None
    saving = sorted(asked[1] - writers) if asked is not None and asked[0] == current.step else []
    gone = current.gone_on_without(writers)
    if not gone and not saving:
        return None
    done = f"{have(gone)} finished the step" if gone else f"{have(saving)} asked to save it"
    return StepMismatchError(
        f"{writes.describe(spec.layout)}, but {done} without; every rank must write the same values to the same "
        "parameters"
    )


def _waits_in_a_mean(
    current: Attempt, asked: Asked, writes: WriteRequests, means: Means, spec: ModelSpec
) -> StepMismatchError | None:
    """The error if a rank waits for the others in a mean, while one that has not called it waits for that rank in
    another call."""
    in_means = means.waiting()
    if not in_means:
        return None
    last = current.passes[-1]
    reported = frozenset(last.reports) if last.norm is None else frozenset()
    saving = asked[1] if asked is not None else frozenset()
    waits = (  # ranks that have asked, those of them that wait until all have, and for what
        (reported, reported - current.inputs.keys(), f"asked for the norm of step {current.step}"),
        (saving, saving, f"asked to save v{asked[0]}" if asked is not None else ""),
        (writes.ranks, writes.ranks, writes.action(spec.layout) if writes.ranks else ""),
    )
    for there in in_means:
        for have_asked, stand_still, what in waits:
            stuck, gone_on = stand_still - there, there - have_asked
            if stuck and gone_on:
                return StepMismatchError(
                    f"{have(sorted(stuck))} {what}, but {have(sorted(gone_on))} called mean_over_ranks() before "
                    "that; every rank must call them in the same order"
                )
    return None


def _torn(current: Attempt) -> StepMismatchError | None:
    if not (current.discarded and current.inputs):
        return None
    return StepMismatchError(
        f"step {current.step} cannot be decided: ranks {sorted(current.discarded)} discarded it (zero_grad) and "
        f"ranks {sorted(current.inputs)} committed it (step); after clip_grad_norm_() all ranks must do the same"
    )


def _left_behind(current: Attempt) -> StepMismatchError | None:
    if not current.gone_on:
        return None
    return StepMismatchError(
        f"step {current.step} cannot be decided: ranks {sorted(current.passes[-1].reports)} clipped by norm after "
        f"clipping by value and wait for ranks {sorted(current.gone_on)}, which went on without; every rank must clip "
        "alike"
    )


def clipped_unlike(asked: Pass, report: FinishReport) -> StepMismatchError | None:
    """The error if a rank asks for the norm of other gradients than the earlier ranks did, who all ask for the same."""
    other = next(iter(asked.reports.values()), report)
    if other.clamp == report.clamp:
        return None
    return StepMismatchError(
        f"step {report.step} was not decided: ranks {other.rank} and {report.rank} clip different "
        f"gradients by norm: {other.clamp} against {report.clamp}; every rank must clip alike"
    )


def rank_left(current: Attempt, reasons: Mapping[int, str], writers: frozenset[int]) -> RankLeftError | None:
    """The error if a rank that others wait for has left. ``reasons``: rank -> why it left. ``writers``: ranks that wait
    in a write.

    None as long as no rank has finished the step or waits in a write: others may still be reading the last decided
    version and be about to leave too."""
    waited = {rank for rank in reasons if rank not in current.inputs and rank not in current.discarded}
    others = (current.reports.keys() | writers) - set(reasons) if waited else set()
    if not others:
        return None
    gone, step = min(waited), current.step
    after = f"after step {step - 1}" if step else "before the first step"
    return RankLeftError(
        f"rank {gone} left {after} ({reasons[gone]}), rank {min(others)} is in step {step}; "
        "every rank must take the same number of steps"
    )
