"""Clients that mean harm, or are broken: they are cut, memory stays bounded, and training goes on."""

from __future__ import annotations

import gc
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from rayzero.errors import RayZeroError, StoreError
from rayzero.security.authority import Authority
from rayzero.security.credentials import OWNER, Identity
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.calls.allowance import CALLS
from rayzero.store.owner.calls.long_calls import WAITING_CALLS
from rayzero.store.owner.server import OwnerServer
from rayzero.store.wire.rpc import (
    OWNER_SERVICE,
    STORE_SERVICE,
    from_status,
    life_metadata,
    methods,
    open_channel,
    seal,
    token_metadata,
    transfers,
)
from rayzero.store.wire.tensor_streams import OverdueError, Transfer
from store.fuzz import MOST_GROWTH, attackers, filled, fuzz
from store.http2 import ACK, DATA, END_HEADERS, END_STREAM, HEADERS, OPENING, RESET, SETTINGS, frame, headers
from store.stores import TOKEN, connected, serving
from store.test_tensor_streams import member
from store.toy import WAIT, initial_values, make_spec, masters, random_grads, start, started, take_step
from tests.support.waiting import until

SHOWN = Identity(Authority("hostile", on_loopback=True).issue("all", [OWNER, "rank-0.rayzero"]))
MIB = 1 << 20


@contextmanager
def training_goes_on(shown: Identity | None, most_bytes: int) -> Iterator[OwnerServer]:
    """A rank takes a step before the block and after it; the process grows by less than ``most_bytes`` meanwhile."""
    with serving(tls=shown) as (server,), started(connected([server], tls=shown), make_spec(1)) as ranks:
        take_step(ranks, [random_grads(ranks[0].spec, 1)], 0.5)
        before = psutil.Process().memory_info().rss
        yield server
        assert psutil.Process().memory_info().rss - before < most_bytes
        take_step(ranks, [random_grads(ranks[0].spec, 2)], 0.5)
        assert masters(ranks[0])


def connect(server: OwnerServer) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def is_cut(connection: socket.socket) -> bool:
    """Whether the server ends the connection within the socket's timeout."""
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


SAID = {
    "noise": lambda draws: draws.randbytes(1 << 16),
    "another protocol": lambda draws: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "half a TLS hello": lambda draws: bytes.fromhex("160301020001fc0303") + draws.randbytes(40),
    "nothing": lambda draws: b"",
    "half an HTTP/2 preface": lambda draws: b"PRI * HTTP/2",
}


@pytest.mark.spread(4)
@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("shown", [None, SHOWN], ids=["plain", "tls"])
def test_clients_that_do_not_speak_the_protocol_are_cut(said: str, shown: Identity | None) -> None:
    draws = random.Random(1)
    with training_goes_on(shown, 64 * MIB) as server, ExitStack() as stack:
        connections = [stack.enter_context(connect(server)) for _ in range(100)]
        for connection in connections:
            try:
                connection.sendall(SAID[said](draws))
            except OSError:  # cut already
                continue
        began = time.monotonic()
        assert all(map(is_cut, connections))
        assert time.monotonic() - began < 60  # grpc itself gives them two minutes


# ---- frames of HTTP/2 by hand: grpc's own client sends no lies


@pytest.mark.promise("bounded", "tls")
@pytest.mark.parametrize("service", ["StoreService/Push", "StoreService/Attach", "OwnerService/Apply"])
@pytest.mark.parametrize("token", [TOKEN, "guess"])
def test_a_message_that_claims_two_gigabytes_is_refused(service: str, token: str) -> None:
    with training_goes_on(None, 64 * MIB) as server, ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(connect(server))
            metadata = (*token_metadata(token), *life_metadata(0, 0))
            call = frame(HEADERS, END_HEADERS, 1, headers(f"/rayzero.v1.{service}", metadata))
            body = frame(DATA, 0, 1, b"\0\x7f\xff\xff\xff" + bytes(1000))
            connection.sendall(OPENING + frame(SETTINGS, 0, 0) + call + body)
            wait_for_end(connection)


def wait_for_end(connection: socket.socket) -> None:
    """Until the server ends stream 1 or the connection. Raises TimeoutError if the call is neither answered nor
    reset."""
    for kind, flags, stream, _ in frames(connection):
        if stream == 1 and is_end(kind, flags):
            return


def is_end(kind: int, flags: int) -> bool:
    return kind == RESET or (kind == HEADERS and bool(flags & END_STREAM))


def test_a_connection_may_have_a_thousand_streams_and_a_member_far_fewer_bodies() -> None:
    """The server says so to every client, and ends what a member opens beyond its allowance."""
    with training_goes_on(None, 64 * MIB) as server, connect(server) as connection:
        metadata = (*token_metadata(TOKEN), *life_metadata(0, 0))
        block = headers("/rayzero.v1.StoreService/Attach", metadata)
        connection.sendall(OPENING + frame(SETTINGS, 0, 0))
        connection.sendall(b"".join(frame(HEADERS, END_HEADERS, 2 * number + 1, block) for number in range(3_000)))
        most, ended = 0, set[int]()
        for kind, flags, stream, content in frames(connection):
            if kind == SETTINGS and not flags & ACK:
                most = dict(struct.iter_unpack(">HI", content)).get(3, most)  # RFC 9113, 6.5.2
            elif is_end(kind, flags):
                ended.add(stream)
            if len(ended) >= 3_000 - CALLS:
                break
        assert most == 1000
        assert len(ended) == 3_000 - CALLS


def frames(connection: socket.socket) -> Iterator[tuple[int, int, int, bytes]]:
    """(kind, flags, stream, content) of what the server sends, until it ends. Raises TimeoutError."""
    received = b""
    with suppress(ConnectionError):
        while more := connection.recv(1 << 16):
            received += more
            while len(received) >= 9 + (size := int.from_bytes(received[:3], "big")):
                content = received[9 : 9 + size]
                yield received[3], received[4], int.from_bytes(received[5:9], "big"), content
                received = received[9 + size :]


# ---- messages that no rank would send


@pytest.mark.thorough
def test_messages_of_those_who_may_ask_for_nothing_disturb_no_training() -> None:
    """Replays of what a rank has sent, by other ranks and another run, bent ones, and random ones; ``store.fuzz`` tries
    100,000."""
    found = fuzz(2_000, seed=1)
    assert found.served == []
    assert sum(found.codes.values()) == 2_000
    assert len(found.codes) >= len(attackers())
    assert found.grown < MOST_GROWTH
    assert found.steps > 2
    assert not found.differs


ASKED_IN_VAIN = {
    "Mean": lambda number: pb.MeanRequest(rank=1, number=number + 1, values=[0.0]),
    "GetDecision": lambda number: pb.GetDecisionRequest(step=1000 + number),
    "Keep": lambda number: pb.KeepRequest(rank=1, state=pb.LoopState(part=number + 2, content=b"x")),
}


@pytest.mark.parametrize(("method", "taken"), [("Mean", WAITING_CALLS), ("GetDecision", WAITING_CALLS), ("Keep", 0)])
def test_what_a_rank_asks_for_in_vain_is_refused_soon(method: str, taken: int) -> None:
    """Whole calls, which an owner would keep for ever: means that no other rank makes, say. Others notice nothing."""
    with serving() as (server,), started(connected([server], world_size=2), make_spec(2)) as ranks:
        metadata, most = (*token_metadata(TOKEN), *life_metadata(1, 0)), WAITING_CALLS + 10 - taken
        with open_channel(server.address, None) as channel:
            call = methods(STORE_SERVICE)[method].bind(channel)
            asked = [
                call.future(ASKED_IN_VAIN[method](number), metadata=metadata, timeout=WAIT)
                for number in range(WAITING_CALLS + 10)
            ]
            until(lambda: sum(each.done() for each in asked) == most)
            refused = [from_status(each.exception(), "the owner") for each in asked if each.done()]
        assert all(type(error) is StoreError and str(error).startswith("rank 1 has ") for error in refused)
        assert ranks[0].fetch(0).keys() == initial_values(ranks[0].spec).keys()
        kept = [each for each in gc.get_objects() if isinstance(each, grpc.aio.AbortError)]
        assert all(each.__context__ is None for each in kept), "grpc keeps them, and so it would keep what was refused"


@pytest.mark.promise("safe", "transports")
@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_member_sends_is_answered_by_name(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the token and the certificate of an owner and a rank. What it says may end the run, in words."""
    monkeypatch.chdir(tmp_path)  # where it may have checkpoints written
    draws, unnamed = random.Random(seed), list[Any]()
    ends = {"Notices", "Leave", "Abort"}
    with serving() as (server,), connected([server]) as stores:
        start(stores, make_spec(1))
        with open_channel(server.address, None) as channel:
            known = [
                (service, name, method, channel.stream_unary(method.path))
                for service in (STORE_SERVICE, OWNER_SERVICE)
                for name, method in methods(service).items()
                if name not in ends
            ]
            for _ in range(500):
                service, name, method, call = draws.choice(known)
                metadata = token_metadata(TOKEN) + (life_metadata(0, 0) if service == STORE_SERVICE else ())
                try:
                    call(iter([seal(filled(method.request(), draws))]), metadata=metadata, timeout=0.3)
                except grpc.RpcError as error:
                    named = "rayzero-error" in dict(error.trailing_metadata() or ())
                    if not named and error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                        unnamed.append((name, error.code(), error.details()))
        for _ in range(150):
            name, method = draws.choice(list(transfers(STORE_SERVICE).items()))
            with member(server) as stream:
                transfer = Transfer(stream, name, filled(method.request(), draws).SerializeToString(), 0.3)
                with suppress(OSError):  # the owner has answered
                    stream.connection.sendall(draws.randbytes(draws.choice([0, 24, 4096])))
                with suppress(RayZeroError, OverdueError):
                    transfer.answer()
    assert unnamed == []
