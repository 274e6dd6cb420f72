"""Calls to owners on other hosts that an optimizer actor of the rank's host makes for it."""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from forked import forked

from rayzero.codecs import RAW
from rayzero.concurrency.event_loop import shared_loop
from rayzero.concurrency.futures import Gather
from rayzero.errors import RankLeftError, RayZeroError, StepMismatchError, StoreError, TransferError
from rayzero.layout.model_layout import Shard
from rayzero.slabs.sweep import SHARED_MEMORY, list_slabs
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host import mirror_memory
from rayzero.store.host import transfer_calls as transfers
from rayzero.store.host.channel import BrokenLinkError, Caller, Channel
from rayzero.store.host.line_channel import LineChannel
from rayzero.store.host.transfer_calls import Sending
from rayzero.store.owner.entrances import pipes as piping
from rayzero.store.owner.entrances.access import AccessCheck, TransferCalls
from rayzero.store.owner.entrances.lobby import CallsInMemory
from rayzero.store.owner.server import serve_models
from rayzero.store.owner.streams import ShardDestination
from rayzero.store.owner.tensor_port import TensorPort
from rayzero.store.remote.handshake import LEASE
from rayzero.store.shm.lines import Lobby
from rayzero.store.wire import grpc_channel, tensor_streams
from rayzero.store.wire.grpc_channel import GrpcChannel
from rayzero.store.wire.payload import Assembly, byte_view
from rayzero.store.wire.rpc import (
    SERVER_OPTIONS,
    STORE_SERVICE,
    LinkNumber,
    caller_of,
    epoch_of,
    life_metadata,
    link_of,
    methods,
    model_of,
    token_matches,
    token_metadata,
)
from rayzero.store.wire.translate import to_failure
from rayzero.telemetry.recorder import MemoryRecorder
from store import test_host_sums
from store.deaths import differing, disturbed, train, undisturbed
from store.stores import inprocess
from store.test_host_sums import Place
from store.test_lines import ADDRESS, TOKEN, Calls, described, lobby, never
from store.test_mirrors import no_room
from store.test_succession import RANKS
from store.test_tls import OWN
from store.toy import WAIT, Rank, equal, make_spec, masters, random_grads, start, take_step
from tests.support import needs
from tests.support.waiting import until

pytestmark = needs.signals_between_processes


class FarOwner(Calls):
    """An owner on another host, with a gRPC server and a port for tensors."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self.notices: list[pb.NoticesResponse] = []  # said first
        self.values = {7: b"a" * 3000, 8: b"b" * (3 << 20)}  # by shard
        self.came: dict[int, bytes] = {}  # the same of what was sent
        self._loop, transfers = shared_loop(), TransferCalls(self._find, MemoryRecorder())
        self.tensors = TensorPort(MemoryRecorder(), transfers.answer)
        self.answers |= {"OpenTensorStream": self._open, "Fetch": self._fetch, "Load": self._load}
        self.address: str = self._loop.run(self._listen(), WAIT)
        stack.callback(self.stop)

    async def _find(self, model: int, epoch: int | None) -> Any:
        return self

    async def _listen(self) -> str:
        self._server = grpc.aio.server(
            handlers=(AccessCheck(self._find, TOKEN, MemoryRecorder()),), options=SERVER_OPTIONS
        )
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.tensors.listen("127.0.0.1")
        await self._server.start()
        return f"127.0.0.1:{port}"

    def stop(self) -> None:
        async def stop() -> None:
            await self._server.stop(None)
            await self.tensors.stop()

        self._loop.run(stop(), WAIT)
        self.tensors.close()

    async def answer(self, service: str, method: str, request: Any, context: Any) -> Any:
        if method == "Notices":
            for notice in self.notices:
                await context.write(notice)
        return await super().answer(service, method, request, context)

    async def _open(self, request: Any, context: Any) -> Any:
        return self.tensors.expect(f"rank {request.rank}", STORE_SERVICE, request.host, context)

    async def _fetch(self, request: Any, context: Any) -> Any:
        await context.stream.send((shard, memoryview(self.values[shard])) for shard in request.shards)
        return pb.FetchResponse()

    async def _load(self, request: Any, context: Any) -> Any:
        for unit in request.units:
            for shard in unit.shards:
                out = torch.empty(4096, dtype=torch.uint8)
                await context.stream.receive([ShardDestination(shard=shard, size_bytes=4096, out=byte_view(out))])
                self.came[shard] = out.numpy().tobytes()
        return pb.LoadResponse()


def open_to(address: str) -> list[GrpcChannel]:
    """The channels of this process to an owner that are not broken."""
    known = grpc_channel._of_loops[shared_loop().loop]._known
    return [channel for channel in known.values() if channel.address == address]


def pipe_to(directory: Path, to: str, rank: int = 5, met: bool = True) -> LineChannel:
    found = Lobby.find(directory, ADDRESS, TOKEN)
    assert found is not None
    metadata = (*token_metadata(TOKEN, 3, 1), *life_metadata(rank, 2))
    number = LinkNumber(f"rank {rank}", 1)
    return LineChannel(Caller.rank(rank), "optimizer 1", found, number, metadata, TOKEN, to=to, met=met)


@pytest.fixture
def owner(stack: ExitStack) -> FarOwner:
    return FarOwner(stack)


@pytest.fixture
def door(stack: ExitStack, slab_dir: Path) -> CallsInMemory:
    return stack.enter_context(lobby(slab_dir, None))


@pytest.fixture
def channel(stack: ExitStack, owner: FarOwner, door: CallsInMemory, slab_dir: Path) -> LineChannel:
    return stack.enter_context(closing(pipe_to(slab_dir, owner.address)))


# ---- calls and notices


def test_the_owner_sees_the_rank(channel: LineChannel, owner: FarOwner) -> None:
    owner.answers["Describe"] = described
    assert channel.answer(channel.start("Describe", pb.DescribeRequest(shard=7), WAIT)).text == "shard 7"
    ((service, method, _, context),) = owner.asked
    metadata = context.invocation_metadata()
    assert (service, method) == ("rayzero.v1.StoreService", "Describe")
    assert (caller_of(metadata), link_of(metadata)) == ((5, 2), LinkNumber("rank 5", 1))
    assert (model_of(metadata), epoch_of(metadata)) == (3, 1)
    assert token_matches(metadata, TOKEN)
    assert context.time_remaining() < WAIT + 1, "as gRPC tells it"


def test_notices_come_but_for_what_ranks_see_in_their_copy(stack: ExitStack, owner: FarOwner, slab_dir: Path) -> None:
    ended = to_failure(RankLeftError("rank 9 is gone"))
    owner.notices += [
        pb.NoticesResponse(published=[pb.NoticesResponse.Published(shard=1, version=2)]),
        pb.NoticesResponse(abort=ended),
    ]
    stack.enter_context(lobby(slab_dir, None))
    channel = stack.enter_context(closing(pipe_to(slab_dir, owner.address)))
    heard = pb.NoticesResponse()
    for notice in channel.notices():
        heard.MergeFrom(notice)
        if heard.HasField("abort") and heard.HasField("process"):
            break
    assert (heard.process.pid, heard.abort, list(heard.published)) == (17, ended, [])


@pytest.mark.parametrize("text", ["another step", "x" * 8192])
def test_errors_keep_class_and_text(channel: LineChannel, owner: FarOwner, text: str) -> None:
    async def refused(request: Any, context: Any) -> None:
        raise StepMismatchError(text)

    owner.answers["Leave"] = refused
    with pytest.raises(StepMismatchError) as raised:
        channel.answer(channel.start("Leave", pb.LeaveRequest(rank=5), WAIT))
    assert str(raised.value) == text
    owner.gone.append(StepMismatchError(text))
    with pytest.raises(StepMismatchError) as raised:
        list(channel.notices())
    assert str(raised.value) == text


def test_a_cancelled_call_ends_at_the_owner(channel: LineChannel, owner: FarOwner) -> None:
    owner.answers |= {"Describe": described, "Leave": never}
    started = channel.start("Leave", pb.LeaveRequest(rank=5), WAIT)
    until(lambda: len(owner.asked) == 1, what="the call does not come")
    started.cancel()
    assert owner.ended.wait(WAIT)
    assert channel.answer(channel.start("Describe", pb.DescribeRequest(), WAIT)).text == "shard 0"


def test_a_thousand_calls_of_many_ranks_and_their_door_share_one_connection(
    stack: ExitStack, owner: FarOwner, door: CallsInMemory, slab_dir: Path
) -> None:
    peers: set[str] = set()

    async def counted(request: Any, context: Any) -> pb.DescribeResponse:
        peers.add(context.peer())
        return await described(request, context)

    owner.answers["Describe"] = counted
    channels = [stack.enter_context(closing(pipe_to(slab_dir, owner.address, rank))) for rank in range(20)]
    doors = Channel(
        Caller.optimizer(0),
        "optimizer 1",
        owner.address,
        LinkNumber("optimizer 0", 1),
        token_metadata(TOKEN, 3, 1),
        None,
    )
    calls = [
        (channel, shard, channel.start("Describe", pb.DescribeRequest(shard=shard), WAIT))
        for shard in range(50)
        for channel in (*channels, doors)
    ]
    for channel, shard, call in calls:
        assert channel.answer(call).text == f"shard {shard}"
    assert len(peers) == 1
    assert [far.users for far in open_to(owner.address)] == [21]
    doors.close()
    until(lambda: [far.users for far in open_to(owner.address)] == [20])
    for channel in channels:
        channel.close()
    until(lambda: not open_to(owner.address), what="the channel stays when nobody uses it")


# ---- breaks


def test_lines_break_with_the_owner_and_new_ones_reach_its_successor(
    stack: ExitStack, owner: FarOwner, door: CallsInMemory, slab_dir: Path
) -> None:
    owner.answers["Leave"] = never
    channels = [stack.enter_context(closing(pipe_to(slab_dir, owner.address, rank))) for rank in range(3)]
    started = [channel.start("Leave", pb.LeaveRequest(rank=rank), WAIT) for rank, channel in enumerate(channels)]
    until(lambda: len(owner.asked) == 3, what="calls do not come")
    owner.stop()
    for channel, call in zip(channels, started, strict=True):
        with pytest.raises(BrokenLinkError):
            channel.answer(call)
        with pytest.raises(BrokenLinkError):
            list(channel.notices())
    late = stack.enter_context(closing(pipe_to(slab_dir, owner.address)))
    with pytest.raises(BrokenLinkError, match=r"rank 5, optimizer 1: .*refused"):
        list(late.notices())
    successor = FarOwner(stack)
    successor.answers["Describe"] = described
    again = stack.enter_context(closing(pipe_to(slab_dir, successor.address)))
    assert again.answer(again.start("Describe", pb.DescribeRequest(shard=1), WAIT)).text == "shard 1"


def test_calls_break_where_the_process_that_makes_them_stops(stack: ExitStack, owner: FarOwner, slab_dir: Path) -> None:
    owner.answers["Leave"] = never
    door = stack.enter_context(lobby(slab_dir, None))
    channel = stack.enter_context(closing(pipe_to(slab_dir, owner.address)))
    started = channel.start("Leave", pb.LeaveRequest(rank=5), WAIT)
    until(lambda: len(owner.asked) == 1, what="the call does not come")
    door.close(0.5)
    with pytest.raises(BrokenLinkError, match="optimizer actor of this host that calls it serves no more"):
        channel.answer(started)
    assert owner.ended.wait(WAIT)
    assert list_slabs(slab_dir) == []


@pytest.mark.parametrize("method", ["Describe", "Fetch"])
def test_calls_of_a_rank_that_is_killed_end_at_the_owner(
    owner: FarOwner, door: CallsInMemory, slab_dir: Path, method: str
) -> None:
    owner.answers[method] = never
    program = """
import pathlib, sys, time
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from store.test_pipes import WAIT, pipe_to
channel = pipe_to(pathlib.Path(sys.argv[1]), sys.argv[2])
if sys.argv[3] == "Describe":
    channel.start("Describe", pb.DescribeRequest(), WAIT)
else:
    parcel = channel.parcel(4000)
    channel.transfer("Fetch", pb.FetchRequest(rank=5, shards=[7]), WAIT, parcel, pb.LineRoom(sizes=[3000]))
print("asked", flush=True)
time.sleep(WAIT)
"""
    with forked(program, slab_dir, owner.address, method) as process:
        assert process.said() == "asked"
        until(lambda: method in [each[1] for each in owner.asked], what="nothing is asked")
        process.kill()
        assert owner.ended.wait(WAIT)
    until(lambda: len(list_slabs(slab_dir)) == 1, what="memory stays")


def test_a_damaged_answer_breaks_the_line(
    channel: LineChannel, owner: FarOwner, door: CallsInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner.answers["Describe"] = described
    assert next(channel.notices()).process.pid == 17
    (far,) = open_to(owner.address)

    async def damaged(*_: Any, **__: Any) -> None:
        return None

    monkeypatch.setitem(far._bound, methods(STORE_SERVICE)["Describe"].path, damaged)
    with pytest.raises(BrokenLinkError, match="its answer was damaged"):
        channel.answer(channel.start("Describe", pb.DescribeRequest(), WAIT))
    assert not open_to(owner.address), "who comes now gets another channel"


@pytest.mark.parametrize(("met", "error"), [(True, BrokenLinkError), (False, RayZeroError)])
def test_a_server_of_another_run_is_a_broken_link_to_who_has_met_the_owner(
    stack: ExitStack, door: CallsInMemory, slab_dir: Path, met: bool, error: type[Exception]
) -> None:
    async def begin() -> tuple[Any, str]:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, f"127.0.0.1:{port}"

    server, address = shared_loop().run(begin(), WAIT)
    stack.callback(lambda: shared_loop().run(server.stop(None), WAIT))
    channel = stack.enter_context(closing(pipe_to(slab_dir, address, met=met)))
    with pytest.raises(error) as raised:
        list(channel.notices())
    assert isinstance(raised.value, BrokenLinkError) == met


# ---- bytes


def move_over(channel: LineChannel) -> transfers.Move:
    return transfers.Move(channel=channel, deadline_s=WAIT)


def sending(shards: list[int]) -> Iterator[Sending]:
    for shard in shards:
        yield Sending(
            gather=Gather(1),
            shards=[Shard(index=shard, unit=shard, start=0, stop=1024)],
            values=torch.full((4096,), shard, dtype=torch.uint8).view(torch.float32),
            codec=RAW,
            request=pb.LoadRequest.Unit(unit=shard, shards=[shard]),
        )


def test_bytes_go_to_the_owner(channel: LineChannel, owner: FarOwner, slab_dir: Path) -> None:
    for _ in range(2):
        owner.came.clear()
        transfers.upload(move_over(channel), "Load", sending([1, 2, 3]))
        assert owner.came == {shard: bytes([shard]) * 4096 for shard in (1, 2, 3)}
    until(lambda: not owner.tensors._streams, what="no connection is kept")
    until(lambda: {slab.header.facts.role for slab in list_slabs(slab_dir) if slab.header} == {"lobby"}, what="parcels")


def fetched(channel: LineChannel, shards: list[int], sizes: list[int], records: set[int] = set()) -> list[bytes]:  # noqa: B006
    found = []
    request = pb.FetchRequest(rank=5, shards=shards)
    with transfers.download(move_over(channel), request, sizes, records) as take:
        for shard, size in zip(shards, sizes, strict=True):
            memory = torch.zeros(size, dtype=torch.uint8)
            assembly = Assembly(shard, size, byte_view(memory), is_record=shard in records)
            take(assembly)
            found.append(memory.numpy().tobytes())
    return found


@pytest.mark.parametrize("parcel_bytes", [16 << 20, 1000])
def test_bytes_come_from_the_owner(
    channel: LineChannel, owner: FarOwner, monkeypatch: pytest.MonkeyPatch, parcel_bytes: int
) -> None:
    monkeypatch.setattr(transfers, "_TOGETHER_BYTES", parcel_bytes)
    assert fetched(channel, [8, 7], [3 << 20, 3000]) == [owner.values[8], owner.values[7]]


def test_records_come_as_long_as_they_are(channel: LineChannel, owner: FarOwner) -> None:
    owner.values[7] = (100).to_bytes(8, "little") + b"r" * 92
    found = fetched(channel, [8, 7], [3 << 20, 5000], {7})
    assert found == [owner.values[8], owner.values[7] + bytes(4900)]


def test_an_error_of_the_owner_ends_a_transfer(channel: LineChannel, owner: FarOwner) -> None:
    async def refused(request: Any, context: Any) -> None:
        raise StepMismatchError("another step")

    owner.answers |= {"Fetch": refused, "Load": refused}
    with pytest.raises(StepMismatchError, match="another step"):
        fetched(channel, [7], [3000])
    with pytest.raises(StepMismatchError, match="another step"):
        transfers.upload(move_over(channel), "Load", sending([1]))


def test_a_fetch_of_more_bytes_than_its_caller_has_room_for_is_refused(channel: LineChannel) -> None:
    for room, said in [
        (pb.LineRoom(sizes=[1 << 50]), r"piece 7 of 1,125,899,906,842,624 bytes does not fit"),
        (pb.LineRoom(sizes=[1 << 50], records=[7]), r"records of 1,125,899,906,842,624 bytes do not fit"),
        (pb.LineRoom(sizes=[3000, 1]), "a Fetch of 1 shard has room for 2"),
    ]:
        request = pb.FetchRequest(rank=5, shards=[7])
        with closing(channel.parcel(4000)) as parcel, pytest.raises(TransferError, match=said):
            channel.answer(channel.transfer("Fetch", request, WAIT, parcel, room))


def test_other_bytes_than_are_announced_are_refused(channel: LineChannel, owner: FarOwner) -> None:
    with pytest.raises(TransferError):
        fetched(channel, [7], [2999])
    assert fetched(channel, [7], [3000]) == [owner.values[7]]


@pytest.mark.parametrize("method", ["Fetch", "Load"])
def test_a_cancelled_transfer_ends_at_the_owner(channel: LineChannel, owner: FarOwner, method: str) -> None:
    before = dict(owner.answers)
    owner.answers[method] = never
    move = move_over(channel)
    failed: list[BaseException] = []

    def go() -> None:
        try:
            if method == "Load":
                transfers.upload(move, "Load", sending([1]))
            else:
                with transfers.download(move, pb.FetchRequest(rank=5, shards=[7]), [3000]) as take:
                    take(Assembly(7, 3000, None))
        except RayZeroError as error:
            failed.append(error)

    moving = threading.Thread(target=go)
    moving.start()
    until(lambda: method in [each[1] for each in owner.asked], what="the call does not come")
    move.moving.set_result(None)
    moving.join(WAIT)
    assert failed
    assert owner.ended.wait(WAIT)
    owner.answers |= before
    assert fetched(channel, [7], [3000]) == [owner.values[7]]


@pytest.mark.parametrize("method", ["Fetch", "Load"])
def test_a_connection_that_ends_in_the_middle_breaks_the_line(
    channel: LineChannel, owner: FarOwner, method: str
) -> None:
    async def cut(request: Any, context: Any) -> None:
        for stream in list(owner.tensors._streams.values()):
            stream._stream.abort()
        await asyncio.sleep(WAIT)

    owner.answers[method] = cut
    move = {
        "Fetch": lambda: fetched(channel, [7], [3000]),
        "Load": lambda: transfers.upload(move_over(channel), "Load", sending(list(range(1, 200)) * 20)),
    }
    with pytest.raises(BrokenLinkError):
        move[method]()


def test_a_port_that_cannot_be_reached_is_named(channel: LineChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, port: int) -> Any:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(tensor_streams, "connect", refuse)
    monkeypatch.setattr(piping, "_SHUT_S", 0.3)
    named = r"rank 5, optimizer 1: cannot open a connection for tensors to 127\.0\.0\.1, port \d+: Connection refused"
    with pytest.raises(StoreError, match=named):
        fetched(channel, [7], [3000])


# ---- ranks whose gradients leave their host in sums


def piped(connection: Any) -> list[bool]:
    """By owner of another host, whether the rank calls it over a line."""
    return [isinstance(link.channel(), LineChannel) for link in connection._links.values() if not link.is_here()]


@pytest.mark.promise("scalable", "hosts")
def test_ranks_call_owners_of_other_hosts_through_their_own_and_show_nothing_themselves(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Owners want to see certificates on every connection; these ranks have none."""
    monkeypatch.setattr(test_host_sums, "serve_models", partial(serve_models, tls=OWN))
    place = Place(stack, (0, 0), (None, None), host_push="always")
    ranks = place.start(make_spec(2))
    others = start(list(stack.enter_context(inprocess(2, 1))), make_spec(2))
    for step in range(2):
        for each in (ranks, others):
            take_step(each, [random_grads(each[0].spec, 10 * step + rank) for rank in range(2)], 0.5)
    assert equal(masters(ranks[0]), masters(others[0]))
    for rank in ranks:
        assert piped(rank.store.connection) == [True, True]  # type: ignore[attr-defined]


def test_a_rank_calls_by_itself_once_those_of_its_host_that_called_for_it_are_gone_for_long(
    stack: ExitStack,
) -> None:
    place = Place(stack, (0, 0), (None, None), host_push="always", outlives_owners=True, stall_timeout=8.0)
    ranks = place.start(make_spec(2))
    connections: list[Any] = [rank.store.connection for rank in ranks]  # type: ignore[attr-defined]
    (calls,), links = place.servers[2]._in_memory, [connection._links[0] for connection in connections]
    began = time.monotonic()
    calls.close(0.2)
    until(lambda: all(link.channel() is None for link in links))
    until(lambda: all(isinstance(link.channel(), Channel) for link in links))
    assert time.monotonic() - began > 8.0 * LEASE / 2 - 0.2


def test_without_room_for_a_copy_ranks_call_by_themselves(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_memory, "check_shared", no_room)
    place = Place(stack, (0, 0), (None, None), host_push="always")
    ranks = place.start(make_spec(2))
    take_step(ranks, [random_grads(ranks[0].spec, rank) for rank in range(2)])
    for rank in ranks:
        rank.fetch()
        assert piped(rank.store.connection) == [False, False]  # type: ignore[attr-defined]


def train_and_read(rank: Rank) -> list[Any]:
    """A step, and a look at what no memory shows."""
    seen = train(rank)
    asked = [rank.fetch_unit(unit.index, None, "master") for unit in rank.spec.layout.units if unit.trainable]
    for fetched, _ in asked:
        fetched.result(WAIT)
    return [*seen, *(float(out.double().sum()) for _, out in asked)]


@pytest.mark.promise("recoverable", "hosts")
@pytest.mark.parametrize("killed", [(0,), (1,), (0, 1), (1, 0)])
@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_lost_with_owners_that_call_or_are_called(
    stack: ExitStack, killed: tuple[int, ...], seed: int
) -> None:
    """Owner 0 is on the ranks' host."""
    made = (tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix=f"test-{name}-") for name in ("host", "other"))
    here, other_host = (Path(stack.enter_context(each)) for each in made)
    spec, draws = make_spec(RANKS), random.Random(f"{seed} {killed}")
    kills = [(step, draws.uniform(0.0, 0.03), owner) for step in (2, 5) for owner in killed]
    terms: dict[str, Any] = {"shares": (True,) * RANKS, "other_host": other_host}
    terms |= {"host_push": "always", "ranks_here": range(RANKS)}
    found = disturbed(here, spec, 8, train_and_read, kills, num_owners=3, **terms)
    assert not differing(spec, found, undisturbed(spec, 8, train_and_read))
    until(lambda: not [*here.iterdir(), *other_host.iterdir()], what="memory stays")
