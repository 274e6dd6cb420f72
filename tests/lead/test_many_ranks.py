"""What a rank costs the lead and an owner does not grow with the number of ranks.

Work is counted in lines of Python that run, not in seconds: a walk over all ranks at every rank's call shows at once,
on any machine. (Set operations in C, of which a thousand ranks cost microseconds, do not count.)"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from owner.owner import owner_of
from store.toy import WAIT, make_spec, random_grads

import rayzero
from rayzero.errors import StepMismatchError
from rayzero.protocol.messages import Edit, EditKind, MeanInput, StepInputs
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.peers import collect_request
from rayzero.store.owner.step_calls import StepCalls
from rayzero.store.wire import translate

from .test_lead import inputs, lead_of, report

PACKAGE = str(Path(rayzero.__file__).parent)
FEW, MANY = 16, 256
MEANS = 6


def lines_of(act: Callable[[], object]) -> int:
    """The lines of the package that run in this thread while ``act`` does."""
    ran = 0

    def line(frame: FrameType, event: str, _: object) -> Any:
        nonlocal ran
        ran += event == "line"
        return line

    def call(frame: FrameType, event: str, _: object) -> Any:
        return line if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        act()
    finally:
        sys.settrace(before)
    return ran


def grows(work: Callable[[int], int]) -> float:
    """How many times as much work a rank is among ``MANY`` as among ``FEW``."""
    return (work(MANY) / MANY) / (work(FEW) / FEW)


def work_of_lead(ranks: int) -> int:
    """Lines that a few means, finishes and commits of all ranks take: means overlap with the open step."""
    with lead_of(make_spec(ranks), num_owners=1) as (lead, _):

        def step() -> None:
            for number in range(1, MEANS + 1):
                for rank in range(ranks):
                    lead.mean(rank, number, MeanInput(values=(1.0,), weight=1.0))
            for rank in range(ranks):
                lead.finish(report(rank), None)
            for rank in range(ranks):
                lead.commit(rank, 0, inputs())

        ran = lines_of(step)
        assert lead.decision(0).result(WAIT).step == 0
        return ran


def test_a_rank_costs_the_lead_no_more_among_many_ranks() -> None:
    assert grows(work_of_lead) < 1.1


def work_of_owner(ranks: int) -> int:
    """Lines that the pushes of all ranks take, each of which has already asked for memory for its next step."""
    with owner_of(make_spec(ranks)) as owner:
        grads = random_grads(owner.spec, 1)

        def push() -> None:
            for rank in range(ranks):
                owner.push(rank, grads)
                for unit in owner.spec.layout.units:
                    header = owner.header(rank, unit.index, 1, grads)
                    shard = owner.spec.layout.shards_by_unit[unit.index][0].index
                    owner.service.reserve_when_free(header, shard)

        return lines_of(push)


def test_a_push_costs_an_owner_no_more_among_many_ranks() -> None:
    assert grows(work_of_owner) < 1.1


def test_a_wait_for_many_ranks_names_a_few() -> None:
    with lead_of(make_spec(300), num_owners=1) as (lead, _):
        lead.finish(report(7), None)
        first = [*range(7), *range(8, 17)]
        assert lead.describe() == f"ranks {first} and 283 more have not finished step 0"
        lead.finish(report(299), None)
        assert lead.describe() == f"ranks {first} and 282 more have not finished step 0"


# ---- what goes to many is packed once


def test_reports_that_are_alike_are_one_message() -> None:
    reports = tuple(report(rank) for rank in range(1000))
    groups = translate.reports_to_pb(reports)
    assert len(groups) == 1
    assert groups[0].ByteSize() < 30
    assert translate.reports_from_pb(groups) == reports


def test_more_ranks_than_there_can_be_are_refused() -> None:
    group = pb.Reports(alike=translate.report_to_pb(report(0)), runs=[0, translate.MOST_RANKS + 1])
    with pytest.raises(translate.TransferError, match="more than 1,048,576 ranks"):
        translate.reports_from_pb([group])


def calls_of(lead: Any, service: Any) -> StepCalls:
    """The calls of ranks to the owner that leads."""
    return StepCalls(SimpleNamespace(service=service, require_lead=lambda: lead))


def test_ranks_get_a_decision_and_owners_a_collect_that_was_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, packed = make_spec(5), []
    to_pb = translate.decision_to_pb
    monkeypatch.setattr(translate, "decision_to_pb", lambda decision: packed.append(decision) or to_pb(decision))
    with lead_of(spec) as (lead, peers):
        calls, answers = calls_of(lead, peers[0].service), []
        for step in range(2):
            for rank in range(5):
                lead.finish(report(rank, step), None)
            for rank in range(5):
                commit = pb.CommitRequest(rank=rank, step=step, inputs=translate.inputs_to_pb(inputs()))
                answers.append(calls.begin("Commit", commit))
        assert [answer.result(WAIT).decision.step for answer in answers] == [0] * 5 + [1] * 5
        assert [decision.step for decision in packed] == [0, 1]
    reports = tuple(report(rank) for rank in range(5))
    assert collect_request(reports) is collect_request(reports)
    later = tuple(report(rank, step=1) for rank in range(5))
    assert collect_request(later).step == 1


def test_inputs_that_ranks_send_alike_are_unpacked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, unpacked = make_spec(3), []
    from_pb = translate.inputs_from_pb
    monkeypatch.setattr(translate, "inputs_from_pb", lambda sent: unpacked.append(sent) or from_pb(sent))
    with lead_of(spec) as (lead, peers):
        calls, answers = calls_of(lead, peers[0].service), []
        for rank, norm in ((0, 1.0), (1, 1.0), (2, 2.0)):
            clipped = StepInputs(edits=(Edit(EditKind.CLIP_NORM, norm),), hyper=spec.hyper)
            sent = translate.inputs_to_pb(clipped)
            finish = pb.FinishRequest(report=translate.report_to_pb(report(rank)), inputs=sent)
            answers.append(calls.begin("Finish", finish))
        assert len(unpacked) == 2, "those of rank 2 differ"
        with pytest.raises(StepMismatchError, match=r"ranks 0 and 2 sent different inputs"):
            answers[0].result(WAIT)
