"""Translates our messages (rayzero/protocol/messages.py) to protobuf messages and back, field by field.
So it does errors where they are not the status of a call: in shared memory, and inside other messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, Generic, TypeVar

from rayzero import errors
from rayzero.concurrency.processes import ProcessIdentity
from rayzero.errors import RayZeroError, StoreError, TransferError
from rayzero.protocol.messages import (
    Action,
    BegunSave,
    CheckpointInfo,
    Clamp,
    Contribution,
    Decision,
    Edit,
    EditKind,
    EndedSave,
    FileEntry,
    FinishReport,
    Hyper,
    LoopState,
    MeanInput,
    ModelSpec,
    Norm,
    NormParts,
    Published,
    Record,
    SharedPaths,
    StepInputs,
    Summand,
    Told,
    ToldAttempt,
    ToldStep,
    Write,
    canonical_json,
)
from rayzero.quantities import count
from rayzero.records import parse_record
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb

T = TypeVar("T")
P = TypeVar("P")

MOST_RANKS = 1 << 20  # a run of ranks is two numbers on the wire, but an object for each rank here

_ACTIONS = {Action.APPLY: pb.ACTION_APPLY, Action.SKIP: pb.ACTION_SKIP}
_FROM_ACTIONS = {wire: action for action, wire in _ACTIONS.items()}
_KINDS = {
    EditKind.UNSCALE: pb.EDIT_KIND_UNSCALE,
    EditKind.CLIP_NORM: pb.EDIT_KIND_CLIP_NORM,
    EditKind.CLIP_VALUE: pb.EDIT_KIND_CLIP_VALUE,
}
_FROM_KINDS = {wire: kind for kind, wire in _KINDS.items()}


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Raise TransferError where a caller has sent something else than ``what``."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TransferError(f"this is not {what}: {error!r}") from error


def _alike(wire: Callable[..., Any], ours: type[T]) -> tuple[Callable[[T], Any], Callable[[Any], T]]:
    """A message of ours as protobuf's, and back, where both have the same fields."""
    names = [field.name for field in fields(ours)]  # type: ignore[arg-type]  # a dataclass

    def read(message: Any) -> T:
        return ours(**{name: getattr(message, name) for name in names})

    return (lambda message: wire(**{name: getattr(message, name) for name in names})), read


def _json(value: Any) -> bytes:
    return canonical_json(value).encode()


norm_to_pb, norm_from_pb = _alike(pb.Norm, Norm)
write_to_pb, write_from_pb = _alike(pb.Write, Write)
checkpoint_to_pb, checkpoint_from_pb = _alike(pb.SaveResponse.Checkpoint, CheckpointInfo)
loop_state_to_pb, loop_state_from_pb = _alike(pb.LoopState, LoopState)
process_to_pb, process_from_pb = _alike(pb.Process, ProcessIdentity)


def _hyper(described: bytes) -> tuple[Hyper, ...]:
    return tuple(json.loads(described))


def spec_to_bytes(spec: ModelSpec) -> bytes:
    """A spec as canonical JSON."""
    return _json(spec.to_json())


def spec_digest(described: bytes) -> str:
    """What names a spec at an owner that has it: SHA-256, hexadecimal."""
    return hashlib.sha256(described).hexdigest()


def spec_from_bytes(described: bytes) -> ModelSpec:
    """The inverse of :func:`spec_to_bytes`."""
    with _reading("the description of a model"):
        return parse_record(described, ModelSpec)


def contribution_to_pb(c: Contribution) -> pb.Contribution:
    """What a push is."""
    return pb.Contribution(
        step=c.step,
        attempt=c.attempt,
        rank=c.rank,
        unit=c.unit,
        seq=c.seq,
        presence=c.presence,
        sum_of=c.sum_of,
        summands=[pb.Summand(rank=each.rank, attempt=each.attempt, pushes=each.pushes) for each in c.summands],
    )


def contribution_from_pb(c: pb.Contribution) -> Contribution:
    """The inverse of :func:`contribution_to_pb`."""
    return Contribution(
        step=c.step,
        attempt=c.attempt,
        rank=c.rank,
        unit=c.unit,
        seq=c.seq,
        presence=c.presence,
        sum_of=c.sum_of,
        summands=tuple(Summand(each.rank, each.attempt, each.pushes) for each in c.summands),
    )


def report_to_pb(report: FinishReport) -> pb.FinishReport:
    """What a rank pushed."""
    clamp = None if report.clamp is None else pb.Clamp(scale=report.clamp.scale, limit=report.clamp.limit)
    return pb.FinishReport(
        step=report.step, attempt=report.attempt, rank=report.rank, counts=report.counts, clamp=clamp
    )


def report_from_pb(report: pb.FinishReport) -> FinishReport:
    """The inverse of :func:`report_to_pb`."""
    clamp = Clamp(scale=report.clamp.scale, limit=report.clamp.limit) if report.HasField("clamp") else None
    return FinishReport(
        step=report.step, attempt=report.attempt, rank=report.rank, counts=tuple(report.counts), clamp=clamp
    )


def reports_to_pb(reports: Sequence[FinishReport]) -> list[pb.Reports]:
    """All ranks' reports, in rank order: those that differ in their rank alone become one message."""
    runs: dict[Any, list[list[int]]] = {}  # of ranks with the same report: first rank, number of ranks
    for report in reports:
        mine = runs.setdefault((report.step, report.attempt, report.counts, report.clamp), [])
        if mine and sum(mine[-1]) == report.rank:
            mine[-1][1] += 1
        else:
            mine.append([report.rank, 1])
    return [
        pb.Reports(
            alike=report_to_pb(FinishReport(step=step, attempt=attempt, rank=0, counts=counts, clamp=clamp)),
            runs=[number for run in found for number in run],
        )
        for (step, attempt, counts, clamp), found in runs.items()
    ]


def reports_from_pb(groups: Iterable[pb.Reports]) -> tuple[FinishReport, ...]:
    """The inverse of :func:`reports_to_pb`. Raises TransferError for more than ``MOST_RANKS`` ranks in all."""
    found: list[FinishReport] = []
    for group in groups:
        alike = report_from_pb(group.alike)
        with _reading("the reports of a run's ranks"):
            for first, size in zip(group.runs[::2], group.runs[1::2], strict=True):
                if len(found) + size > MOST_RANKS:
                    raise ValueError(f"more than {count(MOST_RANKS, 'rank')}")
                found += [replace(alike, rank=rank) for rank in range(first, first + size)]
    return tuple(sorted(found, key=lambda report: report.rank))


def inputs_to_pb(inputs: StepInputs) -> pb.StepInputs:
    """A rank's inputs to the decision of a step."""
    edits = [pb.Edit(kind=_KINDS[edit.kind], value=edit.value) for edit in inputs.edits]
    return pb.StepInputs(edits=edits, hyper=_json(inputs.hyper))


def inputs_from_pb(inputs: pb.StepInputs) -> StepInputs:
    """The inverse of :func:`inputs_to_pb`; the digest is the same."""
    with _reading("a rank's inputs to a step"):
        edits = tuple(Edit(_FROM_KINDS[edit.kind], edit.value) for edit in inputs.edits)
        return StepInputs(edits=edits, hyper=_hyper(inputs.hyper))


def decision_to_pb(decision: Decision) -> pb.Decision:
    """The record of a step."""
    return pb.Decision(
        step=decision.step,
        attempts=decision.attempts,
        action=_ACTIONS[decision.action],
        scale=decision.scale,
        norm=decision.norm,
        hyper=_json(decision.hyper),
        limit=decision.limit,
    )


def decision_from_pb(decision: pb.Decision) -> Decision:
    """The inverse of :func:`decision_to_pb`."""
    with _reading("a decision"):
        return Decision(
            step=decision.step,
            attempts=tuple(decision.attempts),
            action=_FROM_ACTIONS[decision.action],
            scale=decision.scale,
            norm=decision.norm,
            hyper=_hyper(decision.hyper),
            limit=decision.limit,
        )


def record_to_pb(record: Record) -> pb.Record:
    """What the lead records."""
    return pb.Record(
        decision=decision_to_pb(record.decision),
        reports=reports_to_pb(record.reports),
        norm=norm_to_pb(record.norm),
    )


def record_from_pb(record: pb.Record) -> Record:
    """The inverse of :func:`record_to_pb`."""
    return Record(
        decision=decision_from_pb(record.decision),
        reports=reports_from_pb(record.reports),
        norm=norm_from_pb(record.norm),
    )


def parts_to_pb(parts: NormParts) -> pb.CollectResponse:
    """An owner's sums of squares, as columns."""
    shards, slots, sums = zip(*parts.parts, strict=True) if parts.parts else ((), (), ())
    return pb.CollectResponse(shards=shards, slots=slots, sums=sums)


def parts_from_pb(step: int, columns: pb.CollectResponse) -> NormParts:
    """The inverse of :func:`parts_to_pb`."""
    return NormParts(step=step, parts=tuple(zip(columns.shards, columns.slots, columns.sums, strict=True)))


def mean_to_pb(rank: int, number: int, given: MeanInput, *, former: bool = False) -> pb.MeanRequest:
    """A rank's input to its ``number``th mean. ``former``: see ``ParameterStore.give_again``."""
    return pb.MeanRequest(
        rank=rank,
        number=number,
        names=given.names,
        shape=given.shape,
        values=given.values,
        weight=given.weight,
        former=former,
    )


def mean_from_pb(request: pb.MeanRequest) -> MeanInput:
    """The inverse of :func:`mean_to_pb`, without rank and number."""
    return MeanInput(
        names=tuple(request.names),
        shape=tuple(request.shape),
        values=tuple(request.values),
        weight=request.weight,
    )


def file_to_pb(entry: FileEntry) -> pb.FileEntry:
    """A file of a checkpoint."""
    return pb.FileEntry(name=entry.name, size_bytes=entry.size_bytes, sha256=entry.sha256, content=_json(entry.content))


def file_from_pb(entry: pb.FileEntry) -> FileEntry:
    """The inverse of :func:`file_to_pb`."""
    with _reading("a file of a checkpoint"):
        content = json.loads(entry.content)
    return FileEntry(name=entry.name, size_bytes=entry.size_bytes, sha256=entry.sha256, content=content)


def paths_to_pb(paths: SharedPaths) -> pb.SharedFiles:
    """Where a process's slabs are."""
    places = [pb.SharedFiles.Place(shard=shard, file=file, offset=offset) for shard, file, offset in paths.places]
    return pb.SharedFiles(control=paths.control, tensors=paths.tensors, places=places)


def paths_from_pb(files: pb.SharedFiles) -> SharedPaths:
    """The inverse of :func:`paths_to_pb`."""
    places = tuple((place.shard, place.file, place.offset) for place in files.places)
    return SharedPaths(files.control, tuple(files.tensors), places)


# ---- a lead's successor


def told_to_pb(told: Told, rank: int) -> pb.Told:
    """What a rank has told the lead."""
    steps = [
        pb.Told.Step(
            step=each.step,
            discards=each.discards,
            discarded=_attempt_to_pb(each.discarded),
            attempt=_attempt_to_pb(each.attempt),
            written=map(write_to_pb, each.written),
        )
        for each in told.steps
    ]
    means = [mean_to_pb(rank, number, given) for number, given in told.means]
    message = pb.Told(steps=steps, means=means)
    if told.saved is not None:
        saved = told.saved
        message.saved.number, message.saved.step, message.saved.directory = saved.number, saved.step, saved.directory
        if isinstance(saved.outcome, CheckpointInfo):
            message.saved.checkpoint.CopyFrom(checkpoint_to_pb(saved.outcome))
        else:
            message.saved.failure.CopyFrom(to_failure(saved.outcome))
    if told.begun is not None:
        begun = told.begun
        message.begun.number, message.begun.step, message.begun.directory = begun.number, begun.step, begun.directory
    return message


def told_from_pb(told: pb.Told) -> Told:
    """The inverse of :func:`told_to_pb`, without the rank."""
    steps = tuple(
        ToldStep(
            step=each.step,
            discards=each.discards,
            discarded=_attempt_from_pb(each.discarded),
            attempt=_attempt_from_pb(each.attempt),
            written=tuple(map(write_from_pb, each.written)),
        )
        for each in told.steps
    )
    saved = None
    if told.HasField("saved"):
        had = told.saved
        outcome = checkpoint_from_pb(had.checkpoint) if had.HasField("checkpoint") else from_failure(had.failure)
        saved = EndedSave(number=had.number, step=had.step, directory=had.directory, outcome=outcome)
    begun = None
    if told.HasField("begun"):
        begun = BegunSave(number=told.begun.number, step=told.begun.step, directory=told.begun.directory)
    means = tuple((each.number, mean_from_pb(each)) for each in told.means)
    return Told(steps=steps, means=means, saved=saved, begun=begun)


def _attempt_to_pb(attempt: ToldAttempt) -> pb.Told.Attempt:
    return pb.Told.Attempt(
        reports=map(report_to_pb, attempt.reports),
        norms=map(norm_to_pb, attempt.norms),
        inputs=None if attempt.inputs is None else inputs_to_pb(attempt.inputs),
    )


def _attempt_from_pb(attempt: pb.Told.Attempt) -> ToldAttempt:
    return ToldAttempt(
        reports=tuple(map(report_from_pb, attempt.reports)),
        norms=tuple(map(norm_from_pb, attempt.norms)),
        inputs=inputs_from_pb(attempt.inputs) if attempt.HasField("inputs") else None,
    )


# ---- loops


# ---- processes


def published_from_pb(notice: pb.NoticesResponse) -> list[Published]:
    """What an owner has published."""
    return [Published(each.shard, each.version, each.content, each.total) for each in notice.published]


# ---- errors

MAX_MESSAGE_CHARS = 8192  # of an error's text; the metadata of a call is no place for more

_BY_NAME = {
    cls.__name__: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, RayZeroError)
}


def named_error(name: str, message: str) -> RayZeroError:
    """A RayZeroError by class name; an unknown name gives a ``StoreError`` that contains it."""
    if name in _BY_NAME:
        return _BY_NAME[name](message)
    return StoreError(f"{name}: {message}")


def to_failure(error: RayZeroError) -> pb.Failure:
    """An error as a message: of the public class that it is of."""
    name = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _BY_NAME)
    return pb.Failure(error=name, message=str(error)[:MAX_MESSAGE_CHARS])


def failure_within(error: RayZeroError, most_bytes: int) -> bytes:
    """An error as a message of so many bytes at most: its text may be cut."""
    failure = to_failure(error)
    over = failure.ByteSize() - most_bytes
    if over > 0:
        text = failure.message.encode()
        failure.message = text[: max(0, len(text) - over)].decode(errors="ignore")
    return bytes(failure.SerializeToString())


def from_failure(failure: pb.Failure) -> RayZeroError:
    """The inverse of :func:`to_failure`."""
    return named_error(failure.error, failure.message)


# ---- packed once for many


class Once(Generic[T, P]):
    """What ``pack`` makes of a value, kept until it is called with another one: a decision goes to every rank, a
    collect to every owner, every rank sends the same inputs, and with a thousand of them packing takes longer than
    sending. Value and result are shared, so nobody may change them. Any thread may call it.

    Knows the last value; not what is packed."""

    def __init__(self, pack: Callable[[T], P], bits: Callable[[T], bytes] | None = None) -> None:
        """``bits``: of a value, by which it is known; None: by identity."""
        self._pack, self._bits = pack, bits
        self._last: tuple[T | bytes, P] | None = None

    def __call__(self, value: T) -> P:
        """The packed ``value``."""
        known: T | bytes = value if self._bits is None else self._bits(value)
        last = self._last
        if last is None or not (last[0] is known or (self._bits is not None and last[0] == known)):
            last = self._last = (known, self._pack(value))
        return last[1]
