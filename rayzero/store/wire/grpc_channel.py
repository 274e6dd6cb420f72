"""gRPC's connections to owners: this process has one to each, for all its calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from weakref import WeakKeyDictionary

import grpc

from rayzero.security.credentials import Identity
from rayzero.store.wire.rpc import Metadata, Method, open_channel


class GrpcChannel:
    """A connection to one owner. Lives on the event loop.

    Knows messages; not who calls what, or over which link."""

    def __init__(self, address: str, shown: Identity | None) -> None:
        """``shown``: None: without TLS. Freed by: close()."""
        self.address, self.shown = address, shown
        self.is_protected = shown is not None and shown.protects(address)
        self.users = 0
        self._channel = open_channel(address, shown, grpc.aio)
        self._bound: dict[str, Any] = {}  # by path

    def _bind(self, method: Method) -> Any:
        found = self._bound.get(method.path)
        if found is None:
            found = self._bound[method.path] = method.bind(self._channel)
        return found

    async def call(self, method: Method, request: Any, timeout_s: float, metadata: Metadata) -> Any:
        """The answer to a call. Raises grpc.RpcError."""
        return _whole(await self._bind(method)(request, timeout=timeout_s, metadata=metadata))

    async def follow(self, method: Method, request: Any, metadata: Metadata) -> AsyncIterator[Any]:
        """The answers to a call that has several. Raises grpc.RpcError."""
        answers = self._bind(method)(request, metadata=metadata)
        try:
            async for answer in answers:
                yield _whole(answer)
        finally:
            answers.cancel()  # no effect on a call that has ended

    async def close(self) -> None:
        """End every call and the connection."""
        await self._channel.close(None)


def _whole(answer: Any) -> Any:
    if answer is None:  # grpc.aio says no more of an answer that ``unseal`` refuses
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "its answer was damaged", None)
    return answer


class GrpcChannels:
    """The channels of this process, each of which lasts as long as it is used. Lives on the event loop."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], GrpcChannel] = {}  # by address and what is shown, those that are not broken
        self._closing: set[asyncio.Task[None]] = set()

    def take(self, address: str, shown: Identity | None) -> GrpcChannel:
        """A channel to an owner. Freed by: leave()."""
        found = self._known.get((address, id(shown)))
        if found is None:
            found = self._known[address, id(shown)] = GrpcChannel(address, shown)
        found.users += 1
        return found

    def forget(self, broken: GrpcChannel) -> None:
        """It is broken: the next user gets another one."""
        if self._known.get((broken.address, id(broken.shown))) is broken:
            del self._known[broken.address, id(broken.shown)]

    def leave(self, channel: GrpcChannel) -> None:
        """It is used once less."""
        channel.users -= 1
        if not channel.users:
            self.forget(channel)
            task = asyncio.get_running_loop().create_task(channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, GrpcChannels] = WeakKeyDictionary()


def shared_channels() -> GrpcChannels:
    """Those of the running event loop."""
    return _of_loops.setdefault(asyncio.get_running_loop(), GrpcChannels())
