"""One channel of a link to an owner: calls, the stream of the owner's notices, and transfers beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import grpc

from rayzero.errors import RayZeroError, StallError, StoreClosedError, TransferError
from rayzero.security.credentials import Identity
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
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
    open_channel,
)
from rayzero.store.wire.tensor_stream import StreamEndedError
from rayzero.store.wire.tensor_streams import (
    LET_THROUGH,
    Opening,
    OverdueError,
    TensorStreams,
    Transfer,
    UnreachedPortError,
)


@dataclass(frozen=True, slots=True)
class Caller:
    """A rank, an optimizer actor that keeps a copy of an owner's parameters for its host, or a follower."""

    name: str  # "rank 3", "optimizer 1" or "follower 8a41", for messages and as the name of its links
    service: str  # whose methods it calls
    number: int
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
    def follower(cls, name: str) -> Caller:
        """A process that takes no part in the run; its links say who it is."""
        return cls(f"follower {name}", FOLLOWER_SERVICE, 0)

    @property
    def signature(self) -> Mapping[str, int]:
        """The field of a request that says who sends it."""
        if self.service == FOLLOWER_SERVICE:
            return {}
        return {"rank" if self.service == STORE_SERVICE else "owner": self.number}


QUICK_S = 30.0  # deadline of calls that neither move tensors nor wait for anyone
_LATE_S = 1.0  # after a call's deadline: grpc tells of it at once, unless the whole process is stopped


class BrokenLinkError(TransferError):
    """A call or its answer did not get through."""


class NoStreamError(BrokenLinkError):
    """The owner answers calls, but a connection for tensors cannot be opened."""


class NoAnswerError(StallError):
    """A call's deadline passed without an answer. Not while this process was stopped, which says nothing of the owner:
    then the call is one that did not get through."""


class Channel:
    """One channel of a link, with the stream of the owner's notices. All its calls end when it is closed."""

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
        to the owner before it sends a notice."""
        self.link = link
        self._caller, self.peer = caller, f"{caller.name}, {peer}"
        self._metadata = (*metadata, *link.metadata)
        self._channel = open_channel(address, shown)
        self._is_protected = shown is not None and shown.protects(address)
        self._calls = {name: method.bind(self._channel) for name, method in methods(caller.service).items()}
        self._given_up = False
        self.met = False  # the owner has answered, or it may get a successor
        self._tensors = TensorStreams(address, self._expect)
        self._deadlines = WeakKeyDictionary[Any, float]()  # of calls, which are their own errors: monotonic seconds
        asked = pb.NoticesRequest(ranks=awaited, **caller.signature)
        self.notices: Any = self._begin(self._calls["Notices"], asked, None)

    def start(self, method: str, request: Any, timeout_s: float) -> Any:
        """Start a call that has one answer. Returns grpc's future. Raises BrokenLinkError if the channel is closed."""
        return self._begin(self._calls[method].future, request, timeout_s)

    def _begin(self, call: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
        try:
            begun = call(request, timeout=timeout_s, metadata=self._metadata)
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel is closed
            raise self.error(error) from error
        if timeout_s is not None:
            self._deadlines[begun] = time.monotonic() + timeout_s
        return begun

    def _expect(self, host: str) -> Opening:
        asked = pb.OpenTensorStreamRequest(host=host, **self._caller.signature)
        answer = self.answer(self.start("OpenTensorStream", asked, QUICK_S))
        return Opening.of(answer, protected=self._is_protected)

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

    def answer(self, started: Any) -> Any:
        """The answer to a started call; blocks. Raises the owner's error, or BrokenLinkError."""
        try:
            return started.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            raise self.error(error) from error

    def messages(self, stream: Any) -> Iterator[Any]:
        """The answers to a stream. A reader that stops early cancels it. Raises as ``answer`` does."""
        try:
            yield from stream
        except grpc.RpcError as error:
            raise self.error(error) from error
        finally:
            stream.cancel()  # no effect on a stream that has ended

    def error(self, error: Exception) -> RayZeroError:
        """The RayZeroError of a failed call."""
        cancelled = not isinstance(error, grpc.RpcError) or error.code() is grpc.StatusCode.CANCELLED
        if cancelled and (self._given_up or isinstance(error, ValueError)):
            return BrokenLinkError(f"{self.peer}: the connection was closed")
        if not isinstance(error, grpc.RpcError):
            return StoreClosedError(f"{self.peer}: the call was ended")
        if is_broken_link(error, met=self.met):
            broken = BrokenLinkError(str(from_status(error, self.peer)))
            broken.__cause__ = error
            return broken
        if gave_no_answer(error):
            if time.monotonic() > self._deadlines.get(error, math.inf) + _LATE_S:
                return self._stood_still()
            return NoAnswerError(str(from_status(error, self.peer)))
        return from_status(error, self.peer)

    def _stood_still(self) -> BrokenLinkError:
        return BrokenLinkError(f"{self.peer}: this process stood still while it waited for an answer")

    def give_up(self) -> None:
        """End the notices, so that the link's thread closes the channel; does not block."""
        self._given_up = True
        self.notices.cancel()

    def close(self) -> None:
        """End every call and the connection; waits until all callbacks of calls have run. Idempotent."""
        self._given_up = True
        self._tensors.close()
        self._channel.close()
