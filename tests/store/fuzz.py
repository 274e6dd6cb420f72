"""A training beside callers that may ask for nothing: strangers, other ranks, another run, damaged messages. They
replay what a rank has really sent, bend it, send messages filled at random, name connections that are not theirs, and
send noise to the port for tensors. Alone, it tries as many as one wants:

scripts/soak messages --messages 100000
"""

from __future__ import annotations

import argparse
import random
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import psutil
import torch
from google.protobuf.descriptor import FieldDescriptor

from rayzero.security.authority import Authority
from rayzero.security.credentials import OWNER, Identity, name_of_rank
from rayzero.store.wire.rpc import (
    OWNER_SERVICE,
    STORE_SERVICE,
    Metadata,
    life_metadata,
    methods,
    open_channel,
    seal,
    token_metadata,
)
from rayzero.store.wire.tensor_stream import TICKET_BYTES
from store.stores import TOKEN, connected, serving
from store.toy import WAIT, make_spec, masters, random_grads, start, take_step

RUN, OTHER = Authority("this run", on_loopback=True), Authority("another run", on_loopback=True)
AT_ONCE = 64  # calls under way
AT_THE_PORT = "a stranger at the port for tensors"
MOST_GROWTH = 128 << 20  # bytes of this process, which is the owner, the rank and the attackers


# ---- messages that no rank would send


VALUES: dict[int, Callable[[random.Random], Any]] = {
    FieldDescriptor.CPPTYPE_INT32: lambda draws: draws.choice([0, 1, -1, 2**31 - 1]),
    FieldDescriptor.CPPTYPE_INT64: lambda draws: draws.choice([0, 1, -1, 2**63 - 1]),
    FieldDescriptor.CPPTYPE_UINT32: lambda draws: draws.choice([0, 1, 2, 7, 2**32 - 1]),
    FieldDescriptor.CPPTYPE_UINT64: lambda draws: draws.choice([0, 1, 5, 2**64 - 1]),
    FieldDescriptor.CPPTYPE_DOUBLE: lambda draws: draws.choice([0.0, 1.0, -1.0, float("nan"), float("inf"), 1e308]),
    FieldDescriptor.CPPTYPE_BOOL: lambda draws: draws.random() < 0.5,
    FieldDescriptor.CPPTYPE_ENUM: lambda draws: draws.choice([0, 1, 2, 99]),
}
TEXTS = ["", "x", "../../etc/passwd", "/proc/1/nothing", "\u2603" * 50, "a" * 5000, "compute"]
BYTES = [b"", b"\0", b"{}", b"[]", b"null", b"\xff" * 9, b"a" * 5000]


def filled(message: Any, draws: random.Random, depth: int = 0) -> Any:
    """Some fields of a message, with any values."""
    for part in message.DESCRIPTOR.fields:
        kind = part.cpp_type
        is_map = part.message_type is not None and part.message_type.GetOptions().map_entry
        for _ in range(draws.randint(0, 3) if part.is_repeated else draws.random() < 0.65):
            if kind == FieldDescriptor.CPPTYPE_MESSAGE:
                if depth < 4 and not is_map:
                    inner = getattr(message, part.name)
                    filled(inner.add() if part.is_repeated else inner, draws, depth + 1)
                continue
            if kind == FieldDescriptor.CPPTYPE_STRING:
                value = draws.choice(BYTES if part.type == FieldDescriptor.TYPE_BYTES else TEXTS)
            else:
                value = VALUES[kind](draws)
            if part.is_repeated:
                getattr(message, part.name).append(value)
            else:
                setattr(message, part.name, value)
    return message


# ---- messages that a rank has sent


@dataclass(frozen=True)
class Call:
    """A call as it went: its path and its messages."""

    path: str
    messages: list[bytes]


class Recording(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Keeps what members send."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.on = True

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if not self.on or handler is None:
            return handler
        call = Call(details.method, [])
        self.calls.append(call)

        def receive(sent: bytes) -> Any:
            call.messages.append(sent)
            return sent if handler.request_deserializer is None else handler.request_deserializer(sent)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(handler.stream_stream, receive, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(handler.stream_unary, receive, handler.response_serializer)


def bent(messages: list[bytes], draws: random.Random) -> list[bytes]:
    """The messages with a flipped bit, shortened, lengthened or exchanged: never as they were."""
    found = list(messages) or [b""]
    at = draws.randrange(len(found))
    one = found[at]
    how = draws.randrange(4)
    if how == 0 and one:
        place = draws.randrange(len(one))
        found[at] = one[:place] + bytes([one[place] ^ 1 << draws.randrange(8)]) + one[place + 1 :]
    elif how == 1 and one:
        found[at] = one[: draws.randrange(len(one))]
    elif how == 2:
        found[at] = one + draws.randbytes(draws.choice([1, 8, 4096]))
    else:
        found[at] = draws.randbytes(len(one) + 1)
    return found


@dataclass(frozen=True)
class Attacker:
    """Somebody who may ask for nothing."""

    shown: Identity | None
    metadata: Metadata
    owners_methods: bool  # whether it also calls what ranks may not; else only what they may
    only_bent: bool = False  # it is a rank, whose messages are damaged


def attackers() -> dict[str, Attacker]:
    of_rank = {rank: Identity(RUN.issue(f"rank {rank}", [name_of_rank(rank)])) for rank in (0, 1)}
    token, guess = token_metadata(TOKEN), token_metadata("of another run")
    rank_0 = life_metadata(0, 0)
    return {
        "without TLS": Attacker(None, (*token, *rank_0), True),
        "another run's rank 0": Attacker(Identity(OTHER.issue("rank 0", [name_of_rank(0)])), (*token, *rank_0), True),
        "rank 0 with another run's token": Attacker(of_rank[0], (*guess, *rank_0), True),
        "rank 1 as rank 0": Attacker(of_rank[1], (*token, *rank_0), True),
        "rank 0, which does not say so": Attacker(of_rank[0], token, True),
        "rank 0, damaged": Attacker(of_rank[0], (*token, *rank_0), False, only_bent=True),
    }


@dataclass
class Fuzzed:
    """What came of it."""

    messages: int
    seconds: float
    served: list[str] = field(default_factory=list)  # who was answered, and what it had asked for
    codes: Counter[tuple[str, str]] = field(default_factory=Counter)  # by attacker and status
    steps: int = 0  # that were trained meanwhile
    grown: int = 0  # bytes
    differs: bool = False  # whether the weights are not those of a training that nobody disturbs


def drawn(attacker: Attacker, recorded: list[Call], draws: random.Random) -> tuple[str, list[bytes]]:
    """A path and messages: replayed, bent or filled."""
    known = [call for call in recorded if attacker.owners_methods or STORE_SERVICE in call.path]
    way = 1 if attacker.only_bent else draws.randrange(3)
    if way < 2:
        call = draws.choice([call for call in known if call.messages] if attacker.only_bent else known)
        return call.path, bent(call.messages, draws) if way else call.messages
    services = (STORE_SERVICE, OWNER_SERVICE) if attacker.owners_methods else (STORE_SERVICE,)
    method = draws.choice(list(methods(draws.choice(services)).values()))
    return method.path, [seal(filled(method.request(), draws))]


def attack(address: str, port: str, recorded: list[Call], found: Fuzzed, seed: int) -> None:
    """Send all messages, ``AT_ONCE`` at a time. ``address``: of the owner's calls; ``port``: of its tensors."""
    draws, everyone, under_way = random.Random(seed), attackers(), deque[tuple[str, str, Any]]()
    with ExitStack() as stack:
        channels = {who: stack.enter_context(open_channel(address, one.shown)) for who, one in everyone.items()}
        for _ in range(found.messages):
            who = draws.choice([*everyone, AT_THE_PORT])
            if who == AT_THE_PORT:
                intrude(port, noise(draws), found)
                continue
            path, messages = drawn(everyone[who], recorded, draws)
            call = channels[who].stream_unary(path)
            sent = call.future(iter(messages), metadata=everyone[who].metadata, timeout=WAIT)
            under_way.append((who, path, sent))
            if len(under_way) >= AT_ONCE:
                _see(*under_way.popleft(), found)
        while under_way:
            _see(*under_way.popleft(), found)


def noise(draws: random.Random) -> bytes:
    """Too little for a ticket, as much, or more."""
    return draws.randbytes(draws.choice([0, 1, TICKET_BYTES - 1, TICKET_BYTES, TICKET_BYTES + 1, 4096]))


def intrude(port: str, shown: bytes, found: Fuzzed) -> None:
    """Show something to the port for tensors, and look whether the owner says more than that it hangs up."""
    host, _, number = port.rpartition(":")
    with socket.create_connection((host, int(number)), timeout=WAIT) as connection:
        answer = b""
        with suppress(ConnectionError):  # it hangs up
            connection.sendall(shown)
            with suppress(OSError):  # "not connected": it hangs up
                connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(1)
    found.codes[AT_THE_PORT, "SERVED" if answer else "ENDED"] += 1
    if answer:
        found.served.append(AT_THE_PORT)


def _see(who: str, path: str, sent: Any, found: Fuzzed) -> None:
    error = sent.exception(timeout=WAIT)
    code = grpc.StatusCode.OK if error is None else error.code()
    found.codes[who, code.name] += 1
    if error is None:
        found.served.append(f"{who}: {path}")


def train(goes_on: Callable[[int], bool], recording: Recording | None = None) -> Iterator[Any]:
    """Yields the owner's addresses, of its calls and its tensors, once it has made two steps and what a rank sends is
    recorded; then trains while ``goes_on``, and yields the steps and the weights."""
    spec, step = make_spec(1), 0
    interceptors = [] if recording is None else [recording]
    shown = Identity(RUN.issue("rank 0", [name_of_rank(0)]))
    with (
        serving(tls=Identity(RUN.issue("optimizer", [OWNER])), interceptors=interceptors) as (server,),
        connected([server], tls=shown) as stores,
    ):
        ranks = start(stores, spec)
        while step < 2 or goes_on(step):
            take_step(ranks, [random_grads(spec, step)], 0.5)
            step += 1
            if step == 2:
                yield server.address, server.tensor_address(server.address)
        yield step, masters(ranks[0])


def fuzz(messages: int, seed: int) -> Fuzzed:
    """Train beside the attackers, and alone as many steps."""
    recording, found, began = Recording(), Fuzzed(messages, 0.0), time.monotonic()
    ended = threading.Event()
    training = train(lambda step: not ended.is_set(), recording)
    address, port = next(training)
    recording.on = False
    recorded = [call for call in recording.calls if call.messages]
    before = psutil.Process().memory_info().rss

    def run() -> None:
        try:
            attack(address, port, recorded, found, seed)
        finally:
            ended.set()

    attacking = threading.Thread(target=run)
    attacking.start()
    found.steps, weights = next(training)
    attacking.join()
    found.grown = psutil.Process().memory_info().rss - before
    training.close()
    alone = train(lambda step: step < found.steps)
    next(alone)
    _, undisturbed = next(alone)
    alone.close()
    found.differs = not all(torch.equal(weights[name], undisturbed[name]) for name in undisturbed)
    found.seconds = time.monotonic() - began
    return found


def main() -> None:
    """Try, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = fuzz(options.messages, options.seed)
    for (who, code), number in sorted(found.codes.items()):
        print(f"{who:32} {code:20} {number:7,}")
    tried = sum(found.codes.values()) == options.messages
    right = tried and not found.served and not found.differs and found.grown < MOST_GROWTH
    print(
        f"{sum(found.codes.values()):,} messages in {found.seconds:.0f} s: served {len(found.served)}, memory grew by "
        f"{found.grown / (1 << 20):.0f} MiB, weights after {found.steps:,} steps "
        f"{'differ' if found.differs else 'are those of an undisturbed training'}"
    )
    if not right:
        print(f"FAILED scripts/soak messages --seed {options.seed} --messages {options.messages}")
    sys.exit(not right)


if __name__ == "__main__":
    main()
