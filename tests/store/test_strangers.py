"""Callers cannot fill an owner's memory, whatever they send and however slowly; those without the token least."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from forked import forked

from rayzero.store.owner.calls.allowance import BODIES
from rayzero.store.owner.calls.allowance import CALLS as CALLS_AT_ONCE
from rayzero.store.owner.server import SERVICE
from rayzero.store.wire.rpc import (
    CHANNEL_OPTIONS,
    OWNER_SERVICE,
    STORE_SERVICE,
    life_metadata,
    token_metadata,
)
from store.http2 import UnendedCalls
from store.stores import TOKEN
from store.toy import WAIT

MIB = 1 << 20
WINDOW = 64 << 10  # of HTTP/2: what a call may send that nobody reads
BODY = bytes(48 * MIB)
CALLS = 6  # at once, of one method
ROOM = CALLS * len(BODY) // 3  # the owner's memory may grow by; HTTP/2's flow control lets through some MiB a call


@pytest.fixture(scope="module")
def owner() -> Iterator[tuple[str, int]]:
    """The address and the process id of an owner alone in its process."""
    program = f"""
        from rayzero.store.owner.server import serve_models
        from rayzero.store.owner.hosted import HostedModels
        server = serve_models(HostedModels(0, 1), token={TOKEN!r})
        print(server.address, flush=True)
        input()
    """
    with forked(program, quiet=True) as process:
        yield process.said(), process.pid


def peak(pid: int) -> int:
    """The most memory a process has had since ``forget_peak``, in bytes."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def code_of(call: grpc.Future) -> grpc.StatusCode:
    try:
        call.result(WAIT)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def large_calls(address: str, path: str, metadata: object = ()) -> list[grpc.StatusCode]:
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        call = channel.unary_unary(path)
        calls = [call.future(BODY, metadata=metadata, timeout=WAIT) for _ in range(CALLS)]
        return [code_of(call) for call in calls]


@pytest.mark.parametrize("path", [f"/{STORE_SERVICE}/Attach", f"/{OWNER_SERVICE}/Apply", f"/{SERVICE}/Check"])
def test_large_bodies_are_not_read(owner: tuple[str, int], path: str) -> None:
    address, pid = owner
    large_calls(address, path)  # what the first calls leave for good is not counted
    forget_peak(pid)
    before = peak(pid)
    codes = set(large_calls(address, path))
    assert peak(pid) - before < ROOM
    assert codes == {grpc.StatusCode.OK if path.endswith("Check") else grpc.StatusCode.UNAUTHENTICATED}


def test_the_measure_sees_bodies_that_are_read(owner: tuple[str, int]) -> None:
    """The same calls with the token: their bodies are parsed, and no AttachRequest."""
    address, pid = owner
    forget_peak(pid)
    before = peak(pid)
    codes = large_calls(address, f"/{STORE_SERVICE}/Attach", (*token_metadata(TOKEN), *life_metadata(0, 0)))
    assert peak(pid) - before > ROOM
    assert grpc.StatusCode.OK not in codes


def test_streams_that_never_end_are_refused_as_they_open(owner: tuple[str, int]) -> None:
    """Hundreds of them, by a caller that sends nothing: each is over at once, and nothing of it stays."""
    address, pid = owner
    stop = threading.Event()

    def silent() -> Iterator[bytes]:
        stop.wait(WAIT)
        yield from ()

    forget_peak(pid)
    before, threads = peak(pid), psutil.Process(pid).num_threads()
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        attach = channel.stream_stream(f"/{STORE_SERVICE}/Attach")
        try:
            for _ in range(10):
                calls = [attach(silent(), timeout=WAIT) for _ in range(50)]
                assert {call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
        finally:
            stop.set()
    assert peak(pid) - before < ROOM
    assert psutil.Process(pid).num_threads() <= threads + 8


def test_only_so_many_watch_an_owners_health(owner: tuple[str, int]) -> None:
    address, _ = owner
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        watch = channel.unary_stream(f"/{SERVICE}/Watch")
        watching = [watch(b"", timeout=WAIT) for _ in range(64)]
        for call in watching:
            next(call)
        with pytest.raises(grpc.RpcError) as refused:
            next(watch(b"", timeout=WAIT))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in watching:
            call.cancel()


# ---- members, who have the token


def test_a_member_that_ends_none_of_a_thousand_messages_fills_no_memory(owner: tuple[str, int]) -> None:
    """Each of 2 MiB: few are read, the others may send what HTTP/2's window lets through, and the rest is refused."""
    address, pid = owner
    forget_peak(pid)
    before = peak(pid)
    room = BODIES * 2 * MIB + CALLS_AT_ONCE * WINDOW + 200 * MIB  # and gRPC's own for 1,000 calls
    metadata = (*token_metadata(TOKEN), *life_metadata(0, 0))
    calls = UnendedCalls(address, f"/{STORE_SERVICE}/Attach", metadata, 1000, 2 * MIB)
    try:
        most = min(4 * room, 1_800 * MIB)  # calls may have sent much when they are refused; all of them have more
        calls.send(most, 4.0)  # a server on a busy machine may pause for more than a second
        assert peak(pid) - before < room
        assert calls.sent < most < 1000 * 2 * MIB, "the server takes ever more"
        assert len(calls.ended) == 1000 - CALLS_AT_ONCE
    finally:
        calls.close()
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:  # it goes on
        check = channel.unary_unary(f"/{SERVICE}/Check")
        assert check(b"", timeout=WAIT) == b"\x08\x01"
