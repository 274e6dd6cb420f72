"""Which rank of a host speaks, and what the others hear of it: over its socket, without an owner."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from rayzero.config.zero import HostVoice
from rayzero.protocol.messages import ModelSpec
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.links.caller import Caller
from rayzero.store.host.links.owner_link import OwnerLink
from rayzero.store.host.publish_board import PublishBoard
from rayzero.store.rank.voice.participant import VoiceParticipant
from rayzero.store.shm.same_host import why_no_sharing

from .toy import WAIT, make_spec, until

pytestmark = pytest.mark.skipif(why_no_sharing() is not None, reason="no shared memory here")

RANKS = (4, 5, 6)
SPEC = make_spec(world_size=8)


class Link:
    """A link that is open, over which nobody answers."""

    def __init__(self, owner: int, rank: int) -> None:
        self.owner, self.caller = owner, Caller.rank(rank)
        self.asked: list[Any] = []

    def channel(self) -> Any:
        return self

    def ask(self, method: str, request: Any) -> Future[Any]:
        self.asked.append(request)
        return Future()

    @classmethod
    def to(cls, owners: set[int], rank: int) -> dict[int, Any]:
        return {owner: cls(owner, rank) for owner in owners}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def participant(
    stack: ExitStack, directory: Path | None, rank: int, setting: HostVoice = "always", **how: Any
) -> VoiceParticipant:
    said = {"key": f"secret of {directory}", "model": 0, "epoch": 0, "life": 0, "stall_timeout": WAIT} | how
    made = VoiceParticipant(setting, rank, said.pop("ranks", RANKS), directory, **said)
    stack.callback(made.join)
    stack.callback(made.close)
    return made


def published(shard: int, version: int) -> pb.NoticesResponse:
    return pb.NoticesResponse(published=[pb.NoticesResponse.Published(shard=shard, version=version, content=version)])


@pytest.mark.parametrize(
    ("setting", "ranks", "shares", "spec", "speaks"),
    [
        ("always", RANKS, True, SPEC, 4),
        ("always", (4,), True, SPEC, None),
        ("always", RANKS, False, SPEC, None),
        ("never", RANKS, True, SPEC, None),
        ("auto", RANKS, True, SPEC, None),
        ("auto", RANKS, True, make_spec(world_size=1024), 4),
    ],
)
def test_the_lowest_rank_speaks_where_a_voice_is_worth_it(
    setting: HostVoice,
    ranks: tuple[int, ...],
    shares: bool,
    spec: ModelSpec,
    speaks: int | None,
    tmp_path: Path,
    stack: ExitStack,
) -> None:
    alone = participant(stack, tmp_path if shares else None, 5, setting, ranks=ranks)
    assert alone.who_speaks(spec) == speaks


def test_without_owners_elsewhere_nobody_speaks(tmp_path: Path, stack: ExitStack) -> None:
    first = participant(stack, tmp_path, RANKS[0])
    assert first.open(SPEC, cast(OwnerLink, Link(0, 4)), {}, PublishBoard()) is None
    assert (first.speaker, first.line, first.notices) == (None, None, None)


def test_what_owners_elsewhere_publish_reaches_every_other_rank_once_told(tmp_path: Path, stack: ExitStack) -> None:
    """Owner 0 is on this host, and leads; owner 1 is elsewhere."""
    members = {rank: participant(stack, tmp_path, rank) for rank in RANKS}
    boards = {rank: PublishBoard() for rank in RANKS}
    links = {rank: Link.to({0, 1}, rank) for rank in RANKS}
    for rank, member in members.items():
        away = {1: links[rank][1]}
        assert member.open(SPEC, links[rank][0], away, boards[rank]) is None, "each asks a lead of this host itself"
    assert [rank for rank, member in members.items() if member.speaker is not None] == [4]
    for rank in (5, 6):
        until(lambda rank=rank: [request.muted for request in links[rank][1].asked] == [True])  # type: ignore[misc]
    members[4].pass_on(links[4][0], published(shard=0, version=3))
    members[4].pass_on(links[4][1], published(shard=1, version=3))
    for rank in (5, 6):
        boards[rank].when(1, [1], 3).result(WAIT)
        assert boards[rank].content([0], 3) is None, "an owner of this host tells every rank itself"
        members[rank].pass_on(links[rank][1], published(shard=2, version=3))
        assert boards[4].content([1], 3) is None, "a rank that does not speak passes nothing on"
    members[5].heard(links[5][1], published(shard=1, version=4))
    assert len(links[5][1].asked) == 1
    members[5].heard(links[5][1], pb.NoticesResponse(process=pb.Process(pid=1)))
    assert [request.number for request in links[5][1].asked] == [1, 2], "a stream that begins is not muted"
    members[4].close()
    until(lambda: [request.muted for request in links[6][1].asked] == [True, False])


def test_a_lead_elsewhere_is_asked_through_the_voice(tmp_path: Path, stack: ExitStack) -> None:
    members = [participant(stack, tmp_path, rank) for rank in RANKS]
    lines = []
    for rank, member in zip(RANKS, members, strict=True):
        links = Link.to({0}, rank)
        lines.append(member.open(SPEC, links[0], links, PublishBoard()))
    assert lines == [member.line for member in members]
    assert None not in lines


def test_a_rank_whose_place_is_taken_asks_itself(
    tmp_path: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (participant(stack, tmp_path, RANKS[0]) for _ in range(2))
    for member in (first, second):
        links = Link.to({0}, RANKS[0])
        member.open(SPEC, links[0], links, PublishBoard())
    assert first.speaker is not None
    assert second.speaker is None
    assert "rank 4 cannot speak for its host" in caplog.text
