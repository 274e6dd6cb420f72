"""Calls between processes of one host, over lines in shared memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from forked import forked

from rayzero.errors import RayZeroError, StepMismatchError, StoreError
from rayzero.slabs.sweep import list_slabs
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.links.caller import Caller
from rayzero.store.host.links.channel import BrokenLinkError, NoAnswerError
from rayzero.store.host.links.line_channel import LineChannel
from rayzero.store.owner.entrances.lobby import CallsInMemory
from rayzero.store.shm.lines.line import QUESTION_BYTES, Line, Lobby
from rayzero.store.shm.mailbox import SLOTS
from rayzero.store.shm.signals import available
from rayzero.store.shm.words import key_digest
from rayzero.store.wire.rpc import LIFE_KEY, LinkNumber, caller_of, life_metadata, token_metadata
from rayzero.telemetry.recorder import MemoryRecorder
from store.toy import WAIT

pytestmark = pytest.mark.skipif(available() is not None, reason="no signals between processes here")

ADDRESS, TOKEN = "127.0.0.1:4321", "the token of these tests"


class Calls:
    """Answers calls as a model's handlers do: after a gate, if there is one."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.ended = threading.Event()  # a call was cancelled
        self.answers: dict[str, Callable[[Any, Any], Any]] = {}
        self.gone: list[RayZeroError] = []  # raised by Notices

    async def answer(self, service: str, method: str, request: Any, context: Any) -> Any:
        try:
            if method == "Notices":
                await context.write(pb.NoticesResponse(process=pb.Process(pid=17)))
                while not self.gone:
                    await asyncio.sleep(0.01)
                raise self.gone[0]
            self.asked.append((service, method, request, context))
            return await self.answers[method](request, context)
        except asyncio.CancelledError:
            self.ended.set()
            raise


@contextmanager
def lobby(directory: Path, calls: Calls) -> Iterator[CallsInMemory]:
    async def find(model: int, epoch: int) -> Any:
        return calls

    served = CallsInMemory(directory, ADDRESS, TOKEN, "lineage", find, MemoryRecorder())
    try:
        yield served
    finally:
        served.close(2.0)


def channel_to(directory: Path, token: str = TOKEN, life: int = 0) -> LineChannel:
    found = Lobby.find(directory, ADDRESS, token)
    assert found is not None
    metadata = (*token_metadata(token, 3, 0), *life_metadata(5, life))
    return LineChannel(Caller.rank(5), "optimizer 0", found, LinkNumber("rank 5", 1), metadata, token)


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def channel(slab_dir: Path, calls: Calls) -> Iterator[LineChannel]:
    with lobby(slab_dir, calls), closing(channel_to(slab_dir)) as made:
        yield made


async def described(request: Any, context: Any) -> pb.DescribeResponse:
    return pb.DescribeResponse(text=f"shard {request.shard}")


def test_a_call_has_what_one_over_grpc_has(channel: LineChannel, calls: Calls) -> None:
    calls.answers["Describe"] = described
    answer = channel.answer(channel.start("Describe", pb.DescribeRequest(shard=7), WAIT))
    assert answer.text == "shard 7"
    ((service, _, _, context),) = calls.asked
    assert service == "rayzero.v1.StoreService"
    assert caller_of(context.invocation_metadata()) == (5, 0)
    assert dict(context.invocation_metadata())["rayzero-model"] == "3"
    assert "rayzero-token" not in dict(context.invocation_metadata())
    assert next(channel.messages(channel.notices)).process.pid == 17


def test_errors_keep_their_class(channel: LineChannel, calls: Calls) -> None:
    async def refused(request: Any, context: Any) -> None:
        raise StepMismatchError("another step")

    async def broken(request: Any, context: Any) -> None:
        raise KeyError("a mistake")

    calls.answers |= {"Leave": refused, "Describe": broken}
    with pytest.raises(StepMismatchError, match="another step"):
        channel.answer(channel.start("Leave", pb.LeaveRequest(rank=5), WAIT))
    with pytest.raises(StoreError, match=r"an owner failed: KeyError\('a mistake'\)"):
        channel.answer(channel.start("Describe", pb.DescribeRequest(), WAIT))


def test_more_calls_than_places_are_answered_in_any_order(channel: LineChannel, calls: Calls) -> None:
    gates = [asyncio.Event() for _ in range(3 * SLOTS)]
    loops: list[asyncio.AbstractEventLoop] = []

    async def gated(request: Any, context: Any) -> pb.DescribeResponse:
        loops.append(asyncio.get_running_loop())
        await gates[request.shard].wait()
        return pb.DescribeResponse(text=str(request.shard))

    calls.answers["Describe"] = gated
    started = [channel.start("Describe", pb.DescribeRequest(shard=shard), WAIT) for shard in range(len(gates))]
    for end in range(0, len(gates), SLOTS):
        until = time.monotonic() + WAIT
        while len(calls.asked) < end + SLOTS and time.monotonic() < until:
            time.sleep(0.005)
        assert len(calls.asked) == end + SLOTS, "no more at a time than there are places"
        for shard in reversed(range(end, end + SLOTS)):
            loops[0].call_soon_threadsafe(gates[shard].set)
            assert channel.answer(started[shard]).text == str(shard)


@pytest.mark.parametrize("size", [0, QUESTION_BYTES - 280, QUESTION_BYTES, 5 << 20])
def test_questions_and_answers_of_any_length_come(
    channel: LineChannel, calls: Calls, slab_dir: Path, size: int
) -> None:
    async def echo(request: Any, context: Any) -> pb.DescribeResponse:
        return pb.DescribeResponse(text=request.reason)

    calls.answers["Leave"] = echo
    said = "x" * size
    assert channel.answer(channel.start("Leave", pb.LeaveRequest(reason=said), WAIT)).SerializeToString() == (
        pb.DescribeResponse(text=said).SerializeToString()
    )
    assert {slab.header.facts.role for slab in list_slabs(slab_dir) if slab.header} == {"lobby"}, "parcels are gone"


def test_who_comes_is_taken_in_while_there_are_parcels(channel: LineChannel, calls: Calls, slab_dir: Path) -> None:
    calls.answers["Describe"] = described
    with closing(channel.parcel(100)), closing(channel_to(slab_dir)) as other:
        assert other.answer(other.start("Describe", pb.DescribeRequest(shard=2), WAIT)).text == "shard 2"


def test_a_call_without_an_answer_ends_at_its_deadline(channel: LineChannel, calls: Calls) -> None:
    left: list[float] = []

    async def never(request: Any, context: Any) -> None:
        left.append(context.time_remaining())
        await asyncio.sleep(WAIT)

    calls.answers["Describe"] = never
    with pytest.raises(NoAnswerError, match="rank 5, optimizer 0: no answer in time"):
        channel.answer(channel.start("Describe", pb.DescribeRequest(), 0.2))
    assert 0.0 < left[0] <= 0.2


def test_the_last_word_comes_before_the_end(slab_dir: Path, calls: Calls) -> None:
    with lobby(slab_dir, calls), closing(channel_to(slab_dir)) as channel:
        notices = channel.messages(channel.notices)
        assert next(notices).process.pid == 17
        calls.gone.append(StepMismatchError("the run is over"))
        with pytest.raises(StepMismatchError, match="the run is over"):
            list(notices)


def test_calls_break_where_the_owner_stops(slab_dir: Path, calls: Calls) -> None:
    async def never(request: Any, context: Any) -> None:
        await asyncio.sleep(WAIT)

    calls.answers["Describe"] = never
    with ExitStack() as stack:
        served = stack.enter_context(lobby(slab_dir, calls))
        channel = stack.enter_context(closing(channel_to(slab_dir)))
        started = channel.start("Describe", pb.DescribeRequest(), WAIT)
        served.close(0.5)
        with pytest.raises(BrokenLinkError, match="the owner serves no more"):
            channel.answer(started)
        with pytest.raises(BrokenLinkError, match="the connection was closed"):
            channel.start("Describe", pb.DescribeRequest(), WAIT)
        assert Lobby.find(slab_dir, ADDRESS, TOKEN) is None
    assert list_slabs(slab_dir) == []


@pytest.mark.parametrize("killed", [False, True])
def test_calls_of_a_caller_that_ends_are_ended(slab_dir: Path, calls: Calls, killed: bool) -> None:
    async def never(request: Any, context: Any) -> None:
        await asyncio.sleep(WAIT)

    calls.answers["Describe"] = never
    program = """
import pathlib, sys, time
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from store.test_lines import WAIT, channel_to
channel = channel_to(pathlib.Path(sys.argv[1]))
channel.start("Describe", pb.DescribeRequest(), WAIT)
print("asked", flush=True)
sys.stdin.readline()
channel.close()
time.sleep(WAIT)
"""
    with lobby(slab_dir, calls), forked(program, slab_dir) as process:
        assert process.said() == "asked"
        while not calls.asked:
            time.sleep(0.005)
        if killed:
            process.kill()
        else:
            process.say("close")
        assert calls.ended.wait(WAIT)
    assert list_slabs(slab_dir) == []


def test_the_death_of_the_owner_breaks_calls_and_notices_at_once(slab_dir: Path) -> None:
    program = """
import asyncio, pathlib, signal, sys
from store.test_lines import Calls, WAIT, lobby

async def never(request, context):
    print("asked", flush=True)
    await asyncio.sleep(WAIT)

calls = Calls()
calls.answers["Describe"] = never
with lobby(pathlib.Path(sys.argv[1]), calls):
    print("up", flush=True)
    signal.pause()
"""
    with forked(program, slab_dir) as process:
        assert process.said() == "up"
        with closing(channel_to(slab_dir)) as channel:
            notices = channel.messages(channel.notices)
            assert next(notices).process.pid == 17
            started = channel.start("Describe", pb.DescribeRequest(), WAIT)
            assert process.said() == "asked"
            process.kill()
            began = time.monotonic()
            with pytest.raises(BrokenLinkError, match="rank 5, optimizer 0: the owner's process has died"):
                list(notices)
            assert time.monotonic() - began < 0.5, "not at a look that comes once a second"
            with pytest.raises(BrokenLinkError, match="has died"):
                channel.answer(started)


@pytest.mark.parametrize(("key", "service"), [(b"made up", "StoreService"), (key_digest(TOKEN), "OwnerService")])
def test_who_does_not_show_the_token_or_is_no_rank_is_refused(
    slab_dir: Path, calls: Calls, key: bytes, service: str
) -> None:
    with lobby(slab_dir, calls):
        assert Lobby.find(slab_dir, ADDRESS, "another token") is None
        found = Lobby.find(slab_dir, ADDRESS, TOKEN)
        assert found is not None
        opening = pb.LineOpening(key=key, service=f"rayzero.v1.{service}", metadata={LIFE_KEY: "5.0"})
        with closing(found), closing(Line.make(found, 5, opening)) as line:
            until = time.monotonic() + WAIT
            while not line.is_over and time.monotonic() < until:
                time.sleep(0.005)
            assert line.is_over
            assert line.heard() is None
    assert calls.asked == []
