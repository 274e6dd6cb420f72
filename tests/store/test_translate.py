"""Our messages as protobuf's, and back."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from enum import StrEnum
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.concurrency.processes import ProcessIdentity
from rayzero.errors import RankLeftError, RayZeroError, TransferError
from rayzero.protocol.messages import (
    AttemptHistory,
    CheckpointInfo,
    Clamp,
    Contribution,
    Decision,
    EndedSave,
    FileEntry,
    FinishReport,
    LeadHistory,
    LoopState,
    MeanInput,
    Norm,
    NormParts,
    Published,
    Record,
    SharedPaths,
    StepHistory,
    StepInputs,
    Write,
)
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.wire import translate

TRANSLATED = {
    "norm": Norm,
    "write": Write,
    "checkpoint": CheckpointInfo,
    "loop_state": LoopState,
    "process": ProcessIdentity,
    "contribution": Contribution,
    "report": FinishReport,
    "inputs": StepInputs,
    "decision": Decision,
    "record": Record,
    "file": FileEntry,
    "paths": SharedPaths,
    "published": Published,
    "reports": tuple[FinishReport, ...],
    "parts": NormParts,
    "mean": MeanInput,
    "history": LeadHistory,
}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
PLAIN = {
    int: st.integers(0, 2**32 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(),
    bytes: st.binary(),
    bool: st.booleans(),
    Any: json_values,
    type(None): st.none(),
    RayZeroError: st.nothing(),  # errors are not equal
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of an annotation; reports by rank."""
    inner = get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return st.builds(kind, **{name: values(hint) for name, hint in get_type_hints(kind).items()})
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return st.sampled_from(kind)
    if kind == tuple[FinishReport, ...]:
        reports = st.lists(values(FinishReport), max_size=4, unique_by=lambda report: report.rank)
        return reports.map(lambda found: tuple(sorted(found, key=lambda report: report.rank)))
    if get_origin(kind) is dict:
        return st.dictionaries(*map(values, inner), max_size=3)
    if get_origin(kind) is not tuple:
        return st.one_of(*map(values, inner))
    return st.lists(values(inner[0]), max_size=3).map(tuple) if inner[-1] is ... else st.tuples(*map(values, inner))


def through_bytes(name: str, value: Any) -> Any:
    """A value of ours that was a protobuf message's bytes."""
    to_pb, from_pb = getattr(translate, f"{name}_to_pb"), getattr(translate, f"{name}_from_pb")
    if name == "mean":
        return from_pb(pb.MeanRequest.FromString(to_pb(3, 7, value, former=True).SerializeToString()))
    if name == "parts":
        return from_pb(value.step, pb.CollectResponse.FromString(to_pb(value).SerializeToString()))
    if name == "reports":
        return from_pb(pb.Reports.FromString(group.SerializeToString()) for group in to_pb(value))
    message = to_pb(value)
    return from_pb(type(message).FromString(message.SerializeToString()))


@pytest.mark.parametrize("name", TRANSLATED)
@given(st.data())
def test_what_comes_is_what_was_sent(name: str, data: st.DataObject) -> None:
    value = data.draw(values(TRANSLATED[name]))
    found = through_bytes(name, value)
    assert found == value
    assert type(found) is type(value)


def test_every_translation_is_tested() -> None:
    public = {name.removesuffix("_to_pb") for name in vars(translate) if name.endswith("_to_pb") and name[0] != "_"}
    assert public == set(TRANSLATED)


def test_a_history_has_the_error_of_a_save() -> None:
    """The property leaves errors out: no two are equal."""
    report = FinishReport(step=1, attempt=1, rank=3, counts=(2, 0), clamp=Clamp(scale=0.0, limit=0.0))
    attempt = AttemptHistory(reports=(report, replace(report, clamp=None)), inputs=StepInputs(edits=(), hyper=()))
    ended = EndedSave(number=0, step=0, directory="", failure=RankLeftError("rank 1 left"))
    history = LeadHistory(steps=(StepHistory(step=1, attempt=attempt),), saved=ended)
    assert repr(through_bytes("history", history)) == repr(history)


DECISION = {"action": pb.ACTION_APPLY, "hyper": b"[]"}


@pytest.mark.parametrize(
    ("read", "sent", "what"),
    [
        (translate.decision_from_pb, pb.Decision(hyper=b"[]"), r"Decision.action is 0, which is none of apply, skip"),
        (translate.decision_from_pb, pb.Decision(**{**DECISION, "action": 9}), r"Decision.action is 9, which is none"),
        (translate.decision_from_pb, pb.Decision(**{**DECISION, "hyper": b""}), r"Decision.hyper is b'', .* no list"),
        (translate.decision_from_pb, pb.Decision(**{**DECISION, "hyper": b'{"lr":1}'}), r"which is no list in JSON"),
        (
            translate.decision_from_pb,
            pb.Decision(**{**DECISION, "hyper": b"[" * 100_000}),
            r"is b'\[+\.\.\.\[+', which",
        ),
        (
            translate.inputs_from_pb,
            pb.StepInputs(edits=[pb.Edit(kind=4)], hyper=b"[]"),
            r"Edit.kind is 4, .* clip_norm",
        ),
        (translate.inputs_from_pb, pb.StepInputs(hyper=b"\xff"), r"StepInputs.hyper is b'\\xff'"),
        (
            translate.file_from_pb,
            pb.FileEntry(content=b"[]"),
            r"FileEntry.content is b'\[\]', which is no dict in JSON",
        ),
        (translate.record_from_pb, pb.Record(), r"Decision.action is 0"),
        (translate.reports_from_pb, [pb.Reports(runs=[0, 1, 2])], r"an odd number of runs"),
    ],
)
def test_what_is_not_ours_is_refused_by_name(read: Any, sent: Any, what: str) -> None:
    with pytest.raises(TransferError, match=what):
        read(sent)
