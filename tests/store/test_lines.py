"""Calls between processes of one host, over lines in shared memory."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import forked

from rayzero.codecs import RAW
from rayzero.concurrency.futures import Gather
from rayzero.errors import HandshakeError, MemoryPlanError, RayZeroError, StepMismatchError, StoreError
from rayzero.layout.model_layout import Shard
from rayzero.slabs.sweep import list_slabs
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host import transfer_calls as transfers
from rayzero.store.host.channel import BrokenLinkError, Caller, NoAnswerError
from rayzero.store.host.line_channel import LineChannel
from rayzero.store.host.transfer_calls import Sending
from rayzero.store.owner.entrances import lobby as entrance
from rayzero.store.owner.entrances.lobby import CallsInMemory, ParcelStream
from rayzero.store.owner.streams import ShardDestination
from rayzero.store.shm import lines, signals
from rayzero.store.shm.lines import QUESTION_BYTES, Line, Lobby, Parcel
from rayzero.store.shm.mailbox import SLOTS
from rayzero.store.shm.signals import available
from rayzero.store.shm.words import key_digest
from rayzero.store.wire.payload import byte_view
from rayzero.store.wire.rpc import LIFE_KEY, LinkNumber, caller_of, life_metadata, token_metadata
from rayzero.telemetry.recorder import MemoryRecorder
from store.toy import WAIT
from tests.support.waiting import until

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
def lobby(directory: Path, calls: Calls | None) -> Iterator[CallsInMemory]:
    """``calls``: None: of an owner that must not be asked."""

    async def find(model: int, epoch: int) -> Any:
        assert calls is not None, "this owner is not asked"
        return calls

    served = CallsInMemory(directory, ADDRESS, TOKEN, "lineage", find, MemoryRecorder())
    try:
        yield served
    finally:
        served.close(0.2)  # of it a half for the notices, which do not end


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


async def never(request: Any, context: Any) -> None:
    await asyncio.sleep(WAIT)


def test_a_call_has_what_one_over_grpc_has(channel: LineChannel, calls: Calls) -> None:
    calls.answers["Describe"] = described
    answer = channel.answer(channel.start("Describe", pb.DescribeRequest(shard=7), WAIT))
    assert answer.text == "shard 7"
    ((service, _, _, context),) = calls.asked
    assert service == "rayzero.v1.StoreService"
    assert caller_of(context.invocation_metadata()) == (5, 0)
    assert dict(context.invocation_metadata())["rayzero-model"] == "3"
    assert "rayzero-token" not in dict(context.invocation_metadata())
    assert next(channel.notices()).process.pid == 17


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
        until(lambda end=end: len(calls.asked) >= end + SLOTS)
        assert len(calls.asked) == end + SLOTS, "no more at a time than there are places"
        for shard in reversed(range(end, end + SLOTS)):
            loops[0].call_soon_threadsafe(gates[shard].set)
            assert channel.answer(started[shard]).text == str(shard)


@pytest.mark.parametrize("size", [0, QUESTION_BYTES - 280, *range(QUESTION_BYTES - 50, QUESTION_BYTES + 6, 5), 5 << 20])
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
    until(lambda: {slab.header.facts.role for slab in list_slabs(slab_dir) if slab.header} == {"lobby"})  # no parcels


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
        notices = channel.notices()
        assert next(notices).process.pid == 17
        calls.gone.append(StepMismatchError("the run is over"))
        with pytest.raises(StepMismatchError, match="the run is over"):
            list(notices)


def test_calls_break_where_the_owner_stops(slab_dir: Path, calls: Calls) -> None:
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
        until(lambda: calls.asked)
        if killed:
            process.kill()
        else:
            process.say("close")
        assert calls.ended.wait(WAIT)
    assert list_slabs(slab_dir) == []


def test_the_death_of_the_owner_breaks_calls_and_notices_at_once(
    slab_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "_LISTEN_S", 600.0)  # not at a listener's next look, which would come once a second
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
            notices = channel.notices()
            assert next(notices).process.pid == 17
            started = channel.start("Describe", pb.DescribeRequest(), WAIT)
            assert process.said() == "asked"
            process.kill()
            with pytest.raises(BrokenLinkError, match="rank 5, optimizer 0: the owner's process has died"):
                list(notices)
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
            until(lambda: line.is_over)
            assert line.heard() is None
    assert calls.asked == []


# ---- calls that nobody waits for any more


def test_cancelled_calls_end_at_the_owner_and_give_their_places_back(channel: LineChannel, calls: Calls) -> None:
    calls.answers |= {"Describe": described, "Leave": never}
    for _ in range(2):
        calls.asked.clear()
        started = [channel.start("Leave", pb.LeaveRequest(), WAIT) for _ in range(2 * SLOTS)]
        until(lambda: len(calls.asked) == SLOTS, what="calls do not come")
        assert all(call.cancel() for call in started)
        answer = channel.answer(channel.start("Describe", pb.DescribeRequest(shard=1), WAIT))
        assert answer.text == "shard 1"
        assert calls.ended.wait(WAIT)
        calls.ended.clear()
    assert not channel._open


def test_calls_whose_time_is_up_give_their_places_back(channel: LineChannel, calls: Calls) -> None:
    calls.answers |= {"Describe": described, "Leave": never}
    for started in [channel.start("Leave", pb.LeaveRequest(), 0.1) for _ in range(SLOTS)]:
        with pytest.raises(NoAnswerError):
            channel.answer(started)
    assert channel.answer(channel.start("Describe", pb.DescribeRequest(shard=1), WAIT)).text == "shard 1"


def test_a_call_that_waited_for_a_place_has_less_time_left(channel: LineChannel, calls: Calls) -> None:
    left: list[float] = []

    async def timed(request: Any, context: Any) -> pb.DescribeResponse:
        left.append(context.time_remaining())
        return pb.DescribeResponse()

    calls.answers |= {"Describe": timed, "Leave": never}
    held = [channel.start("Leave", pb.LeaveRequest(), WAIT) for _ in range(SLOTS)]
    waits = channel.start("Describe", pb.DescribeRequest(), WAIT)
    time.sleep(0.2)
    held[0].cancel()
    channel.answer(waits)
    assert left[0] <= WAIT - 0.2


def test_a_cancelled_transfer_ends_once_its_thread_has_let_go_of_the_memory(slab_dir: Path) -> None:
    facts = lines.SlabFacts(run="r", role="line", index=0, incarnation=0, layout_digest="", kernel="")
    begun, goes_on, landed = threading.Event(), threading.Event(), list[int]()

    def land() -> None:
        begun.set()
        goes_on.wait(WAIT)
        landed.append(0)

    async def cancel(stream: ParcelStream) -> None:
        landings = [
            ShardDestination(shard=0, size_bytes=1, out=None, landed=land),
            ShardDestination(shard=1, size_bytes=1, out=None, landed=lambda: landed.append(1)),
        ]
        moving = asyncio.create_task(stream.receive(landings))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        for _ in range(2):  # a newer link, and then the end of this one
            moving.cancel()
            await asyncio.sleep(0.01)
            assert not moving.done(), "a thread still writes"
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await moving

    with closing(Parcel.make(facts, slab_dir, 100)) as parcel, ThreadPoolExecutor(1) as pool:
        for shard in range(2):
            parcel.put(shard, memoryview(b"x"))
        parcel.rewind()
        asyncio.run(cancel(ParcelStream(parcel, pool)))
    assert landed == [0], "the rest does not land"


def test_a_long_answer_that_nobody_fetches_is_held_until_its_call_is_late(
    slab_dir: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def long(request: Any, context: Any) -> pb.DescribeResponse:
        return pb.DescribeResponse(text="x" * 10_000)

    calls.answers["Describe"] = long
    rests: list[int] = []
    monkeypatch.setattr(LineChannel, "_fetch_rest", lambda channel, call, answer: rests.append(answer.rest))
    with lobby(slab_dir, calls) as served, closing(channel_to(slab_dir)) as channel:
        channel.start("Describe", pb.DescribeRequest(), 0.2)
        until(lambda: bool(rests), what="no answer comes")
        (each,) = served._lines
        until(lambda: not each.held, what="the answer stays")


# ---- what does not fit


@pytest.mark.parametrize("count", [1, 90, 110, 130, 150, 400])
def test_a_long_request_comes_whole(channel: LineChannel, calls: Calls, count: int) -> None:
    came: list[pb.LoadRequest] = []

    async def counted(request: Any, context: Any) -> pb.LoadResponse:
        came.append(request)
        return pb.LoadResponse()

    calls.answers["Load"] = counted
    request = pb.LoadRequest(units=[pb.LoadRequest.Unit(unit=1, shards=[1])] * count)
    with closing(channel.parcel(1)) as parcel:
        channel.answer(channel.transfer("Load", request, WAIT, parcel))
    assert came == [request]


@pytest.mark.parametrize("text", ["x" * 8192, "\N{LATIN SMALL LETTER E WITH ACUTE}" * 8192, "\N{SMILE}" * 8192])
def test_long_errors_come_whole(slab_dir: Path, calls: Calls, text: str) -> None:
    async def refused(request: Any, context: Any) -> None:
        raise StepMismatchError(text)

    calls.answers |= {"Leave": refused, "Describe": described}
    with lobby(slab_dir, calls), closing(channel_to(slab_dir)) as channel:
        with pytest.raises(StepMismatchError) as raised:
            channel.answer(channel.start("Leave", pb.LeaveRequest(), WAIT))
        assert str(raised.value) == text
        assert channel.answer(channel.start("Describe", pb.DescribeRequest(shard=1), WAIT)).text == "shard 1"
        calls.gone.append(StepMismatchError(text))
        with pytest.raises(StepMismatchError) as raised:
            list(channel.notices())
        assert str(raised.value) == text


@pytest.mark.parametrize(
    ("error", "as_said"), [(MemoryPlanError("no room"), MemoryPlanError), (OSError("too many files"), StoreError)]
)
def test_a_call_fails_where_there_is_no_room_for_its_question_or_answer(
    channel: LineChannel, calls: Calls, monkeypatch: pytest.MonkeyPatch, error: Exception, as_said: type[Exception]
) -> None:
    async def long(request: Any, context: Any) -> pb.DescribeResponse:
        return pb.DescribeResponse(text="x" * 10_000)

    def no_room(*_: object) -> None:
        raise error

    calls.answers["Describe"] = long
    monkeypatch.setattr(Parcel, "make", no_room)
    for method, request in [("Leave", pb.LeaveRequest(reason="x" * 5000)), ("Describe", pb.DescribeRequest())]:
        with pytest.raises(as_said, match=str(error)):
            channel.answer(channel.start(method, request, WAIT))


# ---- beginnings and ends


def test_a_line_ends_whose_owner_has_closed_the_lobby_before_it_was_made(slab_dir: Path, calls: Calls) -> None:
    with lobby(slab_dir, calls):
        found = Lobby.find(slab_dir, ADDRESS, TOKEN)
    assert found is not None
    metadata = (*token_metadata(TOKEN, 3, 0), *life_metadata(5, 0))
    with closing(LineChannel(Caller.rank(5), "optimizer 0", found, LinkNumber("rank 5", 1), metadata, TOKEN)) as late:
        started = late.start("Describe", pb.DescribeRequest(), WAIT) if not late._ended else None
        with pytest.raises(BrokenLinkError, match="the owner serves no more"):
            list(late.notices())
        assert started is None or isinstance(started.exception(), BrokenLinkError)
    assert list_slabs(slab_dir) == []


def test_a_line_ends_that_was_not_taken_in_before_the_lobby_closed(slab_dir: Path, calls: Calls) -> None:
    with lobby(slab_dir, calls) as served:
        served._listener.close()
        channel = channel_to(slab_dir)
    with closing(channel), pytest.raises(BrokenLinkError, match="the owner serves no more"):
        list(channel.notices())
    assert list_slabs(slab_dir) == []


def test_a_caller_is_taken_in_later_if_that_fails_now(
    slab_dir: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []
    there = Lobby.lines

    def fails_once(self: Lobby) -> Iterator[Line]:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("too many files")
        yield from there(self)

    monkeypatch.setattr(Lobby, "lines", fails_once)
    with lobby(slab_dir, calls), closing(channel_to(slab_dir)) as channel:
        assert next(channel.notices()).process.pid == 17
    assert len(tries) > 1


def test_the_lobby_of_a_dead_owner_at_the_same_address_is_not_taken_for_that_of_a_living_one(
    slab_dir: Path, calls: Calls
) -> None:
    program = """
import pathlib, signal, sys
from store.test_lines import Calls, lobby
with lobby(pathlib.Path(sys.argv[1]), Calls()):
    print("up", flush=True)
    signal.pause()
"""
    for _ in range(3):  # their names are drawn by chance
        with forked(program, slab_dir) as process:
            assert process.said() == "up"
            process.kill()
            process.wait(WAIT)
    assert Lobby.find(slab_dir, ADDRESS, TOKEN) is None
    with lobby(slab_dir, calls), closing(channel_to(slab_dir)) as channel:
        assert next(channel.notices()).process.pid == 17


def test_the_lobby_of_a_dead_owner_is_not_found_while_a_process_lives_that_it_forked(slab_dir: Path) -> None:
    program = """
import os, pathlib, signal, sys
from store.test_lines import Calls, lobby
with lobby(pathlib.Path(sys.argv[1]), Calls()):
    child = os.fork()
    if child == 0:
        signal.pause()
    print(child, flush=True)
    signal.pause()
"""
    with forked(program, slab_dir) as process:
        child = int(process.said())
        process.kill()
        process.wait(WAIT)
        try:
            assert Lobby.find(slab_dir, ADDRESS, TOKEN) is None
        finally:
            os.kill(child, signal.SIGKILL)


def test_what_cannot_be_read_breaks_the_line(channel: LineChannel) -> None:
    channel._line.answers.cells()[0].write(b"?")
    with pytest.raises(BrokenLinkError, match="its line could not be read"):
        list(channel.notices())


def test_an_owner_of_another_host_is_not_found_in_a_directory_that_both_have(
    slab_dir: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lobby(slab_dir, calls):
        monkeypatch.setattr(lines, "host_identity", lambda directory: "another")
        assert Lobby.find(slab_dir, ADDRESS, TOKEN) is None


@pytest.mark.parametrize("is_seen", [True, False])
def test_what_a_killed_caller_leaves_is_removed(
    slab_dir: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch, is_seen: bool
) -> None:
    program = """
import pathlib, sys, time
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from store.test_lines import WAIT, channel_to
channel = channel_to(pathlib.Path(sys.argv[1]))
parcels = [channel.parcel(1000), channel.parcel(10)]
channel.start("Leave", pb.LeaveRequest(), WAIT)
print("asked", flush=True)
time.sleep(WAIT)
"""
    calls.answers["Leave"] = never
    if not is_seen:  # as of a process in another pid namespace
        monkeypatch.setattr(entrance, "watch_process", lambda process, died: None)
    with lobby(slab_dir, calls), closing(channel_to(slab_dir)) as other, closing(other.parcel(10)) as parcel:
        with forked(program, slab_dir) as process:
            assert process.said() == "asked"
            until(lambda: bool(calls.asked), what="nothing is asked")
            process.kill()
            assert calls.ended.wait(WAIT)
        roles = lambda: sorted(slab.header.facts.role for slab in list_slabs(slab_dir) if slab.header)  # noqa: E731
        until(lambda: roles() == ["lobby", "parcel"], what="memory stays")
        assert (slab_dir / parcel.name).exists(), "that of another caller, with the same number"


def test_a_parcel_of_another_line_is_refused(channel: LineChannel, calls: Calls, slab_dir: Path) -> None:
    with closing(channel_to(slab_dir)) as other, closing(other.parcel(10)) as parcel:
        started = channel.transfer("Load", pb.LoadRequest(), WAIT, parcel)
        with pytest.raises(HandshakeError, match="is not of the line over which it was named"):
            channel.answer(started)


def test_an_upload_makes_its_parts_when_their_turn_comes(
    channel: LineChannel, calls: Calls, monkeypatch: pytest.MonkeyPatch, slab_dir: Path
) -> None:
    came: list[list[int]] = []
    made: list[int] = []

    async def taken(request: Any, context: Any) -> pb.LoadResponse:
        units = [each.unit for each in request.units]
        largest = max(slab.bytes for slab in list_slabs(slab_dir) if slab.header and slab.header.facts.role == "parcel")
        assert largest < 32 << 10
        values = torch.empty(len(units), 4096, dtype=torch.uint8)
        landings = [
            ShardDestination(shard=unit, size_bytes=4096, out=byte_view(values[at])) for at, unit in enumerate(units)
        ]
        await context.stream.receive(landings)
        assert [int(each) for each in values[:, -1]] == units
        assert len(made) <= sum(map(len, came)) + len(units) + 1
        came.append(units)
        return pb.LoadResponse()

    def parts() -> Iterator[Sending]:
        for unit in range(5):
            made.append(unit)
            yield Sending(
                gather=Gather(1),
                shards=[Shard(index=unit, unit=unit, start=0, stop=1024)],
                values=torch.full((4096,), unit, dtype=torch.uint8).view(torch.float32),
                codec=RAW,
                request=pb.LoadRequest.Unit(unit=unit, shards=[unit]),
            )

    calls.answers["Load"] = taken
    monkeypatch.setattr(transfers, "_TOGETHER_BYTES", 10_000)
    move = transfers.Move(channel=channel, deadline_s=WAIT)
    transfers.upload(move, "Load", parts())
    assert came == [[0, 1], [2, 3], [4]]
