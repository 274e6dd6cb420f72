"""Translates our messages (rayzero/protocol/messages.py) to protobuf messages and back: by the names and types of their
fields where both have the same, else by hand. So it does errors where they are not the status of a call: in shared
memory, and inside other messages."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from functools import partial
from operator import attrgetter
from types import NoneType
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from rayzero import errors
from rayzero.concurrency.processes import ProcessIdentity
from rayzero.errors import RayZeroError, StoreError, TransferError
from rayzero.protocol.messages import (
    CheckpointInfo,
    Contribution,
    Decision,
    FileEntry,
    FinishReport,
    LeadHistory,
    LoopState,
    MeanInput,
    ModelSpec,
    Norm,
    NormParts,
    Published,
    Record,
    SharedPaths,
    StepInputs,
    Write,
    canonical_json,
)
from rayzero.quantities import count
from rayzero.records import parse_record
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb

T = TypeVar("T")
P = TypeVar("P")
M = TypeVar("M", bound=Message)
_Call = Callable[[Any], Any]

MOST_RANKS = 1 << 20  # a run of ranks is two numbers on the wire, but an object for each rank here


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


# ---- by the names and types of fields


def _alike(ours: type[T], wire: type[M]) -> tuple[Callable[[T], M], Callable[[M], T]]:
    """What makes a message of a dataclass or NamedTuple, and the inverse. For each of its fields the message has one of
    that name. The loops are plain because every push makes a message and they take less time than comprehensions."""
    hints, fields = get_type_hints(ours), wire.DESCRIPTOR.fields_by_name
    found = [(name, *_field(name, hint, fields[name])) for name, hint in hints.items()]
    outs, backs = [(name, out) for name, out, _ in found], [(name, back) for name, _, back in found]

    def write(value: T) -> M:
        given = {}
        for name, out in outs:
            given[name] = getattr(value, name) if out is None else out(getattr(value, name))
        return wire(**given)

    def read(message: M) -> T:
        given = {}
        for name, back in backs:
            given[name] = getattr(message, name) if back is None else back(message)
        return ours(**given)

    if issubclass(ours, tuple) and not any(back for _, back in backs):
        get = attrgetter(*hints)
        return write, lambda message: ours(*get(message))  # by position: half the time
    return write, read


def _field(name: str, hint: Any, field: Any) -> tuple[_Call | None, _Call | None]:
    """What makes of our field's value that of the message's field, and of the message our field's value. None: the
    values are the same."""
    get, arguments = attrgetter(name), get_args(hint)
    is_optional, is_repeated = NoneType in arguments, Ellipsis in arguments and field.type != field.TYPE_BYTES
    out, back = _value(arguments[0] if is_optional or is_repeated else hint, field)
    if out is None or back is None:
        return None, (lambda message: tuple(get(message))) if is_repeated else None
    if is_repeated:
        return partial(map, out), lambda message: tuple(map(back, get(message)))
    if is_optional:
        return (
            lambda value: None if value is None else out(value),
            lambda message: back(get(message)) if message.HasField(name) else None,
        )
    return out, lambda message: back(get(message))


def _value(kind: Any, field: Any) -> tuple[_Call | None, _Call | None]:
    """What makes of one value of ours one of protobuf's, and the inverse: messages, errors, enums by name, JSON in
    bytes."""
    if kind is RayZeroError:
        return to_failure, from_failure
    if field.message_type is not None:
        return _alike(kind, GetMessageClass(field.message_type))
    if field.enum_type is not None:
        return _enum(kind, field)
    if field.type == field.TYPE_BYTES and kind is not bytes:
        return _json, partial(_from_json, get_origin(kind), field.full_name)
    return None, None


def _enum(kind: type[StrEnum], field: Any) -> tuple[_Call, _Call]:
    numbers = field.enum_type.values_by_name
    prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
    wire = {one: numbers[prefix + one.name].number for one in kind}
    ours = {number: one for one, number in wire.items()}

    def read(number: int) -> StrEnum:
        if number not in ours:
            raise TransferError(f"{field.full_name} is {number}, which is none of {', '.join(ours.values())}")
        return ours[number]

    return wire.__getitem__, read


def _from_json(kind: type, what: str, described: bytes) -> Any:
    json_kind = list if kind is tuple else kind
    with suppress(ValueError, RecursionError):
        found = json.loads(described)
        if isinstance(found, json_kind):
            return kind(found)
    raise TransferError(f"{what} is {reprlib.repr(described)}, which is no {json_kind.__name__} in JSON")


def _json(value: Any) -> bytes:
    return canonical_json(value).encode()


norm_to_pb, norm_from_pb = _alike(Norm, pb.Norm)
write_to_pb, write_from_pb = _alike(Write, pb.Write)
checkpoint_to_pb, checkpoint_from_pb = _alike(CheckpointInfo, pb.SaveResponse.Checkpoint)
loop_state_to_pb, loop_state_from_pb = _alike(LoopState, pb.LoopState)
process_to_pb, process_from_pb = _alike(ProcessIdentity, pb.Process)
contribution_to_pb, contribution_from_pb = _alike(Contribution, pb.Contribution)
report_to_pb, report_from_pb = _alike(FinishReport, pb.FinishReport)
inputs_to_pb, inputs_from_pb = _alike(StepInputs, pb.StepInputs)
decision_to_pb, decision_from_pb = _alike(Decision, pb.Decision)
file_to_pb, file_from_pb = _alike(FileEntry, pb.FileEntry)
paths_to_pb, paths_from_pb = _alike(SharedPaths, pb.SharedFiles)
published_to_pb, published_from_pb = _alike(Published, pb.NoticesResponse.Published)
history_to_pb, history_from_pb = _alike(LeadHistory, pb.LeadHistory)
_given_to_pb, mean_from_pb = _alike(MeanInput, pb.MeanRequest)  # without rank and number


# ---- by hand


def spec_to_bytes(spec: ModelSpec) -> bytes:
    """A spec as canonical JSON."""
    return _json(spec.to_json())


def spec_digest(described: bytes) -> str:
    """What names a spec at an owner that has it: SHA-256, hexadecimal."""
    return hashlib.sha256(described).hexdigest()


def spec_from_bytes(described: bytes) -> ModelSpec:
    """The inverse of :func:`spec_to_bytes`."""
    try:
        return parse_record(described, ModelSpec)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TransferError(f"this is not the description of a model: {error!r}") from error


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
        firsts, sizes = group.runs[::2], group.runs[1::2]
        if len(firsts) != len(sizes) or len(found) + sum(sizes) > MOST_RANKS:
            raise TransferError(f"reports are of an odd number of runs, or of more than {count(MOST_RANKS, 'rank')}")
        for first, size in zip(firsts, sizes, strict=True):
            found += [replace(alike, rank=rank) for rank in range(first, first + size)]
    return tuple(sorted(found, key=lambda report: report.rank))


def record_to_pb(record: Record) -> pb.Record:
    """What the lead records."""
    decision, norm = decision_to_pb(record.decision), norm_to_pb(record.norm)
    return pb.Record(decision=decision, reports=reports_to_pb(record.reports), norm=norm)


def record_from_pb(record: pb.Record) -> Record:
    """The inverse of :func:`record_to_pb`."""
    decision, norm = decision_from_pb(record.decision), norm_from_pb(record.norm)
    return Record(decision=decision, reports=reports_from_pb(record.reports), norm=norm)


def parts_to_pb(parts: NormParts) -> pb.CollectResponse:
    """An owner's sums of squares, as columns."""
    shards, slots, sums = zip(*parts.parts, strict=True) if parts.parts else ((), (), ())
    return pb.CollectResponse(shards=shards, slots=slots, sums=sums)


def parts_from_pb(step: int, columns: pb.CollectResponse) -> NormParts:
    """The inverse of :func:`parts_to_pb`."""
    return NormParts(step=step, parts=tuple(zip(columns.shards, columns.slots, columns.sums, strict=True)))


def mean_to_pb(rank: int, number: int, given: MeanInput, *, former: bool = False) -> pb.MeanRequest:
    """A rank's input to its ``number``th mean. ``former``: see ``ParameterStore.give_again``."""
    request = _given_to_pb(given)
    request.rank, request.number, request.former = rank, number, former
    return request


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
