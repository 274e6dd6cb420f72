"""Decides what a step does, in pure functions: from reports, inputs and norm parts to a norm, a decision or an error.
If ranks have sent inputs that can never be decided, the error names these ranks. The journal keeps what was decided;
metrics report it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from rayzero.errors import NonFiniteGradientError, RankLeftError, StepMismatchError, UnsupportedError
from rayzero.kernels import ADAMS, AdamOptions
from rayzero.layout.model_layout import ModelLayout
from rayzero.lead.attempt import Attempt, Pass, have
from rayzero.lead.requests import Means, WriteRequests
from rayzero.protocol.hyper import edited, require_numbers, resolve_optimizer
from rayzero.protocol.messages import (
    Action,
    Decision,
    Edit,
    EditKind,
    FinishReport,
    Hyper,
    ModelSpec,
    Norm,
    NormParts,
    Record,
    StepInputs,
)
from rayzero.telemetry.names import (
    CLIP_FACTOR,
    CLIPPED_STEPS,
    DECIDED_STEPS,
    GRAD_NORM,
    LOSS_SCALE,
    SKIPPED_STEPS,
)
from rayzero.telemetry.recorder import Recorder

_KEPT = 8  # decisions kept for later queries
_ROUNDING = 1e-9  # rounding of a clip factor that is 1

Asked = tuple[int, frozenset[int]] | None  # the version that is to be saved, and the ranks that have asked for it


def check_hyper(spec: ModelSpec, hyper: Sequence[Hyper]) -> None:
    """Raise if a step's hyper-parameters do not fit the spec: groups were removed, ``amsgrad`` was switched on, a
    number became something else, or an option is out of range."""
    if len(hyper) < len(spec.hyper):
        raise StepMismatchError(
            f"step inputs have {len(hyper)} parameter groups, the run was attached with {len(spec.hyper)}; "
            "groups may be added, but not removed"
        )
    added = hyper[len(spec.hyper) :]  # groups added later have the same options, but perhaps not a user's own entries
    like = (*spec.hyper, *[{key: value for key, value in spec.hyper[0].items() if key in group} for group in added])
    for group, (now, then) in enumerate(zip(hyper, like, strict=True)):
        require_numbers(group, now, then)
    if resolve_optimizer(spec.optimizer) not in ADAMS:
        return
    for group, (now, then) in enumerate(zip(hyper, like, strict=True)):
        options = AdamOptions.from_hyper(now, decoupled=True)
        if options.amsgrad and not then.get("amsgrad"):
            raise UnsupportedError(f"amsgrad of parameter group {group} was switched on after prepare()")


def total_norm(step: int, parts: Iterable[NormParts], world_size: int) -> Norm:
    """The L2 norm of the averaged gradients: adds the parts of all owners in shard and slot order, in fp64.

    ``world_size``: 1 if the parts are of gradients that are already averaged."""
    total = 0.0
    for _, _, square in sorted(part for owner in parts for part in owner.parts):
        total += square
    finite = math.isfinite(total)
    return Norm(step=step, total=math.sqrt(total) / world_size if finite else total, finite=finite)


def unscaling(edits: Iterable[Edit]) -> float:
    """The factor for the loss scale: one over it; 1 without a scaler."""
    return math.prod(edit.value for edit in edits if edit.kind is EditKind.UNSCALE)


def clip_factor(decision: Decision, edits: Iterable[Edit], world_size: int) -> float:
    """The factor by which clipping by norm scaled an applied step's gradients; 1, up to rounding, if it did not."""
    rest = unscaling(edits) / world_size
    return decision.scale / rest if rest else 1.0


def decide(norms: Sequence[Norm], reports: Mapping[int, FinishReport], inputs: StepInputs, world_size: int) -> Decision:
    """The decision of a step whose ranks agree. If a norm is not finite, all ranks skip the step, whatever clipping
    made of it. ``norms``: as for ``edited``."""
    first = norms[0]
    what = edited(inputs.edits, [norm.total for norm in norms], world_size) if first.finite else None
    return Decision(
        step=first.step,
        attempts=tuple(reports[rank].attempt for rank in range(world_size)),
        action=Action.SKIP if what is None else Action.APPLY,
        scale=0.0 if what is None else what.scale,
        limit=math.inf if what is None else what.limit,
        norm=first.total * unscaling(inputs.edits),
        hyper=inputs.hyper,
    )


def agreed(step: int, inputs: Mapping[int, StepInputs]) -> StepInputs:
    """The inputs that all ranks sent. Raises StepMismatchError, naming the ranks and what differs."""
    first_rank = min(inputs)
    first = inputs[first_rank]
    for rank in sorted(inputs):
        if inputs[rank].digest != first.digest:
            raise StepMismatchError(
                f"step {step} was not decided: ranks {first_rank} and {rank} sent different inputs: "
                f"{_difference(first, inputs[rank])}; every rank must clip, unscale and set hyper-parameters alike"
            )
    return first


def _difference(ours: StepInputs, theirs: StepInputs) -> str:
    if ours.edits != theirs.edits:
        return f"edits of the gradients {list(map(str, ours.edits))} against {list(map(str, theirs.edits))}"
    if len(ours.hyper) != len(theirs.hyper):
        return f"{len(ours.hyper)} against {len(theirs.hyper)} parameter groups"
    for group, (a, b) in enumerate(zip(ours.hyper, theirs.hyper, strict=True)):
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                return f"{key} of parameter group {group} is {a.get(key)} against {b.get(key)}"
    return f"digest {ours.digest[:8]} against {theirs.digest[:8]}"


def nonfinite_error(step: int, parts: Iterable[NormParts], layout: ModelLayout) -> NonFiniteGradientError:
    """The error for ``nonfinite="raise"``; names the first parameter, in forward order, whose gradient is inf or
    NaN."""
    for shard, slot, square in sorted((s, i, v) for owner in parts for s, i, v in owner.parts):
        if not math.isfinite(square):
            name = layout.units[layout.shards[shard].unit].slots[slot].name
            return NonFiniteGradientError(
                f"step {step}: the gradient of {name!r} is inf or nan; nothing was updated. "
                'nonfinite="skip" would go on with the next step'
            )
    return NonFiniteGradientError(f"step {step}: the gradient norm overflows although each parameter's is finite")


# ---- steps that can never be decided: the lead fails them for all ranks ---------------------------------------------


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


# ---- the journal ----------------------------------------------------------------------------------------------------


class RecordKeeper(Protocol):
    """Keeps decisions where they outlive this process."""

    def keep_record(self, record: Record) -> None:
        """Keep a record; returns once it is kept."""
        ...

    def records(self) -> Sequence[Record]:
        """What a former life of the lead has left, by step."""
        ...


class DecisionJournal:
    """The latest decisions, and the futures that wait for the next ones.

    Knows what was decided; not how, or who acts on it. Only one thread at a time may call it."""

    def __init__(self, keeper: RecordKeeper | None) -> None:
        """``keeper``: None if decisions end with this process."""
        self._keeper = keeper
        self._records: dict[int, Record] = {}  # by step
        self._waiting: dict[int, list[Future[Decision]]] = {}  # by step

    def restore(self) -> list[Record]:
        """Take over what a former life of the lead has recorded; returns it, by step."""
        found = [] if self._keeper is None else list(self._keeper.records())
        self._records = {record.decision.step: record for record in found}
        return found

    def write(self, record: Record) -> None:
        """The commit point: from here on the step is decided."""
        if self._keeper is not None:
            self._keeper.keep_record(record)
        self._records[record.decision.step] = record
        self._records.pop(record.decision.step - _KEPT, None)

    def find(self, step: int) -> Record | None:
        """What is recorded of ``step``; None if it is not decided yet or no longer kept."""
        return self._records.get(step)

    @property
    def records(self) -> list[Record]:
        """What is kept, by step."""
        return [self._records[step] for step in sorted(self._records)]

    def decision(self, step: int) -> Decision | None:
        """The decision of ``step``; None if it is not made yet or no longer kept."""
        found = self._records.get(step)
        return None if found is None else found.decision

    def wait(self, step: int) -> Future[Decision]:
        """A future of the decision of ``step``."""
        future: Future[Decision] = Future()
        self._waiting.setdefault(step, []).append(future)
        return future

    def take_waiting(self, step: int) -> list[Future[Decision]]:
        """Remove and return the futures that wait for ``step``, to answer them."""
        return self._waiting.pop(step, [])

    def take_all(self) -> list[Future[Decision]]:
        """Remove and return every future that waits: no further step will be decided."""
        waiting, self._waiting = self._waiting, {}
        return [future for futures in waiting.values() for future in futures]


def tell_decision(recorder: Recorder, decision: Decision, edits: Sequence[Edit], world_size: int) -> None:
    """Report a decision, and the ranks' edits of its gradients, as metrics. Only the lead does, so each value exists
    once per run."""
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
