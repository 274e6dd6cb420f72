"""The door of a host asks the lead what its ranks ask, in one call; whatever becomes of either, each has its answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, cast

import pytest

from rayzero.concurrency.futures import failed, settled
from rayzero.errors import (
    EpochOverError,
    HandshakeError,
    StepMismatchError,
    StoreClosedError,
    StoreError,
    TransferError,
)
from rayzero.protocol.messages import MeanInput
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.channel import Caller
from rayzero.store.host.door import Door
from rayzero.store.host.lead_questions import LeadQuestions
from rayzero.store.host.owner_link import OwnerLink
from rayzero.store.owner.calls.long_calls import Repeats, answers_to, begin_questions
from rayzero.store.owner.served_model import ServedModel
from rayzero.store.shm.signals import available
from rayzero.store.wire.rpc import OWNER_SERVICE, token_metadata
from rayzero.store.wire.translate import to_failure
from tests.support.waiting import until

from .stores import TOKEN, Stores, over_grpc, serving
from .test_tls import OWN, of_rank, refusal
from .toy import WAIT, Rank, make_spec, random_grads, start, take_step

RANKS = 3
needs_memory = pytest.mark.skipif(available() is not None, reason="no memory that ranks share here")


# ---- when a door asks


class Lead:
    """A link to a lead that answers when the test says so; and a clock."""

    caller = Caller.optimizer(2)

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int], Future[Any]]] = []  # method, ranks, the answer
        self.later: list[Callable[[], None]] = []

    def ask(self, method: str, request: pb.AskRequest, timeout_s: float, *, repeats: bool) -> Future[Any]:
        assert method == "Ask"
        assert repeats
        self.asked.append((request.method, [each.rank for each in request.questions], Future()))
        return self.asked[-1][2]

    def made(self) -> list[tuple[str, list[int]]]:
        return [(method, ranks) for method, ranks, _ in self.asked]


@pytest.fixture
def door() -> Iterator[tuple[LeadQuestions, Lead]]:
    lead = Lead()
    questions = LeadQuestions(cast(OwnerLink, lead), lambda _, call: lead.later.append(call))
    for rank in range(RANKS):
        questions.meet(rank)
    yield questions, lead
    questions.close(StoreClosedError("the test is over"))
    questions.join()


def answered(places: Sequence[int], content: bytes = b"norm") -> pb.AskResponse:
    return pb.AskResponse(answers=[pb.AskResponse.Answer(questions=places, response=content)])


def test_one_call_leaves_once_the_last_rank_has_asked(door: tuple[LeadQuestions, Lead]) -> None:
    questions, lead = door
    first = [questions.ask(rank, 0, "Finish", b"") for rank in (2, 0)]
    assert lead.made() == []
    last = questions.ask(1, 0, "Finish", b"")
    assert lead.made() == [("Finish", [2, 0, 1])]
    lead.asked[0][2].set_result(answered([0, 1, 2]))
    assert [each.result(WAIT) for each in (*first, last)] == [b"norm"] * 3


def test_what_was_asked_leaves_when_the_others_are_late_and_theirs_in_another_call(
    door: tuple[LeadQuestions, Lead],
) -> None:
    questions, lead = door
    questions.ask(0, 0, "Mean", b"")
    questions.ask(1, 0, "Mean", b"")
    (over,) = lead.later
    over()
    assert lead.made() == [("Mean", [0, 1])]
    questions.ask(2, 0, "Mean", b"")
    assert lead.made()[1:] == [("Mean", [2])], "the others have asked before"


def test_the_time_of_those_that_have_left_is_not_that_of_the_next(door: tuple[LeadQuestions, Lead]) -> None:
    questions, lead = door
    for rank in range(RANKS):
        questions.ask(rank, 0, "Finish", b"")
    lead.asked[0][2].set_result(answered(range(RANKS)))
    until(lambda: not questions._asked["Finish"])
    questions.ask(0, 0, "Finish", b"")
    (of_the_first, of_the_next) = lead.later
    of_the_first()
    assert len(lead.asked) == 1
    of_the_next()
    assert lead.made()[1:] == [("Finish", [0])]


def test_other_questions_leave_at_once(door: tuple[LeadQuestions, Lead]) -> None:
    questions, lead = door
    for method in ("Discard", "Save", "BeginSave", "Write", "GetDecision"):
        questions.ask(1, 0, method, b"")
        assert lead.made()[-1] == (method, [1])
    assert not lead.later


def test_a_rank_that_leaves_is_not_waited_for_and_asks_nothing(door: tuple[LeadQuestions, Lead]) -> None:
    questions, lead = door
    for rank in (0, 1):
        questions.ask(rank, 0, "Finish", b"")
    questions.leave(1)
    questions.leave(2)
    assert lead.made() == [("Finish", [0])]


def test_those_that_the_lead_makes_wait_are_asked_for_again(door: tuple[LeadQuestions, Lead]) -> None:
    questions, lead = door
    answers = [questions.ask(rank, 0, "Finish", b"") for rank in range(RANKS)]
    lead.asked[0][2].set_result(answered([1]))
    assert answers[1].result(WAIT) == b"norm"
    until(lambda: lead.made()[1:] == [("Finish", [0, 2])])
    lead.asked[1][2].set_result(pb.AskResponse())
    until(lambda: lead.made()[2:] == [("Finish", [0, 2])])
    lead.asked[2][2].set_result(answered([0, 1], b"late"))
    assert [answers[rank].result(WAIT) for rank in (0, 2)] == [b"late", b"late"]


def test_each_rank_hears_its_own_error_and_all_hear_that_the_link_is_over(door: tuple[LeadQuestions, Lead]) -> None:
    questions, lead = door
    answers = [questions.ask(rank, 0, "Commit", b"") for rank in range(RANKS)]
    failure = pb.AskResponse.Answer(questions=[0], failure=to_failure(StepMismatchError("they differ")))
    lead.asked[0][2].set_result(pb.AskResponse(answers=[failure]))
    with pytest.raises(StepMismatchError, match="they differ"):
        answers[0].result(WAIT)
    until(lambda: len(lead.asked) == 2)
    lead.asked[1][2].set_exception(StoreError("optimizer 0 has died"))
    for each in answers[1:]:
        with pytest.raises(StoreError, match="optimizer 0 has died"):
            each.result(WAIT)


def test_what_is_asked_when_other_owners_take_over_is_asked_again_of_them(door: tuple[LeadQuestions, Lead]) -> None:
    questions, lead = door
    answers = [questions.ask(rank, 0, "Finish", b"") for rank in range(RANKS)]
    waits = questions.ask(0, 0, "Mean", b"")
    questions.close(EpochOverError("others have taken over"))
    for each in (*answers, waits, questions.ask(1, 0, "Mean", b"")):
        with pytest.raises(EpochOverError):
            each.result(WAIT)
    lead.asked[0][2].set_result(answered([0, 1, 2]))  # nobody hears it
    assert len(lead.asked) == 1


# ---- what a lead begins


def question(rank: int, life: int = 0, of: int | None = None) -> pb.AskRequest.Question:
    report = pb.FinishReport(rank=rank if of is None else of)
    return pb.AskRequest.Question(rank=rank, life=life, request=pb.FinishRequest(report=report).SerializeToString())


def begin(*each: pb.AskRequest.Question, method: str = "Finish") -> tuple[dict[int, Future[Any]], list[int]]:
    """What is begun, of ranks of which 3 has not attached; and the ranks of which it is."""
    begun: list[int] = []

    def start(rank: int, life: int, asked: Any) -> Future[Any]:
        begun.append(rank)
        if life:
            raise StoreClosedError("its life is over")
        return settled(asked)

    return begin_questions(pb.AskRequest(method=method, questions=each), lambda rank: rank != 3, start), begun


def test_a_question_is_what_the_rank_would_ask_itself() -> None:
    found, begun = begin(question(0), question(1, life=1), question(3), question(2, of=1), question(2))
    assert (begun, list(found)) == ([0, 1, 2], [0, 1, 3, 4])
    assert found[0].result().report.rank == 0
    for place, error in ((1, StoreClosedError), (3, HandshakeError)):
        with pytest.raises(error):
            found[place].result()
    damaged = pb.AskRequest.Question(rank=0, request=b"\xff")
    with pytest.raises(TransferError, match="rank 0 asks what is no Finish"):
        begin(damaged)[0][0].result()


@pytest.mark.parametrize("method", ["Leave", "Attach", "Ask", ""])
def test_nothing_else_is_asked_for_a_rank(method: str) -> None:
    with pytest.raises(StoreError, match=r"only Finish, Commit, .*Mean can be"):
        begin(question(0), method=method)


def test_answers_that_are_alike_are_packed_once() -> None:
    norm = pb.FinishResponse(norm=pb.Norm(step=1, total=2.0, finite=True))
    differ = [failed(StepMismatchError("they differ")) for _ in range(2)]
    begun = dict(enumerate([settled(norm), differ[0], settled(norm), differ[1], Future()]))
    found = answers_to(begun)
    assert [(list(each.questions), each.WhichOneof("result")) for each in found] == [
        ([0, 2], "response"),
        ([1, 3], "failure"),
    ]


def test_no_rank_asks_for_others() -> None:
    request = pb.AskRequest(method="Finish", questions=[question(0)])
    with serving(tls=OWN) as (server,):
        refused = refusal(server, of_rank(1), OWNER_SERVICE, "Ask", token_metadata(TOKEN), request)
        assert isinstance(refused, HandshakeError)
        assert "Ask was called" in str(refused)


# ---- ranks and a lead on another host


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a process has made each call of a step over gRPC."""
    made, ask = Counter[str](), OwnerLink.ask

    def counted(self: OwnerLink, method: str, *args: Any, **named: Any) -> Future[Any]:
        if method in ("Finish", "Commit", "Mean", "Ask", "Discard"):
            made[method] += 1
        return ask(self, method, *args, **named)

    monkeypatch.setattr(OwnerLink, "ask", counted)
    return made


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The door waits for the last rank on a slow machine, too."""
    monkeypatch.setattr("rayzero.store.host.lead_questions._PATIENCE_S", WAIT)


@contextmanager
def host(world_size: int = RANKS, **options: Any) -> Iterator[tuple[list[Rank], Stores]]:
    """Ranks of one host with a door; the owners that have shards are on others."""
    with over_grpc(world_size, 2, door=True, **options) as stores:
        yield start(stores, make_spec(world_size)), stores


def one_step(ranks: list[Rank], seed: int) -> None:
    take_step(ranks, [random_grads(ranks[0].spec, 10 * seed + rank.rank) for rank in ranks])


def lead_of(stores: Stores, rank: int) -> Any:
    return stores[rank].connection._lead  # type: ignore[attr-defined]


@needs_memory
@pytest.mark.usefixtures("patient")
def test_a_host_asks_once_for_all_its_ranks(calls: Counter[str]) -> None:
    with host() as (ranks, _):
        one_step(ranks, 0)
        assert calls == {"Ask": 1}, "the finishes"
        norms = [rank.ask_norm() for rank in ranks]
        assert {norm.result(WAIT).step for norm in norms} == {1}
        assert {each.result(WAIT).step for each in [rank.commit() for rank in ranks]} == {1}
        assert calls == {"Ask": 3}, "the finishes, and the commits"
        means = [rank.store.mean(MeanInput(values=(float(rank.rank),), weight=1.0)) for rank in ranks]
        assert {mean.result(WAIT) for mean in means} == {(1.0,)}
        assert calls == {"Ask": 4}


def test_nobody_waits_for_what_a_rank_asked_before_it_died() -> None:
    """Two ranks ask in one call, and one of them comes back: the other hears at once what it asked for."""
    repeats = Repeats()
    asked = pb.MeanRequest(rank=1, number=1)
    call = repeats.once(1, "Mean", asked, Future)
    repeats.end(1, StoreClosedError("rank 1 was replaced"))
    with pytest.raises(StoreClosedError, match="rank 1 was replaced"):
        call.result(0)
    again: Future[Any] = repeats.once(1, "Mean", asked, Future)
    assert not again.done()


@needs_memory
def test_a_link_that_breaks_is_open_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The door's link is cut while it waits for an answer: it asks again over the next one."""
    doors: list[Door] = []
    open_door = ServedModel.open_door
    monkeypatch.setattr(ServedModel, "open_door", lambda *asked: doors.append(open_door(*asked)) or doors[-1])
    with host() as (ranks, stores):
        one_step(ranks, 0)
        norms = [rank.ask_norm() for rank in ranks[:2]]
        until(lambda: lead_of(stores, 1).describe(WAIT).result(WAIT) == "rank 2 has not finished step 1")
        channel = doors[0]._links[0].channel()
        assert channel is not None
        channel.give_up()
        norms.append(ranks[2].ask_norm())
        assert len({norm.result(WAIT) for norm in norms}) == 1
