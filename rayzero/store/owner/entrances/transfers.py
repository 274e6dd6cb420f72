"""Answers transfers, which come over connections for tensors (store/owner/tensor_port.py), with the handlers behind
gRPC. Who may make them was asked when the connection was opened."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from google.protobuf.message import DecodeError

from rayzero.errors import HandshakeError, RayZeroError, StoreError, TransferError
from rayzero.security.refusals import Refusals
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.calls.allowance import reason_to_refuse
from rayzero.store.owner.handlers import FindModel
from rayzero.store.owner.streams import OwnerStream
from rayzero.store.owner.tensor_port import Expected
from rayzero.store.wire.rpc import (
    FOLLOWER_SERVICE,
    OWNER_SERVICE,
    STORE_SERVICE,
    Metadata,
    epoch_of,
    model_of,
    to_status,
    transfers,
)
from rayzero.store.wire.tensor_stream import StreamEndedError
from rayzero.store.wire.translate import to_failure
from rayzero.telemetry.names import GRPC_REQUEST_SECONDS, GRPC_REQUESTS
from rayzero.telemetry.recorder import Recorder

log = logging.getLogger(__name__)

_METHODS = {service: transfers(service) for service in (STORE_SERVICE, OWNER_SERVICE, FOLLOWER_SERVICE)}


class TransferContext:
    """What a handler asks of its call: grpc.aio's context, as far as it is used, and the way of its bytes."""

    def __init__(self, metadata: Metadata, stream: OwnerStream, until: float) -> None:
        """``until``: when the client gives up, on the loop's clock."""
        self._metadata, self.stream, self._until = metadata, stream, until

    def invocation_metadata(self) -> Metadata:
        """Of the call that opened the connection."""
        return self._metadata

    def time_remaining(self) -> float:
        """Seconds until the client gives up."""
        return max(0.0, self._until - asyncio.get_running_loop().time())

    async def write(self, response: Any) -> None:
        """Give a response that others follow."""
        await self.stream.say(pb.TransferAnswer(response=response.SerializeToString(), more=True).SerializeToString())


class TransferCalls:
    """Answers the questions on all of an owner's connections.

    Knows models and methods; not how bytes travel. Lives on the event loop."""

    def __init__(self, find: FindModel, recorder: Recorder) -> None:
        """``find``: returns the calls of a prepared model, by its number, in an epoch; None: in that of now."""
        self._find, self._recorder, self._refusals = find, recorder, Refusals("owner", recorder)

    async def answer(self, opened: Expected, stream: OwnerStream, content: bytes | TransferError) -> pb.TransferAnswer:
        """The answer to a question; see ``Answer``."""
        began, method, error = time.perf_counter(), "", None
        try:
            if isinstance(content, TransferError):
                raise content
            question = pb.TransferQuestion.FromString(content)
            method = question.method
            response = await self._call(opened, stream, question)
            said = pb.TransferAnswer(response=response)
        except StreamEndedError:
            raise
        except RayZeroError as refused:
            error = refused
        except DecodeError as unread:
            error = TransferError(f"{method or 'a transfer'} of {opened.client} cannot be read: {unread}")
        except Exception as failed:
            log.exception("%s failed", method)
            error = StoreError(f"an owner failed: {failed!r}")
        if error is not None:
            said = pb.TransferAnswer(failure=to_failure(error))
            reason = reason_to_refuse(error)
            if reason is not None:
                self._refusals.note(reason, opened.client, str(error))
        self._count(opened, method, "OK" if error is None else to_status(error)[0].name, began)
        return said

    async def _call(self, opened: Expected, stream: OwnerStream, question: pb.TransferQuestion) -> bytes:
        method = _METHODS[opened.service].get(question.method)
        if method is None:
            raise HandshakeError(f"{opened.client} asks for {question.method!r}: install the same rayzero everywhere")
        request = method.request.FromString(question.request)
        until = asyncio.get_running_loop().time() + question.timeout_s
        epoch = None if opened.service == FOLLOWER_SERVICE else epoch_of(opened.metadata)
        calls = await self._find(model_of(opened.metadata), epoch)
        context = TransferContext(opened.metadata, stream, until)
        response = await calls.answer(opened.service, question.method, request, context)
        return b"" if response is None else bytes(response.SerializeToString())

    def _count(self, opened: Expected, method: str, code: str, began: float) -> None:
        if method in _METHODS[opened.service]:
            self._recorder.add(GRPC_REQUESTS, method=method, code=code)
            self._recorder.observe(GRPC_REQUEST_SECONDS, time.perf_counter() - began, method=method)
