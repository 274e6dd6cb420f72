"""One rank of a host asks the lead for all of them; whatever becomes of it, each rank has its answers."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, cast

import pytest

from rayzero.errors import HandshakeError, StallError, StepMismatchError, StoreError
from rayzero.protocol.messages import MeanInput, StepInputs
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.links.owner_link import OwnerLink
from rayzero.store.owner.calls.spoken import Voices, answers_to, begin_said
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.rank.remote import RemoteConnection
from rayzero.store.rank.voice import line as voice_line
from rayzero.store.rank.voice import speaker as speaking
from rayzero.store.rank.voice.line import ANSWER, BEAT, RESPONSE, UNHEARD, UnheardError, VoiceLine, open_socket
from rayzero.store.rank.voice.speaker import Round, Voice
from rayzero.store.shm.signals import available
from rayzero.store.wire.rpc import STORE_SERVICE, life_metadata, token_metadata

from .stores import TOKEN, Stores, over_grpc
from .test_grpc import connected, serving
from .test_tls import OWN, of_rank, refusal
from .toy import WAIT, PlainAdamW, Rank, equal, make_spec, masters, random_grads, start, take_step, until

pytestmark = pytest.mark.skipif(available() is not None, reason="no memory that ranks share here")

RANKS = 3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often ranks have made each call of a step over gRPC."""
    made, ask = Counter[str](), OwnerLink.ask

    def counted(self: OwnerLink, method: str, *args: Any) -> Future[Any]:
        if method in ("Finish", "Commit", "Mean", "Speak", "Discard"):
            made[method] += 1
        return ask(self, method, *args)

    monkeypatch.setattr(OwnerLink, "ask", counted)
    return made


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gives up waiting on a slow machine."""
    monkeypatch.setattr(speaking, "_PATIENCE_S", WAIT)
    monkeypatch.setattr(voice_line, "_SILENT_S", WAIT)


@contextmanager
def host(world_size: int = RANKS, **options: Any) -> Iterator[tuple[list[Rank], Stores]]:
    """Ranks of one host with a voice, whose owners are elsewhere."""
    with over_grpc(world_size, 2, host_voice="always", **options) as stores:
        yield start(stores, make_spec(world_size)), stores


def voice_of(stores: Stores) -> Voice:
    found: Voice = stores[0].connection._voice.speaker  # type: ignore[attr-defined]
    return found


def one_step(ranks: list[Rank], seed: int) -> None:
    take_step(ranks, [random_grads(ranks[0].spec, 10 * seed + rank.rank) for rank in ranks])


def in_two_calls(ranks: list[Rank]) -> None:
    """A step in which ranks ask for the norm first."""
    norms = [rank.ask_norm() for rank in ranks]
    assert {norm.result(WAIT).step for norm in norms} == {ranks[0].step}
    step = ranks[0].step
    assert {each.result(WAIT).step for each in [rank.commit() for rank in ranks]} == {step}


# ---- what it saves


@pytest.mark.usefixtures("patient")
def test_a_host_asks_once_for_all_its_ranks(calls: Counter[str]) -> None:
    with host() as (ranks, _):
        one_step(ranks, 0)
        assert calls == {"Speak": 1}, "the finishes"
        in_two_calls(ranks)
        assert calls == {"Speak": 3}, "the finishes, and the commits"
        means = [rank.store.mean(MeanInput(values=(float(rank.rank),), weight=1.0)) for rank in ranks]
        assert {mean.result(WAIT) for mean in means} == {(1.0,)}
        assert calls == {"Speak": 4}


def test_weights_are_those_of_plain_training() -> None:
    with host() as (ranks, _):
        plain = PlainAdamW(ranks[0].spec)
        grads = [random_grads(ranks[0].spec, 5) for _ in ranks]
        take_step(ranks, grads)
        plain.step(grads)
        found = masters(ranks[2])
        assert all(found[name].allclose(value, atol=1e-6) for name, value in plain.values.items())


def test_a_rank_that_is_alone_on_its_host_asks_itself(calls: Counter[str]) -> None:
    with host(world_size=1) as (ranks, _):
        one_step(ranks, 0)
        assert calls == {"Finish": 1}


# ---- ranks that come late, or ask something else


def test_the_lead_knows_soon_which_rank_of_a_host_is_late() -> None:
    with host() as (ranks, stores):
        norms = [rank.ask_norm() for rank in ranks[:2]]
        lead = stores[1].connection._lead  # type: ignore[attr-defined]
        until(lambda: lead.describe(WAIT).result(WAIT) == "rank 2 has not finished step 0")
        assert not any(norm.done() for norm in norms)
        norms.append(ranks[2].ask_norm())
        assert len({norm.result(WAIT) for norm in norms}) == 1


def test_a_rank_that_stands_still_is_named() -> None:
    with host(stall_timeout=3.0) as (ranks, _):
        waits = ranks[1].ask_norm()
        with pytest.raises(StallError, match=r"rank 1 waits .*ranks \[0, 2\] have not finished step 0"):
            waits.result(WAIT)


def test_ranks_that_ask_for_different_things_hear_it() -> None:
    with host() as (ranks, _):
        other = StepInputs(edits=(), hyper=({**ranks[0].spec.hyper[0], "lr": 0.5},))
        waits = [ranks[0].finish(), ranks[1].store.finish(ranks[1].report(), other)]
        for each in waits:
            with pytest.raises(StepMismatchError, match="ranks 0 and 1 sent different inputs"):
                each.result(WAIT)


def test_discards_go_by_themselves_and_the_next_attempt_together(calls: Counter[str]) -> None:
    with host() as (ranks, _):
        for norm in [rank.ask_norm() for rank in ranks]:
            norm.result(WAIT)
        for done in [rank.discard() for rank in ranks]:
            done.result(WAIT)
        one_step(ranks, 1)
        assert calls["Discard"] == RANKS
        assert masters(ranks[0])


def test_when_questions_leave() -> None:
    def question(rank: int) -> Any:
        return speaking._Question(speaking._Guest(cast(Any, None), rank), 1, b"")

    asked, everyone = Round(), {0, 1, 2}
    assert not asked.leaves(set(), 0.0, 0.5), "there is nothing to say"
    asked.add(question(0), 1.0)
    asked.add(question(2), 1.4)
    assert not asked.leaves(everyone, 1.49, 0.5)
    assert asked.leaves(everyone, 1.5, 0.5), "the first one has waited for half a second"
    assert asked.leaves({0, 2}, 1.4, 0.5), "rank 1 is not there"
    asked.waiting = []
    assert not asked.leaves(everyone, 9.0, 0.5)
    asked.add(question(1), 9.0)
    assert asked.leaves(everyone, 9.0, 0.5), "the others have asked before"


# ---- a voice that dies, hangs, or is not there


def test_ranks_whose_voice_ends_ask_themselves(calls: Counter[str]) -> None:
    with host() as (ranks, stores):
        one_step(ranks, 0)
        norms = [rank.ask_norm() for rank in ranks[1:]]
        voice_of(stores).close()
        norms.append(ranks[0].ask_norm())
        assert len({norm.result(WAIT) for norm in norms}) == 1
        assert calls["Finish"] == RANKS
        for decision in [rank.commit() for rank in ranks]:
            decision.result(WAIT)
        one_step(ranks, 2)
        assert equal(masters(ranks[1]), masters(ranks[2]))


def test_ranks_whose_voice_hangs_ask_themselves(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes everything in and says nothing more, as a process that is stopped."""
    with host() as (ranks, stores):
        one_step(ranks, 0)
        monkeypatch.setattr(Voice, "_speak", lambda self: None)
        monkeypatch.setattr(Voice, "_beat", lambda self: None)
        norms = [rank.ask_norm() for rank in ranks[:2]]
        lead = stores[1].connection._lead  # type: ignore[attr-defined]
        until(lambda: lead.describe(WAIT).result(WAIT) == "rank 2 has not finished step 1")
        norms.append(ranks[2].ask_norm())
        assert len({norm.result(WAIT) for norm in norms}) == 1
        assert calls["Finish"] == RANKS


def test_answers_that_a_voice_does_not_pass_on_come_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with host() as (ranks, _):
        one_step(ranks, 0)
        monkeypatch.setattr(Voice, "_reply", lambda *_: None)
        monkeypatch.setattr(voice_line, "LONGEST_S", 0.5)  # the voice says that it is there
        norms = [rank.ask_norm() for rank in ranks]
        assert len({norm.result(WAIT) for norm in norms}) == 1


def test_a_voice_that_fails_lets_the_ranks_ask_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    with host() as (ranks, _):
        monkeypatch.setattr(Voice, "_speak", lambda self: 1 / 0)
        one_step(ranks, 0)
        assert masters(ranks[0])


def test_without_a_voice_ranks_ask_themselves(calls: Counter[str]) -> None:
    with over_grpc(2, 1, host_voice="always") as stores:
        stores[1].connection._voice._ranks = (1, 5)  # type: ignore[attr-defined]  # it takes rank 1 for the voice
        ranks = start(stores, make_spec(2))
        voice: Voice = stores[1].connection._voice.speaker  # type: ignore[attr-defined]
        voice.close()
        voice_of(stores).close()
        one_step(ranks, 0)
        assert calls == {"Finish": 2}


def test_a_rank_that_dies_takes_nothing_along() -> None:
    """What its last life has asked of the voice does not count for the next one."""
    with over_grpc(2, 1, host_voice="always") as stores:
        ranks = start(stores, make_spec(2))
        one_step(ranks, 0)
        stores[1].connection._voice.line._line.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        until(lambda: len(voice_of(stores)._guests) == 1)
        one_step(ranks, 1)
        assert len(voice_of(stores)._guests) == 2, "its line is open again"


def test_a_link_that_breaks_is_open_again() -> None:
    """The voice's link is cut while it waits for an answer: it asks again over the next one."""
    with host() as (ranks, stores):
        one_step(ranks, 0)
        norms = [rank.ask_norm() for rank in ranks[:2]]
        time.sleep(0.6)  # they have left
        link = stores[0].connection._links[0]  # type: ignore[attr-defined]
        link.channel().give_up()
        norms.append(ranks[2].ask_norm())
        assert len({norm.result(WAIT) for norm in norms}) == 1


# ---- the line


@contextmanager
def line_to(name: bytes) -> Iterator[tuple[VoiceLine, socket.socket]]:
    """A line, and what listens at its other end."""
    door = open_socket()
    door.bind(name)
    door.listen(1)
    line = VoiceLine(name, 3, 1)
    try:
        yield line, door
    finally:
        line.close()
        line.join()
        door.close()


def test_a_line_says_who_asks_and_hears_the_answer() -> None:
    with line_to(b"\0rayzero-test-line") as (line, door):
        first, second = line.ask("Finish", 7, b"abc"), line.ask("Mean", 8, b"")
        there, _ = door.accept()
        assert voice_line.HELLO.unpack(there.recv(100)) == (3, 1)
        asked = there.recv(100)
        assert (voice_line.QUESTION.unpack_from(asked), asked[voice_line.QUESTION.size :]) == ((1, 7, 0), b"abc")
        assert voice_line.QUESTION.unpack(there.recv(100)) == (2, 8, 2)
        there.send(ANSWER.pack(BEAT, RESPONSE))
        there.send(ANSWER.pack(2, UNHEARD) + b"no")
        there.send(ANSWER.pack(1, RESPONSE) + b"xyz")
        assert first.result(WAIT) == b"xyz"
        with pytest.raises(UnheardError, match="rank 3: its host's voice says: no"):
            second.result(WAIT)
        there.close()


def test_no_answer_is_heard_after_the_questions_were_dropped() -> None:
    """The lead has died: what a rank tells its successor must not be outdated by an answer that was on its way."""
    with line_to(b"\0rayzero-test-drop") as (line, door):
        asked = line.ask("Finish", 7, b"")
        there, _ = door.accept()
        line.drop()
        there.send(ANSWER.pack(1, RESPONSE) + b"late")
        with pytest.raises(UnheardError):
            asked.result(WAIT)
        again = line.ask("Finish", 7, b"")
        there.send(ANSWER.pack(2, RESPONSE) + b"in time")
        assert again.result(WAIT) == b"in time"
        there.close()


def test_a_question_that_is_too_long_is_not_carried() -> None:
    with line_to(b"\0rayzero-test-long") as (line, _), pytest.raises(UnheardError, match="Message too long"):
        line.ask("Mean", 1, bytes(voice_line.MESSAGE_BYTES)).result(WAIT)


def test_processes_of_other_users_are_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voice_line, "is_of_this_user", lambda peer: False)  # first: the line looks for its voice itself
    with line_to(b"\0rayzero-test-user") as (line, _), pytest.raises(UnheardError, match="another user"):
        line.ask("Finish", 1, b"").result(WAIT)


# ---- who may speak for whom


def said(rank: int, life: int = 0, of: int | None = None) -> pb.SpeakRequest.Said:
    request = pb.FinishRequest(report=pb.FinishReport(rank=rank if of is None else of))
    return pb.SpeakRequest.Said(rank=rank, life=life, request=request.SerializeToString())


def test_a_voice_is_heard_for_ranks_that_have_named_it() -> None:
    voices, begun = Voices(), []
    voices.name(0, 0, 0)
    voices.name(1, 2, 0)
    voices.name(2, 0, 1)

    def begin(rank: int, request: Any) -> Future[Any]:
        begun.append(rank)
        return Future()

    def heard(speaker: int, *each: pb.SpeakRequest.Said, method: str = "Finish") -> list[bool]:
        found = begin_said(pb.SpeakRequest(rank=speaker, method=method, said=each), voices, begin)
        return [not isinstance(answer, str) for answer in found]

    assert heard(0, said(0), said(1, 2), said(1, 1), said(1, 3), said(2), said(3)) == [True, True, *[False] * 4]
    assert heard(1, said(0), said(1, 2), said(2)) == [False, False, True]
    voices.name(1, 3, None)
    assert heard(0, said(1, 2), said(1, 3)) == [False, False]
    assert begun == [0, 1, 2]
    with pytest.raises(HandshakeError, match="Finish of rank 1 was sent as that of rank 0"):
        heard(0, said(0, of=1))
    for method in ("Discard", "Leave", "Speak", ""):
        with pytest.raises(StoreError, match="only Finish, Commit, Mean can"):
            heard(0, said(0), method=method)
    assert begun == [0, 1, 2]


def test_a_voice_is_not_heard_for_a_life_that_is_over() -> None:
    spec = make_spec(2)
    options: dict[str, Any] = {"share": SHARED_MEMORY, "host_voice": "always", "ranks_here": (0, 1)}
    with serving(replaces_ranks=True) as (server,), connected([server], 2, **options) as stores:
        for store in stores:
            store.attach(spec)
        service = cast(Any, server)._models.known(0)
        assert service.model.voices.doubt(0, 1, 0) is None
        server.lose(1, 1)
        assert service.model.voices.doubt(0, 1, 0) == "life 0 of rank 1 has not named rank 0 as its voice"
        assert service.model.voices.doubt(0, 0, 0) is None


def test_a_voice_asks_the_successor_of_a_lead_nothing_that_it_had_asked(calls: Counter[str]) -> None:
    with host() as (ranks, stores):
        norms = [rank.ask_norm() for rank in ranks[:2]]
        until(lambda: len(voice_of(stores)._under_way) == 1)
        voice_of(stores).drop()
        until(lambda: calls["Finish"] == 2)
        assert not voice_of(stores)._under_way
        norms.append(ranks[2].ask_norm())
        assert len({norm.result(WAIT) for norm in norms}) == 1


def test_answers_that_are_alike_are_packed_once() -> None:
    norm = pb.FinishResponse(norm=pb.Norm(step=1, total=2.0, finite=True))
    asked: list[Future[Any] | str] = ["not heard"]
    for _ in range(2):
        answer = Future[Any]()
        answer.set_result(norm)
        failed = Future[Any]()
        failed.set_exception(StepMismatchError("they differ"))
        asked += [answer, failed]
    found = answers_to([*asked, Future()])
    assert [(list(each.said), each.WhichOneof("result")) for each in found] == [
        ([0], "unheard"),
        ([1, 3], "response"),
        ([2, 4], "failure"),
    ]


def test_a_rank_speaks_only_as_itself_and_for_who_has_named_it() -> None:
    """Over TLS: with a certificate of rank 1, nobody can speak as the voice, which is rank 0."""
    spec = make_spec(2)
    with serving(tls=OWN) as (server,), connected([server], 1, tls=of_rank(0)) as (first,):
        second = RankStore(RemoteConnection(1, [server.address], token=TOKEN, tls=of_rank(1)))
        try:
            first.attach(spec)
            second.attach(spec)
            for shown, metadata_rank, speaker, error in (
                (of_rank(1), 0, 0, "Speak was called by rank 0 with a certificate of rank-1.rayzero"),
                (of_rank(1), 1, 0, "Speak of rank 0 was sent by rank 1"),
            ):
                request = pb.SpeakRequest(rank=speaker, method="Finish", said=[said(0)])
                metadata = (*token_metadata(TOKEN), *life_metadata(metadata_rank, 0))
                refused = refusal(server, shown, STORE_SERVICE, "Speak", metadata, request)
                assert isinstance(refused, HandshakeError)
                assert error in str(refused)
        finally:
            second.close()
