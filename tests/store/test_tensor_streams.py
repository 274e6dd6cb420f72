"""Connections for tensors: bytes arrive as they were sent, or a transfer fails by name; strangers get nothing."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayzero.errors import RayZeroError, StoreError, TransferError
from rayzero.security.authority import Authority
from rayzero.security.credentials import OWNER, Identity
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host import wire_transfers as wire_transfers
from rayzero.store.host.transfer_calls import Sending
from rayzero.store.owner import streams as owner_streams
from rayzero.store.owner import tensor_port
from rayzero.store.owner.calls.allowance import TooManyCallsError
from rayzero.store.owner.server import OwnerServer
from rayzero.store.owner.streams import OwnerStream, ShardDestination
from rayzero.store.owner.tensor_port import CONNECTIONS, ENTERING, TensorPort
from rayzero.store.wire import tensor_streams
from rayzero.store.wire.payload import CHUNK_BYTES, Assembly, checksum
from rayzero.store.wire.rpc import (
    STORE_SERVICE,
    life_metadata,
    methods,
    open_channel,
    token_metadata,
)
from rayzero.store.wire.tensor_stream import (
    MESSAGE,
    TICKET_BYTES,
    WELCOME,
    MessageCameError,
    Receiving,
    Sent,
    StreamEndedError,
    StreamKeys,
    StreamWork,
    TensorStream,
    message_on,
    new_stream_keys,
)
from rayzero.store.wire.tensor_streams import Opening, OverdueError, TensorStreams, Transfer, asked, read_answer
from rayzero.telemetry.names import REFUSED, TRANSFER_RETRIES
from rayzero.telemetry.recorder import MemoryRecorder
from store.proxy import Proxy
from store.stores import TOKEN, connected, inprocess, serving
from store.toy import WAIT, equal, initial_values, make_spec, masters, random_grads, start, started, take_step
from tests.support.leftovers import files_left, open_files
from tests.support.waiting import until

SHOWN = Identity(Authority("streams", on_loopback=True).issue("all", [OWNER, "rank-0.rayzero", "rank-1.rayzero"]))
HEAD = 24  # bytes


def mirrored(keys: StreamKeys | None) -> StreamKeys | None:
    """What the other end has."""
    return None if keys is None else StreamKeys(sending=keys.receiving, receiving=keys.sending)


@contextmanager
def wired(keys: StreamKeys | None = None) -> Iterator[tuple[TensorStream, socket.socket, TensorStream, socket.socket]]:
    """A sender, the wire behind it, a receiver, and the wire in front of it."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def pair() -> tuple[socket.socket, socket.socket]:
            one = stack.enter_context(socket.create_connection(listener.getsockname()))
            other = stack.enter_context(listener.accept()[0])
            return one, other

        (sending, after), (before, receiving) = pair(), pair()
        yield TensorStream(sending, keys), after, TensorStream(receiving, mirrored(keys)), before


def pass_all(work: StreamWork) -> None:
    while not work.advance():
        pass


def on_the_wire(content: bytes, chunk_bytes: int, keys: StreamKeys | None, shard: int = 3) -> bytes:
    """What is sent of a shard."""
    with wired(keys) as (sender, after, _, _):
        pass_all(Sent(sender, shard, memoryview(content), chunk_bytes=chunk_bytes))
        sender.close()
        return b"".join(iter(lambda: after.recv(1 << 16), b""))


def received(wire: bytes, size: int, keys: StreamKeys | None, shard: int = 3) -> bytes:
    """What a receiver makes of that."""
    out = np.zeros(size, dtype=np.uint8)
    with wired(keys) as (_, _, receiver, before):
        before.sendall(wire)
        before.shutdown(socket.SHUT_WR)
        pass_all(Receiving(receiver, Assembly(shard, size, out)))
    return out.tobytes()


KEYS = [None, StreamKeys(sending=bytes(range(32)), receiving=bytes(range(32, 64)))]


@pytest.mark.parametrize("keys", KEYS, ids=["plain", "encrypted"])
@pytest.mark.parametrize("chunk_bytes", [1, 7, 100, 4096])
def test_bytes_arrive_as_they_were_sent(keys: StreamKeys | None, chunk_bytes: int) -> None:
    content = random.Random(1).randbytes(1000)
    wire = on_the_wire(content, chunk_bytes, keys)
    assert received(wire, len(content), keys) == content
    chunks = -(-len(content) // chunk_bytes)
    assert len(wire) == len(content) + chunks * (HEAD if keys is None else HEAD + 16)


def test_a_plain_chunk_is_a_head_and_its_bytes() -> None:
    wire = on_the_wire(b"abcde", 3, None, shard=7)
    heads = [struct.pack("<IIQQ", 7, 3, 0, checksum(b"abc", 1)), struct.pack("<IIQQ", 7, 2, 3, checksum(b"de", 2))]
    assert wire == heads[0] + b"abc" + heads[1] + b"de"


@pytest.mark.parametrize("keys", KEYS, ids=["plain", "encrypted"])
def test_a_chunk_that_comes_again_is_refused(keys: StreamKeys | None) -> None:
    """In place of the same shard's next bytes."""
    out = np.zeros(5, dtype=np.uint8)
    wire = on_the_wire(b"abcde", 4096, keys)
    with wired(keys) as (_, _, receiver, before):
        before.sendall(wire + wire)
        pass_all(Receiving(receiver, Assembly(3, 5, out)))
        with pytest.raises(TransferError, match="damaged on the way, or are not the next ones"):
            pass_all(Receiving(receiver, Assembly(3, 5, out)))


def test_a_chunk_that_is_larger_than_any_is_refused_at_its_head() -> None:
    size = CHUNK_BYTES + 1
    with pytest.raises(TransferError, match="a chunk of 1,048,577 bytes came; the most are 1,048,576"):
        received(struct.pack("<IIQQ", 3, size, 0, 0), size, None)


def test_every_connection_has_keys_of_its_own() -> None:
    made = [new_stream_keys() for _ in range(4)]
    assert len({key for keys in made for key in (keys.sending, keys.receiving)}) == 8
    assert "sending" not in repr(made[0])


@settings(max_examples=settings.default.max_examples * 3 // 2, deadline=None)
@given(data=st.data(), encrypted=st.booleans())
def test_whatever_happens_to_the_bytes_on_the_way_is_noticed(data: st.DataObject, encrypted: bool) -> None:
    keys = KEYS[encrypted]
    content = bytes(range(1, 201))
    wire = on_the_wire(content, 50, keys)
    size = len(wire) // 4
    chunks = [wire[at : at + size] for at in range(0, len(wire), size)]
    at = data.draw(st.integers(0, 3))
    what = data.draw(st.sampled_from(["flips", "truncates", "duplicates", "replays", "leaves out", "swaps"]))
    if what == "flips":
        bit = data.draw(st.integers(0, 8 * size - 1))
        chunks[at] = bytes(b ^ (1 << bit % 8 if i == bit // 8 else 0) for i, b in enumerate(chunks[at]))
    elif what == "truncates":
        chunks[at] = chunks[at][: data.draw(st.integers(0, size - 1))]
    elif what == "duplicates":
        chunks.insert(at, chunks[at])
    elif what == "replays":
        chunks[at] = chunks[(at + 1) % 4]
    elif what == "leaves out":
        chunks.pop(at)
    else:
        chunks[at], chunks[at - 1] = chunks[at - 1], chunks[at]
    spoilt = b"".join(chunks)
    if what == "duplicates" and at == 3:  # it comes after the last byte: the next transfer meets it
        assert received(spoilt, len(content), keys) == content
        return
    with pytest.raises(TransferError):
        received(spoilt, len(content), keys)


def test_chunks_of_another_connection_are_refused() -> None:
    wire = on_the_wire(b"x" * 100, 100, new_stream_keys())
    with pytest.raises(TransferError, match="damaged on the way, or are not the next ones"):
        received(wire, 100, new_stream_keys())


def test_a_silent_peer_holds_no_thread() -> None:
    content = bytes(200)
    wire = on_the_wire(content, 100, None)
    out = np.ones(200, dtype=np.uint8)
    with wired() as (_, _, receiver, before):
        coming = Receiving(receiver, Assembly(3, 200, out))
        for part in (wire[:10], wire[10:60], wire[60:-1]):  # within a head, within a payload
            before.sendall(part)
            began = time.monotonic()
            assert not coming.advance()
            assert time.monotonic() - began < 10
        before.sendall(wire[-1:])
        assert coming.advance()
    assert out.tobytes() == content


def test_a_peer_that_sends_a_little_now_and_then_holds_no_thread() -> None:
    wire = on_the_wire(bytes(1 << 16), 1 << 16, None)
    with wired() as (_, _, receiver, before):
        coming = Receiving(receiver, Assembly(3, 1 << 16, None))
        sending = threading.Event()

        def trickle() -> None:
            for byte in wire[:-1]:  # eleven minutes
                before.sendall(bytes([byte]))
                if sending.wait(0.01):
                    return

        trickling = threading.Thread(target=trickle)
        trickling.start()
        assert not coming.advance()
        assert trickling.is_alive(), "bytes are on their way"
        sending.set()
        trickling.join(WAIT)


def test_a_peer_that_takes_nothing_holds_no_thread() -> None:
    with wired() as (sender, after, _, _):
        going = Sent(sender, 3, memoryview(bytes(32 << 20)))
        while going.advance():
            pass
        assert not going.advance()
        reader = threading.Thread(target=lambda: [None for _ in iter(lambda: after.recv(1 << 20), b"")])
        reader.start()
        pass_all(going)
        sender.close()
        reader.join(WAIT)


def test_ending_a_connection_ends_whoever_waits_for_bytes() -> None:
    with wired() as (_, _, receiver, _), ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pass_all, Receiving(receiver, Assembly(3, 8, None)))
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        receiver.abort()
        with pytest.raises(StreamEndedError):
            waiting.result(WAIT)


# ---- a rank and owners


@contextmanager
def over(made: Callable[[str], Proxy]) -> Iterator[list[Proxy]]:
    """Ranks' connections for tensors go through proxies, one for each port."""
    proxies: dict[int, Proxy] = {}
    with ExitStack() as stack:

        def connect(host: str, port: int) -> socket.socket:
            if port not in proxies:
                proxies[port] = stack.enter_context(made(f"{host}:{port}"))
                found.append(proxies[port])
            return socket.create_connection(("127.0.0.1", proxies[port].port), timeout=5)

        found: list[Proxy] = []
        with patch.object(tensor_streams, "connect", connect):
            yield found


def trained(servers: Sequence[OwnerServer], shown: Identity | None = None, **options: Any) -> dict[str, torch.Tensor]:
    """What a rank has after three steps."""
    with started(connected(servers, tls=shown, **options), make_spec(1)) as ranks:
        for step in range(3):
            take_step(ranks, [random_grads(ranks[0].spec, step)], 0.5)
            assert ranks[0].fetch()
        return masters(ranks[0])


def expected() -> dict[str, torch.Tensor]:
    """What ``trained`` returns where no bytes travel."""
    with started(inprocess(1, 2), make_spec(1)) as ranks:
        for step in range(3):
            take_step(ranks, [random_grads(ranks[0].spec, step)], 0.5)
        return masters(ranks[0])


class Spoils(Proxy):
    """Flips a bit of one piece in ``every`` that has more than ``least`` bytes, ``most`` times in all."""

    def __init__(self, target: str, every: int = 10, most: int = 2, least: int = TICKET_BYTES) -> None:
        self.spoilt, self._seen, self._every, self._most, self._least = 0, 0, every, most, least
        super().__init__(target)

    def _reader(self, source: socket.socket) -> Callable[[], bytes]:
        read = super()._reader(source)

        def spoilt() -> bytes:
            piece = bytearray(read())
            self._seen += 1
            if len(piece) > self._least and self.spoilt < self._most and not self._seen % self._every:
                self.spoilt += 1
                piece[len(piece) // 2] ^= 4
            return bytes(piece)

        return spoilt


@pytest.mark.parametrize("shown", [None, SHOWN], ids=["plain", "encrypted"])
def test_bytes_that_are_damaged_are_sent_again(shown: Identity | None) -> None:
    recorder = MemoryRecorder()
    with serving(2, tls=shown) as servers, over(Spoils) as proxies:
        found = trained(servers, shown, recorder=recorder)
        assert sum(proxy.spoilt for proxy in proxies) == 4
    assert recorder.total(TRANSFER_RETRIES) > 0
    assert equal(found, expected())


@pytest.mark.parametrize("verb", ["push", "fetch"])
def test_damage_that_does_not_end_is_an_error_that_names_the_shard(verb: str) -> None:
    spec = make_spec(1)
    with (
        serving() as servers,
        over(lambda target: Spoils(target, every=1, most=0, least=300)) as proxies,
        connected(servers) as stores,
    ):
        (rank,) = start(stores, spec)
        for proxy in proxies:
            proxy._most = 1_000_000  # type: ignore[attr-defined]
        moving = rank.push_unit(0, random_grads(spec, 1)) if verb == "push" else rank.fetch_unit(0)[0]
        with pytest.raises(TransferError, match=r"shard 0 bytes 0\.\..*checksum"):
            moving.result(WAIT)


def test_an_upload_that_cannot_go_on_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which waits for memory that the owner would keep for it."""
    monkeypatch.setattr(wire_transfers, "bulk_deadline_s", lambda size: 100 * WAIT)
    with serving() as (server,), started(connected([server]), make_spec(1)) as (rank,):

        def contents(part: Sending) -> Iterator[Any]:
            yield from ()
            raise MemoryError("no room to encode")

        monkeypatch.setattr(Sending, "contents", contents)
        model = server._models.made[0].model
        monkeypatch.setattr(model.service, "reserve_when_free", lambda *_: Future[Any]())
        with pytest.raises(MemoryError):
            rank.push_unit(0, random_grads(rank.spec, 1)).result(WAIT)
        until(lambda: sum(map(len, model.calls._tasks.values())) == 1)  # the rank's notices


def test_a_protected_runs_values_are_not_on_the_wire() -> None:
    spec = make_spec(1)
    values = next(iter(initial_values(spec).values()))
    pattern = values.flatten()[:8].numpy().tobytes()

    class Records(Proxy):
        def _reader(self, source: socket.socket) -> Callable[[], bytes]:
            read = super()._reader(source)

            def recorded() -> bytes:
                piece = read()
                seen.extend(piece)
                return piece

            return recorded

    for shown, there in ((None, True), (SHOWN, False)):
        seen = bytearray()
        with serving(2, tls=shown) as servers, over(Records):
            trained(servers, shown)
        assert len(seen) > 10_000
        assert (pattern in bytes(seen)) == there


def test_connections_are_used_again() -> None:
    with serving(2) as servers, over(Proxy) as proxies:
        trained(servers)
        pairs = [len(proxy._pairs) for proxy in proxies]
    assert len(pairs) == 2
    assert max(pairs) <= 4, "a load, a fetch and a push at a time"


def test_a_port_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_transfers, "_SHUT_S", 0.3)

    def connect(host: str, port: int) -> socket.socket:
        raise ConnectionRefusedError(111, "Connection refused")

    with (
        serving() as servers,
        patch.object(tensor_streams, "connect", connect),
        pytest.raises(TransferError) as refused,
    ):
        trained(servers)
    assert re.search(
        r"cannot open a connection for tensors to 127.0.0.1, port \d+: Connection refused; "
        r".* open every port of the optimizer actors' hosts to them: owners take free ones$",
        str(refused.value),
    )


@contextmanager
def silent(where: str) -> Iterator[int]:
    """A port whose owner does not get to a client: the host does not even accept it, or it shows its ticket in vain."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        if where == "connecting":
            stack.enter_context(socket.create_connection(listener.getsockname()))  # who comes now is not answered
        yield listener.getsockname()[1]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not ended lasts."""
    monkeypatch.setattr(tensor_streams, "_OPEN_S", 3 * WAIT)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("where", ["connecting", "showing its ticket"])
def test_closing_ends_a_connection_that_is_not_open_yet(where: str) -> None:
    with silent(where) as port, ThreadPoolExecutor(1) as pool:
        opening = Opening(port=port, ticket=bytes(TICKET_BYTES), keys=None)
        streams = TensorStreams(f"127.0.0.1:{port}", lambda host: opening)
        taken = pool.submit(streams.take)
        until(lambda: streams._opening)
        time.sleep(0.1)  # it waits: for the connection, or for the answer
        assert not taken.done()
        streams.close()
        error = taken.exception(timeout=WAIT)
        assert isinstance(error, StreamEndedError)
        assert str(error) == "the link was closed"
        assert error.__cause__ is None, "that would be the network's fault"
        assert not streams._opening


@pytest.mark.usefixtures("patient")
def test_a_connection_that_is_begun_while_the_link_closes_ends_too() -> None:
    with silent("connecting") as port:
        streams = TensorStreams(f"127.0.0.1:{port}", lambda host: opening)
        opening = Opening(port=port, ticket=bytes(TICKET_BYTES), keys=None)
        connect = tensor_streams.connect

        def late(address: str, port: int) -> socket.socket:
            streams.close()
            return connect(address, port)

        began = time.monotonic()
        with patch.object(tensor_streams, "connect", late), pytest.raises(StreamEndedError, match="link was closed"):
            streams.take()
        assert time.monotonic() - began < WAIT


def test_a_host_is_reached_at_the_address_that_answers() -> None:
    """An owner that was given a name listens on one of the name's addresses."""

    def resolve(*_: object, **__: object) -> list[tuple[Any, ...]]:
        addresses = ["::1", "127.0.0.2", "127.0.0.1"]
        return [(socket.AF_UNSPEC, socket.SOCK_STREAM, 0, "", (address, 0)) for address in addresses]

    with serving() as servers, patch.object(socket, "getaddrinfo", resolve):
        assert equal(trained(servers), expected())


def test_a_server_that_stops_leaves_no_connection_and_no_port() -> None:
    with serving() as (server,), started(connected([server]), make_spec(1)) as ranks:
        take_step(ranks, [random_grads(ranks[0].spec, 1)], 0.5)
        address = server.tensor_address(server.address)
        files = open_files()
        server.stop()
        host, _, port = address.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=WAIT)
        assert files_left(files - 1) == 0


# ---- strangers, and members who mean harm


@contextmanager
def disturbed(recorder: MemoryRecorder | None = None, shown: Identity | None = None) -> Iterator[OwnerServer]:
    """A rank trains before the block and after it."""
    spec = make_spec(1)
    with serving(tls=shown) as (server,), connected([server], tls=shown) as stores:
        if recorder is not None:
            server._tensors._refusals._recorder = recorder
        ranks = start(stores, spec)
        take_step(ranks, [random_grads(spec, 1)], 0.5)
        yield server
        take_step(ranks, [random_grads(spec, 2)], 0.5)


def stranger(server: OwnerServer) -> socket.socket:
    host, _, port = server.tensor_address(server.address).rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT)


def ends(connection: socket.socket) -> bool:
    """Whether the owner ends a connection, without a word."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def refused(recorder: MemoryRecorder, reason: str) -> float:
    return recorder.total(REFUSED, door="tensors", reason=reason)


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        (random.Random(1).randbytes(TICKET_BYTES), {"ticket": 20}),
        (b"GET / HTTP/1.1\r\n\r\n", {"nonsense": 20}),
        (b"x", {"nonsense": 20}),
        (b"", {}),  # who only looks whether the port is open, as hosts do when a run starts
    ],
)
def test_who_shows_no_ticket_is_cut_and_counted(said: bytes, counted: dict[str, int]) -> None:
    recorder = MemoryRecorder()
    with disturbed(recorder) as server:
        for _ in range(20):
            with stranger(server) as connection:
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
                assert ends(connection)
    assert {why: refused(recorder, why) for why in ("ticket", "nonsense") if refused(recorder, why)} == counted


def test_who_says_nothing_is_cut_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = MemoryRecorder()
    monkeypatch.setattr(tensor_port, "TICKET_S", 3.0)
    with disturbed(recorder) as server, ExitStack() as stack:
        silent = [stack.enter_context(stranger(server)) for _ in range(ENTERING + 10)]
        assert all(map(ends, silent[:10]))
        assert refused(recorder, "limit") == 10
        with member(server):
            pass
        assert refused(recorder, "limit") == 11, "a member comes in while the others say nothing"
        assert all(map(ends, silent))
        assert refused(recorder, "slow") == ENTERING - 1


def test_many_members_come_in_at_once() -> None:
    with disturbed() as server, ExitStack() as stack:
        openings = [expect(server, rank) for rank in (0, 1) for _ in range(60)]
        connections = [stack.enter_context(stranger(server)) for _ in openings]
        for opening, connection in zip(openings, connections, strict=True):
            connection.sendall(opening.ticket)
        assert all(connection.recv(1) == WELCOME for connection in connections)


class Listener(Protocol):
    """Where an owner's calls go."""

    @property
    def address(self) -> str: ...


def expect(server: Listener, rank: int = 0, shown: Identity | None = None) -> pb.OpenTensorStreamResponse:
    request = pb.OpenTensorStreamRequest(rank=rank, host="127.0.0.1")
    metadata = (*token_metadata(TOKEN), *life_metadata(rank, 0))
    with open_channel(server.address, shown) as channel:
        ask = methods(STORE_SERVICE)["OpenTensorStream"].bind(channel)
        found: pb.OpenTensorStreamResponse = ask(request, metadata=metadata, timeout=WAIT)
    return found


@contextmanager
def member(server: Listener, rank: int = 0, shown: Identity | None = None) -> Iterator[TensorStream]:
    """A connection that is open."""
    answer = expect(server, rank, shown)
    opening = Opening.of(answer, protected=shown is not None)
    with closing(socket.create_connection(("127.0.0.1", opening.port), timeout=WAIT)) as connection:
        connection.sendall(opening.ticket)
        assert connection.recv(1) == WELCOME
        yield TensorStream(connection, opening.keys)


def test_a_ticket_is_good_once() -> None:
    with disturbed() as server:
        opening = expect(server)
        with ExitStack() as stack:
            first, second = (stack.enter_context(stranger(server)) for _ in range(2))
            first.sendall(opening.ticket)
            assert first.recv(1) == WELCOME
            second.sendall(opening.ticket)
            assert ends(second)


def test_a_ticket_is_good_for_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_port, "TICKET_S", 0.1)
    with disturbed() as server:
        opening = expect(server)
        time.sleep(0.5)
        with stranger(server) as late:
            late.sendall(opening.ticket)
            assert ends(late)


class Unprotected:
    """A call without TLS."""

    invocation_metadata = staticmethod(tuple)
    auth_context = staticmethod(dict)


async def nothing(*_: object) -> pb.TransferAnswer:
    return pb.TransferAnswer(response=b"")


def test_a_rank_may_have_so_many_connections() -> None:
    async def ask() -> None:
        port = TensorPort(MemoryRecorder(), nothing)
        port.listen("127.0.0.1")
        for rank in (0, 1):
            for _ in range(CONNECTIONS):
                port.expect(f"rank {rank}", STORE_SERVICE, "127.0.0.1", Unprotected)
        with pytest.raises(TooManyCallsError, match="rank 1 has 64 connections for tensors here"):
            port.expect("rank 1", STORE_SERVICE, "127.0.0.1", Unprotected)
        await port.stop()
        await port.stop()

    asyncio.run(ask())


def ask(stream: TensorStream, method: str, request: Any, timeout_s: float = WAIT) -> Transfer:
    return Transfer(stream, method, request.SerializeToString(), timeout_s)


LOAD = pb.LoadRequest(units=[pb.LoadRequest.Unit(unit=0, shards=[0])])


def message(content: bytes, number: int) -> bytes:
    """A message, the nth of its connection."""
    return struct.pack("<IIQQ", MESSAGE, len(content), 0, checksum(content, number)) + content


INTRUSIONS = {
    "noise": random.Random(3).randbytes(HEAD),
    "a message of 4 GiB": struct.pack("<IIQQ", MESSAGE, (1 << 32) - 1, 0, 0),
    "a message of nothing": message(b"", 1),
    "bytes of a shard": struct.pack("<IIQQ", 0, 8, 0, checksum(bytes(8), 1)) + bytes(8),
    "no protobuf": message(b"\xff\xff", 1),
    "no method": message(asked("Attach", b"", WAIT), 1),
    "in an upload: noise": random.Random(3).randbytes(HEAD),
    "in an upload: a chunk of 4 GiB": struct.pack("<IIQQ", 0, (1 << 32) - 1, 0, 0),
    "in an upload: a chunk of 5 MiB": struct.pack("<IIQQ", 0, 5 << 20, 0, 0),
    "in an upload: a chunk of nothing": struct.pack("<IIQQ", 0, 0, 0, 0),
    "in an upload: another shard": struct.pack("<IIQQ", 1, 8, 0, 0),
    "in an upload: a message": message(b"abcd", 2),
}


@pytest.mark.parametrize("sends", INTRUSIONS)
def test_what_a_member_sends_in_place_of_a_question_or_of_gradients_is_refused(sends: str) -> None:
    with disturbed() as server, member(server) as stream:
        if sends.startswith("in an upload"):
            ask(stream, "Load", LOAD)
        stream.connection.sendall(INTRUSIONS[sends] + bytes(1000))
        answer = Receiving(stream)
        pass_all(answer)
        with pytest.raises(RayZeroError):
            read_answer(answer.message)
        stream.end_writing()
        stream.connection.settimeout(WAIT)
        assert ends(stream.connection)


def test_a_member_that_asks_too_slowly_is_cut_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_streams, "BODY_S", 0.5)
    stop, recorder = threading.Event(), MemoryRecorder()

    def trickle(connection: socket.socket) -> None:
        with suppress(OSError):
            while not stop.wait(0.005):  # never silent
                connection.sendall(b"\0")

    with disturbed() as server, member(server) as stream:
        server._tensors._answer.__self__._refusals._recorder = recorder  # type: ignore[attr-defined]
        stream.connection.sendall(struct.pack("<IIQQ", MESSAGE, 1 << 20, 0, 0))
        trickling = threading.Thread(target=trickle, args=(stream.connection,))
        trickling.start()
        answer = Receiving(stream)
        pass_all(answer)
        with pytest.raises(TransferError, match=r"rank 0 has sent no whole chunk within 0\.5 s"):
            read_answer(answer.message)
        stop.set()
        trickling.join(WAIT)
    assert recorder.total(REFUSED, door="owner", reason="slow") == 1


def test_a_member_that_sends_too_slowly_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_streams, "BODY_S", 0.5)
    with disturbed() as server, member(server) as stream:
        loading = ask(stream, "Load", LOAD)
        stream.connection.sendall(struct.pack("<IIQQ", 0, 8, 0, 0)[:4])
        with pytest.raises(TransferError, match=r"rank 0 has sent no whole chunk within 0\.5 s"):
            loading.answer()


@pytest.mark.parametrize("sent", [b"", b"bytes that are not taken yet"])
def test_a_client_that_ends_ends_its_transfer(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(owner_streams, "_LOOK_S", 0.05)
    with disturbed() as server:
        model, waits = server._models.made[0].model, Future[Any]()
        before = len(model.calls._tasks[""])
        with monkeypatch.context() as while_it_lasts, member(server) as stream:
            while_it_lasts.setattr(model, "compute", lambda *_: asyncio.wrap_future(waits))
            loading = ask(stream, "Load", LOAD)
            loading.send(0, memoryview(bytes(model.shard(0)[0].numel * 4)))
            stream.connection.sendall(sent)
            until(lambda: len(model.calls._tasks[""]) == before + 1)
            time.sleep(0.2)
        until(lambda: len(model.calls._tasks[""]) == before)


def test_an_answer_in_the_middle_of_an_upload_ends_it_and_is_read() -> None:
    """However much is still to be sent: the owner drops it until its answer is read."""
    request = pb.LoadRequest(units=[pb.LoadRequest.Unit(unit=99, shards=[0])])
    with disturbed() as server, member(server) as stream:
        loading = ask(stream, "Load", request)
        with pytest.raises(StoreError, match="99"):
            loading.send(0, memoryview(bytes(800 << 20)))
        assert not loading.has_ended


def test_an_answer_that_does_not_come_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_streams, "LATE_S", WAIT)  # a busy machine is no process that stood still
    with disturbed() as server, member(server) as stream:
        loading = ask(stream, "Load", LOAD, timeout_s=0.2)
        with pytest.raises(OverdueError) as late:
            loading.answer()
        assert not late.value.stood_still
    with wired() as (_, _, receiver, _):
        stopped = Transfer(receiver, "Load", b"", -WAIT - 5.0)
        with pytest.raises(OverdueError) as late:
            stopped.answer()
        assert late.value.stood_still, "nobody looked for all that time"


def test_ending_a_transfer_spares_the_one_that_has_its_connection_next() -> None:
    with disturbed() as server:
        opening = Opening.of(expect(server), protected=False)
        streams = TensorStreams(f"127.0.0.1:{opening.port}", lambda _: opening)
        fetch = pb.FetchRequest(rank=0, shards=[], version=0, kind="compute").SerializeToString()
        with streams.transfer("Fetch", fetch, WAIT) as first:
            first.answer()
        first.abort()
        with streams.transfer("Fetch", fetch, WAIT) as second:
            assert second._stream is first._stream
            second.answer()

        def aborted() -> None:
            with streams.transfer("Fetch", fetch, WAIT) as third:
                third.abort()
                third.answer()

        with pytest.raises(StreamEndedError):
            aborted()
        assert not streams._idle
        streams.close()


@pytest.mark.parametrize("keys", KEYS, ids=["plain", "encrypted"])
def test_a_message_comes_whole_or_in_place_of_bytes(keys: StreamKeys | None) -> None:
    with wired(keys) as (sender, after, receiver, before):
        for content in (b"x", bytes(70_000)):
            pass_all(message_on(sender, content))
        sender.close()
        wire = b"".join(iter(lambda: after.recv(1 << 16), b""))
        pushing = threading.Thread(target=before.sendall, args=(wire,))
        pushing.start()
        first = Receiving(receiver)
        pass_all(first)
        assert first.message == b"x"
        with pytest.raises(MessageCameError) as came:
            pass_all(Receiving(receiver, Assembly(3, 8, None)))
        assert came.value.content == bytes(70_000)
        pushing.join(WAIT)
    with wired() as (sender, *_), pytest.raises(TransferError, match="a message of 16,777,217 bytes is too long"):
        message_on(sender, bytes((16 << 20) + 1))


def test_a_call_that_is_cancelled_lets_go_of_memory_before_it_ends() -> None:
    """Its thread writes into a landing that the repeat of the push gets next."""

    async def cancel() -> None:
        with wired() as (_, _, receiver, before), ThreadPoolExecutor(1) as pool:
            before.sendall(b"\0")  # a part of a head: its thread waits for the rest
            stream = OwnerStream(receiver, "rank 0", pool)
            out, moving = np.zeros(8, dtype=np.uint8), Future[None]()
            advance = Receiving.advance

            def watched(self: Receiving) -> bool:
                try:
                    return advance(self)
                finally:
                    moving.set_result(None)

            with patch.object(Receiving, "advance", watched):
                landing = ShardDestination(shard=0, size_bytes=8, out=out)
                task = asyncio.create_task(stream.receive([landing]))
                await asyncio.sleep(0.02)
                for _ in range(3):  # a newer link, the end of this one, the end of the server
                    task.cancel()
                    await asyncio.sleep(0)
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert moving.done()
            stream.close()

    asyncio.run(cancel())


def test_a_port_that_stops_lets_transfers_end() -> None:
    async def stop() -> None:
        begun, go = asyncio.Event(), asyncio.Event()

        async def answer(*_: object) -> pb.TransferAnswer:
            begun.set()
            await go.wait()
            return pb.TransferAnswer(response=b"at last")

        port = TensorPort(MemoryRecorder(), answer)
        port.listen("127.0.0.1")
        openings = [port.expect("rank 0", STORE_SERVICE, "127.0.0.1", Unprotected) for _ in range(2)]
        streams = [
            TensorStreams(f"127.0.0.1:{opening.port}", lambda _, opening=opening: opening)
            for opening in (Opening.of(each, protected=False) for each in openings)
        ]
        idle = await asyncio.to_thread(streams[1].take)

        def fetch() -> bytes:
            with streams[0].transfer("Fetch", b"", WAIT) as transfer:
                return transfer.answer()

        fetching = asyncio.create_task(asyncio.to_thread(fetch))
        await begun.wait()
        stopping = asyncio.create_task(port.stop())
        assert await asyncio.to_thread(ends, idle.connection)
        go.set()
        assert await fetching == b"at last"
        await stopping
        for each in (idle, *streams):
            each.close()

    asyncio.run(stop())
