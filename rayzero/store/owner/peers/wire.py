"""How the lead reaches an owner in another process over gRPC."""

from __future__ import annotations

from collections.abc import Coroutine
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

import grpc

from rayzero.concurrency.event_loop import shared_loop
from rayzero.errors import StoreError
from rayzero.protocol.messages import Decision, FileEntry, FinishReport, NormParts, Record, Write
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.wire import translate
from rayzero.store.wire.rpc import (
    CHANNEL_OPTIONS,
    OWNER_SERVICE,
    TlsFiles,
    from_status,
    methods,
    to_failure,
    token_metadata,
)

T = TypeVar("T")

_QUICK_S = 10.0  # deadline of calls that compute nothing


class RemotePeer:
    """One owner, reached over gRPC. An ``OwnerPeer`` (protocol/owner.py).

    Knows the owner's address and how to call it; not what a step is. Its futures complete on the process's event loop:
    callbacks on them must not block."""

    def __init__(
        self,
        owner: int,
        address: str,
        *,
        token: str,
        tls: TlsFiles | None = None,
        timeout_s: float = 600.0,
        model: int = 0,
    ) -> None:
        """``timeout_s``: deadline of calls that compute, in seconds. ``model``: the prepared model's number."""
        self.owner = owner
        self._name = f"optimizer {owner} at {address}"
        self._metadata = token_metadata(token, model)
        self._timeout_s = timeout_s  # of calls that compute
        self._loop = shared_loop()
        self._aborts: list[Future[None]] = []
        self._channel = self._loop.run(_open_channel(address, tls), _QUICK_S)
        self._calls = {name: method.bind(self._channel) for name, method in methods(OWNER_SERVICE).items()}

    def collect(self, step: int, reports: tuple[FinishReport, ...]) -> Future[NormParts]:
        """Ask for the step's norm parts, which come once every counted push is there."""
        request = pb.CollectRequest(step=step, reports=[translate.report_to_pb(report) for report in reports])

        async def collect() -> NormParts:
            return translate.parts_from_pb(step, await self._ask("Collect", request, self._timeout_s))

        return self._submit(collect())

    def apply(self, decision: Decision) -> Future[None]:
        """Act on the decision; done when the owner has queued it."""
        request = pb.ApplyRequest(decision=translate.decision_to_pb(decision))

        async def apply() -> None:
            await self._ask("Apply", request, self._timeout_s)

        return self._submit(apply())

    def redo(self, record: Record) -> Future[None]:
        """Act on a recorded decision; done when the owner has queued it."""
        request = pb.RedoRequest(record=translate.record_to_pb(record))

        async def redo() -> None:
            await self._ask("Redo", request, self._timeout_s)

        return self._submit(redo())

    def write_checkpoint(self, step: int, directory: Path) -> Future[FileEntry]:
        """Write the owner's shards of version ``step`` into the staging directory."""
        request = pb.WriteShardsRequest(step=step, directory=str(directory))

        async def save() -> FileEntry:
            return translate.file_from_pb((await self._ask("WriteShards", request, self._timeout_s)).file)

        return self._submit(save())

    def write(self, number: int, write: Write) -> Future[None]:
        """Change the owner's shards of a unit; done when they are changed."""
        request = pb.OverwriteRequest(number=number, write=translate.write_to_pb(write))

        async def overwrite() -> None:
            await self._ask("Overwrite", request, self._timeout_s)

        return self._submit(overwrite())

    def abort(self, error: StoreError) -> None:
        """Fail every wait at the owner. Errors are ignored: an owner that cannot be reached has gone itself."""
        request = pb.AbortRequest(failure=to_failure(error))

        async def abort() -> None:
            await self._ask("Abort", request, _QUICK_S)

        self._aborts.append(self._submit(abort()))

    def close(self) -> None:
        """Close the connection once the aborts have gone out; other calls under way fail."""
        wait(self._aborts, _QUICK_S)
        self._loop.run(self._channel.close(None), _QUICK_S)

    async def _ask(self, name: str, request: Any, timeout_s: float) -> Any:
        try:
            return await self._calls[name](request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_status(error, self._name) from error

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return self._loop.submit(work)


async def _open_channel(address: str, tls: TlsFiles | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=CHANNEL_OPTIONS)
