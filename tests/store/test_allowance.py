"""What one caller may have an owner hold: the next call is refused by name, and a body that does not come is cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from rayzero.errors import StoreError
from rayzero.security.authority import Authority
from rayzero.security.credentials import OWNER, Identity, name_of_rank
from rayzero.store.owner.calls import allowance
from rayzero.store.owner.calls.allowance import BODIES, CALLS, Allowance, Allowances
from rayzero.store.wire.rpc import (
    STORE_SERVICE,
    from_status,
    life_metadata,
    methods,
    open_channel,
    token_metadata,
)
from rayzero.telemetry.names import REFUSED
from rayzero.telemetry.recorder import MemoryRecorder
from store.stores import TOKEN, serving
from store.toy import WAIT

METADATA = (*token_metadata(TOKEN), *life_metadata(3, 0))


async def one(message: bytes) -> AsyncIterator[bytes]:
    yield message


def test_so_many_bodies_are_read_at_once_and_so_many_wait() -> None:
    async def ask() -> None:
        read: list[int] = []

        async def body() -> AsyncIterator[bytes]:
            read.append(1)
            await asyncio.Event().wait()
            yield b""

        own = Allowance("rank 3")
        calls = [asyncio.ensure_future(own.body(body())) for _ in range(CALLS)]
        await asyncio.sleep(0.05)
        assert len(read) == BODIES
        with pytest.raises(StoreError, match=r"rank 3 has 256 calls whose bodies do not come"):
            await own.body(one(b"x"))
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert await own.body(one(b"x")) == b"x"

    asyncio.run(ask())


def test_callers_are_told_apart_by_certificate_or_host_and_rank() -> None:
    known, tls = Allowances(), {"transport_security_type": [b"ssl"]}
    metadata = {rank: life_metadata(rank, 0) for rank in (0, 1)}

    def names(name: bytes) -> dict[str, list[bytes]]:
        return {**tls, "x509_subject_alternative_name": [name]}

    first = known.of("ipv4:10.0.0.1:50", {}, metadata[0])
    assert known.of("ipv4:10.0.0.1:51", {}, metadata[0]) is first, "another connection"
    assert known.of("ipv4:10.0.0.1:51", {}, metadata[1]) is not first
    assert known.of("ipv4:10.0.0.2:50", {}, metadata[0]) is not first
    shown = known.of("ipv4:10.0.0.1:50", names(b"rank-0.rayzero"), metadata[0])
    assert shown is not first
    assert known.of("ipv6:[fd00::1]:50", names(b"rank-0.rayzero"), metadata[0]) is shown, "wherever it is"
    del first, shown
    assert len(known._known) == 0, "nothing is kept of callers without calls"


def silent() -> Iterator[bytes]:
    asyncio.run(asyncio.sleep(WAIT))
    yield b""


def test_a_call_without_its_message_is_named() -> None:
    with serving() as (server,), open_channel(server.address, None) as channel:
        call: Any = channel.stream_unary(methods(STORE_SERVICE)["Attach"].path)
        with pytest.raises(grpc.RpcError) as refused:
            call(iter([]), metadata=METADATA, timeout=WAIT)
        assert "has sent a call without its message" in str(from_status(refused.value, "the owner"))


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("token", grpc.StatusCode.UNAUTHENTICATED),
        ("role", grpc.StatusCode.FAILED_PRECONDITION),
        ("limit", grpc.StatusCode.FAILED_PRECONDITION),
        ("slow", grpc.StatusCode.DATA_LOSS),
    ],
)
def test_who_is_refused_or_cut_is_counted_by_reason(
    reason: str, code: grpc.StatusCode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``grpc`` itself cuts who ends no handshake: tests/store/test_hostile.py."""
    monkeypatch.setattr(allowance, "BODY_S", 0.1 if reason == "slow" else WAIT)
    monkeypatch.setattr(allowance, "CALLS", 0 if reason == "limit" else allowance.CALLS)
    run = Authority("refusing", on_loopback=True)
    owner, rank = (Identity(run.issue(name, [name])) for name in (OWNER, name_of_rank(4 if reason == "role" else 3)))
    metadata = METADATA if reason != "token" else (*token_metadata("guess"), *METADATA[3:])
    recorder = MemoryRecorder()
    with (
        serving(recorder=recorder, tls=owner) as (server,),
        open_channel(server.address, rank) as channel,
    ):
        call: Any = channel.stream_unary(methods(STORE_SERVICE)["Attach"].path)
        with pytest.raises(grpc.RpcError) as refused:
            call(silent(), metadata=metadata, timeout=WAIT)
    assert refused.value.code() is code
    said = "rank 3 (rank-3.rayzero) has sent no whole message within 0.1 s"
    assert (said in str(from_status(refused.value, "the owner"))) == (reason == "slow")
    assert {why: recorder.total(REFUSED, door="owner", reason=why) for why in ("token", "role", "limit", "slow")} == {
        why: float(why == reason) for why in ("token", "role", "limit", "slow")
    }
    assert [line for line in caplog.messages if line.startswith("refused 1 call, the last from ")] != []
