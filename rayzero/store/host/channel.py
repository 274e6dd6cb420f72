"""One channel of a link to an owner: calls, the stream of the owner's notices, and transfers beside it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

import grpc

from rayzero.concurrency.event_loop import shared_loop
from rayzero.errors import RayZeroError, StallError, StoreClosedError, StoreError, TransferError
from rayzero.security.credentials import Identity
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.wire.grpc_channel import GrpcChannel, shared_channels
from rayzero.store.wire.rpc import (
    FOLLOWER_SERVICE,
    OWNER_SERVICE,
    STORE_SERVICE,
    LinkNumber,
    Metadata,
    from_status,
    gave_no_answer,
    is_broken_link,
    life_metadata,
    methods,
)
from rayzero.store.wire.tensor_stream import StreamEndedError
from rayzero.store.wire.tensor_streams import (
    LATE_S,
    LET_THROUGH,
    Opening,
    OverdueError,
    TensorStreams,
    Transfer,
    UnreachedPortError,
)


@dataclass(frozen=True, slots=True)
class Caller:
    """A rank, the lead, an optimizer actor that keeps a copy of an owner's parameters for its host, or a follower."""

    name: str  # "rank 3", "the lead", "optimizer 1" or "follower 8a41", for messages and as the name of its links
    service: str  # whose methods it calls
    number: int  # of the rank or the optimizer actor; -1: its links say who it is
    metadata: Metadata = ()  # of each of its calls

    @classmethod
    def rank(cls, rank: int, life: int = 0) -> Caller:
        """``life``: how often the rank has died and come back."""
        return cls(f"rank {rank}", STORE_SERVICE, rank, life_metadata(rank, life))

    @classmethod
    def optimizer(cls, owner: int) -> Caller:
        """An optimizer actor, by its number as an owner."""
        return cls(f"optimizer {owner}", OWNER_SERVICE, owner)

    @classmethod
    def lead(cls) -> Caller:
        """The owner of shard 0, as it calls the others."""
        return cls("the lead", OWNER_SERVICE, -1)

    @classmethod
    def taker(cls, owner: int) -> Caller:
        """An optimizer actor that takes shards over, by its number in the next epoch."""
        return cls(f"optimizer {owner} of the next epoch", OWNER_SERVICE, owner)

    @classmethod
    def follower(cls, name: str) -> Caller:
        """A process that takes no part in the run."""
        return cls(f"follower {name}", FOLLOWER_SERVICE, -1)

    @property
    def signature(self) -> Mapping[str, int]:
        """The field of a request that says who sends it."""
        if self.number < 0:
            return {}
        return {"rank" if self.service == STORE_SERVICE else "owner": self.number}


QUICK_S = 30.0  # deadline of calls that neither move tensors nor wait for anyone


class BrokenLinkError(TransferError):
    """A call or its answer did not get through."""


class NoStreamError(BrokenLinkError):
    """The owner answers calls, but a connection for tensors cannot be opened."""


class NoAnswerError(StallError):
    """A call's deadline passed without an answer. Not while this process was stopped, which says nothing of the owner:
    then the call is one that did not get through."""


class Channel:
    """One channel of a link, with the owner's notices, which a thread may follow: over a connection that others of
    this process use, too. All its calls end when it is closed."""

    transport = "grpc"

    def __init__(
        self,
        caller: Caller,
        peer: str,
        address: str,
        link: LinkNumber,
        metadata: Metadata,
        shown: Identity | None,
        awaited: Sequence[int] = (),
    ) -> None:
        """``peer``: the owner, for messages. ``shown``: None: without TLS. ``awaited``: ranks that must have attached
        to the owner before it sends a notice. Not on the event loop."""
        self.link = link
        self._caller, self.peer = caller, f"{caller.name}, {peer}"
        self._metadata, self._methods = (*metadata, *link.metadata), methods(caller.service)
        self._lock, self._given_up = threading.Lock(), False
        self.met = False  # the owner has answered, or it may get a successor
        self._loop = shared_loop()
        self._grpc = self._loop.submit(_taken(address, shown)).result()  # freed by: close()
        self._tensors = TensorStreams(address, self._expect)
        self._deadlines = WeakKeyDictionary[Future[Any], float]()  # of calls: monotonic seconds
        self._heard: SimpleQueue[pb.NoticesResponse | Exception] = SimpleQueue()
        self._notices = pb.NoticesRequest(ranks=awaited, **caller.signature)
        self._following: Future[None] | None = None
        self._closed = False

    async def _follow(self) -> None:
        try:
            async for notice in self._grpc.follow(self._methods["Notices"], self._notices, self._metadata):
                self._heard.put(notice)
            self._heard.put(StoreError(f"{self.peer} stopped"))
        except grpc.RpcError as error:
            self._heard.put(error)

    def start(self, method: str, request: Any, timeout_s: float) -> Future[Any]:
        """Start a call that has one answer; its callbacks run on the event loop. Raises BrokenLinkError if the channel
        is closed."""
        with self._lock:
            if self._given_up:
                raise BrokenLinkError(f"{self.peer}: the connection was closed")
            begun = self._loop.submit(self._grpc.call(self._methods[method], request, timeout_s, self._metadata))
            self._deadlines[begun] = time.monotonic() + timeout_s
        return begun

    def _expect(self, host: str) -> Opening:
        asked = pb.OpenTensorStreamRequest(host=host, **self._caller.signature)
        answer = self.answer(self.start("OpenTensorStream", asked, QUICK_S))
        return Opening.of(answer, protected=self._grpc.is_protected)

    @contextmanager
    def transfer(self, method: str, request: Any, timeout_s: float) -> Iterator[Transfer]:
        """A context for one transfer. Raises the owner's error, NoStreamError if no connection can be opened,
        BrokenLinkError if it ends or the channel is closed, NoAnswerError."""
        try:
            with self._tensors.transfer(method, request.SerializeToString(), timeout_s) as transfer:
                yield transfer
        except UnreachedPortError as unreached:
            raise NoStreamError(f"{self.peer}: {unreached}; {LET_THROUGH}") from unreached.__cause__
        except StreamEndedError as ended:
            raise BrokenLinkError(f"{self.peer}: {ended}") from ended
        except OverdueError as late:
            raise self._stood_still() if late.stood_still else NoAnswerError(f"{self.peer}: {late}") from None

    def answer(self, started: Future[Any]) -> Any:
        """The answer to a started call; blocks. Raises the owner's error, or BrokenLinkError."""
        try:
            return started.result()
        except (grpc.RpcError, CancelledError) as error:
            raise self._error(error, self._deadlines.get(started, math.inf)) from error

    def notices(self) -> Iterator[pb.NoticesResponse]:
        """The notices. Raises as ``answer`` does at their end."""
        with self._lock:
            if not self._given_up:
                self._following = self._loop.submit(self._follow())
        while True:
            heard = self._heard.get()
            if isinstance(heard, RayZeroError):
                raise heard
            if isinstance(heard, Exception):
                raise self._error(heard) from heard
            yield heard

    def _error(self, error: Exception, until: float = math.inf) -> RayZeroError:
        """The RayZeroError of a failed call. ``until``: its deadline, on the monotonic clock."""
        if not isinstance(error, grpc.RpcError) or error.code() is grpc.StatusCode.CANCELLED:
            if self._given_up:
                return BrokenLinkError(f"{self.peer}: the connection was closed")
            return StoreClosedError(f"{self.peer}: the call was ended")
        if is_broken_link(error, met=self.met):
            self._loop.loop.call_soon_threadsafe(self._forget)
            broken = BrokenLinkError(str(from_status(error, self.peer)))
            broken.__cause__ = error
            return broken
        if gave_no_answer(error):
            if time.monotonic() > until + LATE_S:
                return self._stood_still()
            return NoAnswerError(str(from_status(error, self.peer)))
        return from_status(error, self.peer)

    def _forget(self) -> None:
        shared_channels().forget(self._grpc)

    def _stood_still(self) -> BrokenLinkError:
        return BrokenLinkError(f"{self.peer}: this process stood still while it waited for an answer")

    def give_up(self) -> None:
        """End the notices, so that the link's thread closes the channel; does not block."""
        with self._lock:
            self._given_up = True
            following = self._following
        if following is not None:
            following.cancel()
        self._heard.put(CancelledError())

    def close(self) -> None:
        """End every call; waits until all callbacks of calls have run. Idempotent."""
        self.give_up()
        self._tensors.close()
        for call in list(self._deadlines):
            call.cancel()  # no effect on one that has ended
        with self._lock:
            closed, self._closed = self._closed, True
            self._following = None  # which keeps gRPC's call, and that the connection
        if not closed:
            self._loop.loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        shared_channels().leave(self._grpc)


async def _taken(address: str, shown: Identity | None) -> GrpcChannel:
    return shared_channels().take(address, shown)
