"""An owner elsewhere tells one rank of a host what it publishes; whatever becomes of that one, each rank hears all."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, cast

import pytest
from clock import Clock

from rayzero.concurrency.futures import settled
from rayzero.errors import RayZeroError, StoreError, TransferError
from rayzero.protocol.messages import Published
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.links.caller import Caller
from rayzero.store.host.links.owner_link import OwnerLink
from rayzero.store.host.publish_board import PublishBoard
from rayzero.store.owner.publish_streams import PublishStream, PublishStreams
from rayzero.store.rank.remote import RemoteConnection
from rayzero.store.rank.voice import line as voice_line
from rayzero.store.rank.voice import notices as voice_notices
from rayzero.store.rank.voice.notices import HostNotices
from rayzero.store.rank.voice.speaker import Voice
from rayzero.store.shm.signals import available
from rayzero.store.wire import translate

from .stores import Stores, over_grpc
from .test_voice import host, one_step, voice_of
from .toy import WAIT, equal, make_spec, masters, start, until

on_a_host = pytest.mark.skipif(available() is not None, reason="no memory that ranks share here")


def connection(stores: Stores, rank: int) -> Any:
    return cast(Any, stores[rank]).connection


def muted(stores: Stores, rank: int) -> set[int]:
    """The owners whose streams a rank has asked to be silent."""
    return set(connection(stores, rank)._voice.notices._muted)


STREAMS: dict[tuple[int, int], PublishStream] = {}  # by owner (its ``PublishStreams``) and rank


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep every owner's newest stream to each rank in ``STREAMS``."""
    open_one = PublishStreams.open

    def opened(self: PublishStreams, listener: str) -> PublishStream:
        stream = open_one(self, listener)
        if listener.startswith("rank "):
            STREAMS[id(self), int(listener.removeprefix("rank "))] = stream
        return stream

    monkeypatch.setattr(PublishStreams, "open", opened)
    yield
    STREAMS.clear()


def all_muted(stores: Stores, owners: set[int]) -> None:
    """Wait until the voice tells every other rank what ``owners`` publish, and nothing of any other owner."""

    def are_silent() -> bool:
        silent = Counter(rank for (_, rank), stream in list(STREAMS.items()) if stream._muted)
        return silent == dict.fromkeys(range(1, len(stores)), len(owners))

    until(lambda: all(muted(stores, rank) == owners for rank in range(1, len(stores))) and are_silent())


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """How often each rank was told of a version of some shard by its owner itself. Nobody takes the voice for silent on
    a slow machine."""
    heard, hear = Counter[tuple[int, int]](), RemoteConnection._hear

    def counted(self: RemoteConnection, link: OwnerLink, notice: pb.NoticesResponse) -> None:
        heard.update((self.rank, each.version) for each in notice.published)
        hear(self, link, notice)

    monkeypatch.setattr(RemoteConnection, "_hear", counted)
    monkeypatch.setattr(voice_line, "_SILENT_S", WAIT)
    return heard


# ---- what it saves


@on_a_host
def test_an_owner_tells_a_host_of_eight_ranks_once(told: Counter[tuple[int, int]]) -> None:
    with over_grpc(8, 2, host_voice="always") as stores:
        ranks = start(stores, make_spec(8))
        all_muted(stores, {0, 1})
        one_step(ranks, 0)
        shards = len(ranks[0].spec.layout.shards)
        values = [masters(rank) for rank in ranks]
        assert all(equal(values[0], each) for each in values)
        assert {rank: count for (rank, version), count in told.items() if version == 1} == {0: shards}


@on_a_host
def test_only_owners_elsewhere_are_muted(told: Counter[tuple[int, int]]) -> None:
    """Also where the lead is on this host, and nobody needs to speak for others."""
    with over_grpc(2, 2, host_voice="always", shares=lambda owner: owner == 0) as stores:
        ranks = start(stores, make_spec(2))
        all_muted(stores, {1})
        one_step(ranks, 0)
        assert equal(masters(ranks[0]), masters(ranks[1]))
        assert {rank for rank, version in told if version == 1} == {0}


# ---- a voice that dies, stops, leaves, or hears nothing


@on_a_host
def test_ranks_whose_voice_leaves_hear_owners_themselves(told: Counter[tuple[int, int]]) -> None:
    with host() as (ranks, stores):
        all_muted(stores, {0, 1})
        voice_of(stores).close()
        until(lambda: not muted(stores, 1) and not muted(stores, 2))
        one_step(ranks, 0)
        until(lambda: {rank for rank, version in told if version == 1} == {0, 1, 2})
        assert equal(masters(ranks[1]), masters(ranks[2]))


@on_a_host
@pytest.mark.parametrize("says", ["nothing", "that it is there"])
def test_what_a_voice_does_not_pass_on_comes_from_the_owner(says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has heard what was published. It is stopped then, or only seems to hear it."""
    with host() as (ranks, stores):
        all_muted(stores, {0, 1})
        monkeypatch.setattr(Voice, "pass_on", lambda *_: None)
        if says == "nothing":
            monkeypatch.setattr(Voice, "_beat", lambda self: None)
        else:
            monkeypatch.setattr(voice_notices, "LONGEST_S", 0.5)
        one_step(ranks, 0)
        began = time.monotonic()
        found = masters(ranks[2])
        assert time.monotonic() - began < voice_line._SILENT_S + 4.0  # a second, and what a busy machine takes
        assert equal(found, masters(ranks[0]))


@on_a_host
def test_a_voice_whose_link_to_one_owner_is_down_passes_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with host() as (ranks, stores):
        all_muted(stores, {0, 1})
        cut, channel, pass_on = connection(stores, 0)._links[1], OwnerLink.channel, Voice.pass_on
        monkeypatch.setattr(OwnerLink, "channel", lambda self: None if self is cut else channel(self))
        monkeypatch.setattr(
            Voice, "pass_on", lambda self, owner, published: None if owner == 1 else pass_on(self, owner, published)
        )
        all_muted(stores, {0})
        one_step(ranks, 0)
        assert equal(masters(ranks[1]), masters(ranks[0]))
        monkeypatch.undo()
        all_muted(stores, {0, 1})


@on_a_host
def test_a_rank_whose_link_is_open_again_mutes_the_new_stream(told: Counter[tuple[int, int]]) -> None:
    with host() as (ranks, stores):
        all_muted(stores, {0, 1})
        link, notices = connection(stores, 1)._links[0], connection(stores, 1)._voice.notices
        opened, asked = link._openings, notices._numbers[0]
        link.channel().give_up()
        until(lambda: link._openings > opened and notices._numbers[0] > asked)
        all_muted(stores, {0, 1})
        one_step(ranks, 0)
        assert equal(masters(ranks[1]), masters(ranks[0]))
        assert {rank for rank, version in told if version == 1} == {0}


@on_a_host
def test_a_rank_that_cannot_take_a_notice_asks_for_itself(told: Counter[tuple[int, int]]) -> None:
    with host() as (ranks, stores):
        all_muted(stores, {0, 1})
        guests = voice_of(stores)._guests
        line = next(guest.line for guest in guests.values() if guest.rank == 2)
        voice_of(stores)._send(next(guest for guest in guests.values() if guest.rank == 2), bytes(1 << 20))
        until(lambda: all(guest.line is not line for guest in list(guests.values())))
        all_muted(stores, {0, 1})  # over its next line
        one_step(ranks, 0)
        assert equal(masters(ranks[2]), masters(ranks[0]))


# ---- an owner's stream


def news(stream: PublishStream) -> tuple[list[Published], RayZeroError | None] | None:
    """What a stream says now; None: nothing."""
    if not stream._news.is_set():
        return None
    try:
        stream.next().send(None)
    except StopIteration as done:
        published, error = done.value
        return list(published), error
    raise AssertionError("it waits although there is news")


class Now:
    """An event loop that runs everything at once."""

    def call_soon_threadsafe(self, call: Any, *arguments: Any) -> None:
        call(*arguments)


def v(version: int, content: int | None = None, shard: int = 0) -> Published:
    return Published(shard, version, version if content is None else content)


def test_a_muted_stream_says_everything_once_more_and_then_nothing() -> None:
    streams = PublishStreams(cast(Any, Now()))
    streams.publish([v(0), v(0, shard=1)])
    stream = streams.open("rank 3")
    assert news(stream) == ([v(0), v(0, shard=1)], None)
    streams.publish([v(1)])
    streams.mute("rank 3", 1, muted=True)
    assert news(stream) == ([v(1), v(0, shard=1)], None)
    streams.publish([v(2)])
    assert news(stream) is None
    streams.mute("rank 3", 3, muted=False)
    assert news(stream) == ([v(2), v(0, shard=1)], None)
    streams.mute("rank 3", 2, muted=True)  # it has come late
    assert news(stream) is None
    streams.publish([v(3)])
    assert news(stream) == ([v(3)], None)


def test_a_new_stream_is_not_muted_and_the_end_of_a_run_is_told_to_all() -> None:
    streams = PublishStreams(cast(Any, Now()))
    old = streams.open("rank 3")
    streams.mute("rank 3", 1, muted=True)
    new = streams.open("rank 3")
    streams.close(old)
    streams.publish([v(0)])
    assert news(new) == ([v(0)], None)
    streams.mute("rank 3", 2, muted=True)
    assert news(new) == ([v(0)], None)
    streams.publish([v(1)])
    streams.abort(StoreError("it is over"))
    published, error = news(new) or ([], None)
    assert (published, str(error)) == ([v(1)], "it is over")
    streams.close(new)
    streams.mute("rank 3", 3, muted=True)  # of a rank whose link has just broken


def test_a_rank_has_one_stream() -> None:
    """Each holds a word of every shard, and a rank could open any number of them."""
    streams = PublishStreams(cast(Any, Now()))
    old, others = streams.open("rank 3"), streams.open("rank 4")
    new = streams.open("rank 3")
    streams.publish([v(0)])
    with pytest.raises(TransferError, match="rank 3 has opened a newer stream of notices"):
        news(old)
    streams.close(old)
    assert news(new) == news(others) == ([v(0)], None)


def test_what_comes_late_from_another_one_changes_nothing() -> None:
    board = PublishBoard()
    board.publish([v(5, content=5)])
    board.publish([v(5, content=2), v(4)])  # before a write changed the shard, and of the version before
    assert board.content([0], 5) == 5
    assert board.are_at([0], 5)


def test_a_board_knows_who_is_waited_for() -> None:
    board = PublishBoard()
    board.publish([v(1)])
    board.when(0, [0], 1)
    waits = board.when(1, [1], 1)
    assert board.waited_for(-1.0) == {1}
    assert board.waited_for(60.0) == set()
    board.publish([v(1, shard=1)])
    assert waits.done()
    assert board.waited_for(-1.0) == set()


class SlowSteps:
    """A board whose rank waits for owner 0 for some seconds in each step; and the link to it, which counts requests."""

    caller = Caller.rank(1)

    def __init__(self, clock: Clock) -> None:
        self._clock, self._since = clock, clock.now
        self.muted: list[bool] = []

    def ask(self, method: str, request: pb.MuteRequest) -> None:
        self.muted.append(request.muted)

    def waited_for(self, at_least_s: float) -> set[int]:
        return {0} if self._clock.now - self._since > at_least_s else set()

    def steps(self, ear: HostNotices, count: int, wait_s: int) -> None:
        for _ in range(count):
            self._since = self._clock.now
            for _ in range(4 * wait_s):
                self._clock.now += voice_line.BEAT_S
                ear.follow(frozenset([0]))
            self._since = self._clock.now  # it is published


def test_a_rank_whose_steps_are_slow_asks_an_owner_once_to_go_on() -> None:
    clock = Clock()
    slow = SlowSteps(clock)
    ear = HostNotices({0: cast(Any, slow)}, cast(Any, slow), clock=clock)
    slow.steps(ear, 20, 29)
    assert slow.muted == [True], "a voice is there"
    slow.steps(ear, 20, 40)
    assert slow.muted == [True, False]
    slow.steps(ear, 20, 29)
    assert slow.muted == [True, False, True], "some minutes later"


# ---- every order


class Network:
    """One owner with two ranks of a host, of which rank 0 is the voice. Whatever is on its way is here, and moves only
    when it is told to; requests overtake each other."""

    caller = Caller.rank(1)  # as an OwnerLink

    def __init__(self) -> None:
        self.owner, self.board = PublishStreams(cast(Any, Now())), PublishBoard()
        self.ear = HostNotices({0: cast(Any, self)}, self.board)
        self.requests: list[Any] = []
        self.line: list[Any] | None = None  # from the voice to the rank
        self.streams: dict[int, PublishStream | None] = {0: self.owner.open("rank 0"), 1: self.owner.open("rank 1")}
        self.version = -1

    def ask(self, method: str, request: pb.MuteRequest) -> Future[None]:
        assert method == "Mute"
        self.requests.append(request)
        return settled(None)

    # ---- what may happen

    def publish(self) -> None:
        self.version += 1
        self.owner.publish([v(self.version)])

    def request_arrives(self, draws: random.Random) -> None:
        if self.requests and self.streams[1] is not None:
            request = self.requests.pop(draws.randrange(len(self.requests)))
            self.owner.mute("rank 1", request.number, muted=request.muted)
            if draws.random() < 0.2:  # its answer is lost
                self.requests.append(request)

    def notice_arrives(self, rank: int) -> None:
        stream = self.streams[rank]
        found = None if stream is None else news(stream)
        if found is not None and rank == 1:
            self.board.publish(found[0])
        elif found is not None and self.line is not None:
            told = [pb.NoticesResponse.Published(shard=e.shard, version=e.version, content=e.content) for e in found[0]]
            self.line.append(pb.NoticesResponse(published=told).SerializeToString())

    def breaks(self, rank: int) -> None:
        if (stream := self.streams[rank]) is not None:
            self.owner.close(stream)
            self.streams[rank] = None

    def opens(self, rank: int) -> None:
        if self.streams[rank] is None:
            self.streams[rank] = self.owner.open(f"rank {rank}")
            self.notice_arrives(rank)
            if rank == 1:
                self.ear.reopened(0)

    def beats(self) -> None:
        if self.line is not None:
            self.line.append(frozenset() if self.streams[0] is None else frozenset([0]))

    def is_heard(self) -> None:
        if self.line:
            message = self.line.pop(0)
            if isinstance(message, bytes):
                self.ear.notice(0, message)
            else:
                self.ear.follow(message)

    def is_silent(self) -> None:
        self.ear.follow(frozenset())

    def dies(self) -> None:
        if self.line is not None:
            self.line = None
            self.ear.follow(frozenset())

    def comes_back(self) -> None:
        self.line = [] if self.line is None else self.line

    def settles(self, draws: random.Random) -> None:
        """All that is on its way arrives, and a beat or a second of silence after it."""
        for _ in range(3):
            self.opens(0)
            self.opens(1)
            self.beats() if self.line is not None else self.is_silent()
            for rank in (0, 1):
                self.notice_arrives(rank)
            while self.line:
                self.is_heard()
            while self.requests:
                self.request_arrives(draws)
            self.notice_arrives(1)


def test_no_order_of_events_loses_a_publication() -> None:
    muted_at_the_end = 0
    for seed in range(3000):
        draws, network = random.Random(seed), Network()
        moves = [
            network.publish,
            lambda: network.request_arrives(draws),  # noqa: B023
            lambda: network.notice_arrives(0),  # noqa: B023
            lambda: network.notice_arrives(1),  # noqa: B023
            lambda: network.breaks(draws.randrange(2)),  # noqa: B023
            lambda: network.opens(draws.randrange(2)),  # noqa: B023
            network.beats,
            network.is_heard,
            network.is_silent,
            network.dies,
            network.comes_back,
        ]
        weights = [draws.random() for _ in moves]
        for move in draws.choices(moves, weights, k=40):
            move()
        for _ in range(2):  # the second one comes when no request is on its way
            network.publish()
            network.settles(draws)
            assert network.board.are_at([0], network.version), f"seed {seed}"
        muted_at_the_end += network.line is not None and bool(network.ear._muted)
    assert muted_at_the_end > 300, "the voice is of use in the end"


def test_notices_are_the_same_on_both_ways() -> None:
    told = pb.NoticesResponse(published=[pb.NoticesResponse.Published(shard=2, version=7, content=3)])
    assert translate.published_from_pb(told) == [Published(2, 7, 3)]
