"""Lets calls in: by the run's token, by the role in the caller's certificate, and to the model they are about. And
transfers, whose client was let in with the call that opened its connection (store/owner/tensor_port.py)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from rayzero.errors import HandshakeError, RayZeroError, StoreError, TransferError
from rayzero.security.clients import Refusals
from rayzero.security.credentials import FOLLOWER, OWNER, follower_token, names_shown, require_role
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.calls.allowance import Allowances, reason_to_refuse
from rayzero.store.owner.handlers import Context, FindModel, Requests
from rayzero.store.owner.streams import OwnerStream
from rayzero.store.owner.tensor_port import Expected
from rayzero.store.wire.rpc import (
    FOLLOWER_SERVICE,
    OWNER_SERVICE,
    STORE_SERVICE,
    LinkNumber,
    Metadata,
    Method,
    caller_of,
    epoch_of,
    link_of,
    methods,
    model_of,
    to_status,
    token_matches,
    transfers,
)
from rayzero.store.wire.tensor_stream import StreamEndedError
from rayzero.store.wire.translate import to_failure
from rayzero.telemetry.names import GRPC_REQUEST_SECONDS, GRPC_REQUESTS
from rayzero.telemetry.recorder import Recorder

log = logging.getLogger(__name__)

_NOTHING: Metadata = ()


def _require_role(service: str, method: str, context: Context) -> None:
    """Raise HandshakeError if the caller's certificate does not allow this call, or if it does not say which rank it
    is and is no owner, or says two things. Without TLS the token allows to be any rank, or an owner."""
    names = names_shown(context.auth_context())
    metadata = context.invocation_metadata() or ()
    if service == FOLLOWER_SERVICE:
        _require_follower(names, method, link_of(metadata))
        return
    caller = caller_of(metadata)
    of_owners = service == OWNER_SERVICE
    if names is not None:
        require_role(names, method, of_owners=of_owners, rank=None if caller is None else caller[0])
    if caller is None and not of_owners:  # a certificate for any rank allows that, and the message may name another one
        raise HandshakeError(f"{method} was called by a rank that does not say which one it is")
    link = link_of(metadata)
    if caller is not None and link is not None and link.caller != f"rank {caller[0]}":  # it would end another's calls
        raise HandshakeError(f"{method} of rank {caller[0]} was sent over a link of {link.caller}")


def _require_follower(names: frozenset[str] | None, method: str, link: LinkNumber | None) -> None:
    """Raise HandshakeError for another certificate, and for another's link, whose calls this one would end."""
    if names is not None and not names & {FOLLOWER, OWNER}:
        raise HandshakeError(f"{method} was called with a certificate of {', '.join(sorted(names)) or 'no name'}")
    if link is None or not link.caller.startswith("follower "):
        raise HandshakeError(f"{method} was called by a follower that does not say which one it is")


class _Damaged(Exception):
    """A request that is not what was sent."""


class _Guarded:
    """The handler of a method for callers with the token: it checks their role, has their bodies read within their
    allowance, counts calls, and turns a RayZeroError into a status with metadata."""

    def __init__(
        self,
        service: str,
        method: Method,
        find: FindModel,
        recorder: Recorder,
        refusals: Refusals,
        allowances: Allowances,
    ) -> None:
        self._service, self._method, self._name = service, method, method.path.rpartition("/")[2]
        self._find, self._recorder, self._refusals, self._allowances = find, recorder, refusals, allowances

    async def handle(self, requests: AsyncIterator[Any], context: Context) -> Any:
        began, sent = time.perf_counter(), _NOTHING
        try:
            answer = await self._answer(requests, context)
            self._count(grpc.StatusCode.OK, began)
            return answer
        except asyncio.CancelledError:  # the caller is gone
            self._count(grpc.StatusCode.CANCELLED, began)
            raise
        except _Damaged as broken:  # its caller takes that for a broken link, and repeats the call
            code, details = grpc.StatusCode.UNAVAILABLE, str(broken)
        except RayZeroError as error:
            code, details, sent = to_status(error)
            self._note(error, context)
        self._count(code, began)
        # not while the error is handled: grpc keeps what this raises for long, and that would keep the call's message
        await context.abort(code, details, sent)

    async def _answer(self, requests: AsyncIterator[Any], context: Context) -> Any:
        try:
            _require_role(self._service, self._name, context)
        except HandshakeError as refused:
            self._refusals.note("role", context.peer(), str(refused))
            raise
        metadata = context.invocation_metadata() or ()
        follows = self._service == FOLLOWER_SERVICE
        allowance = self._allowances.of(context.peer(), context.auth_context(), metadata, follows=follows)
        request = await allowance.body(requests)
        if isinstance(request, TransferError):
            raise _Damaged(str(request))
        return await self._call(request, context)

    async def _call(self, request: Any, context: Context) -> Any:
        metadata = context.invocation_metadata() or ()
        epoch = None if self._service == FOLLOWER_SERVICE else epoch_of(metadata)
        calls = await self._find(model_of(metadata), epoch)
        return await calls.answer(self._service, self._name, request, context)

    def _note(self, error: RayZeroError, context: Context) -> None:
        reason = reason_to_refuse(error)
        if reason is not None:
            self._refusals.note(reason, context.peer(), str(error))

    def _count(self, code: grpc.StatusCode, began: float) -> None:
        self._recorder.add(GRPC_REQUESTS, method=self._name, code=code.name)
        self._recorder.observe(GRPC_REQUEST_SECONDS, time.perf_counter() - began, method=self._name)


class AccessCheck(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic when it runs
    """All services of store.proto, behind the run's token, or that of its followers.

    [Note: bodies of strangers] The token is in a call's metadata, which comes before its body. A call without it gets a
    handler for streams that reads nothing and ends the call: this process never holds more of the body than HTTP/2's
    flow control lets through, and parses none of it. (A unary handler is only called once the body has been read,
    so all handlers are of streams, and read within their caller's allowance: store/owner/calls/allowance.py.)"""

    def __init__(self, find: FindModel, token: str, recorder: Recorder) -> None:
        """``find``: returns the calls of a prepared model, by its number, in an epoch; None: in that of now."""
        self._recorder, self._refusals = recorder, Refusals("owner", recorder)
        allowances = Allowances()
        tokens = {STORE_SERVICE: token, OWNER_SERVICE: token, FOLLOWER_SERVICE: follower_token(token)}
        self._tokens = {method.path: own for service, own in tokens.items() for method in methods(service).values()}
        self._handlers = {
            method.path: method.handler(_Guarded(service, method, find, recorder, self._refusals, allowances).handle)
            for service in tokens
            for method in methods(service).values()
        }

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Choose a call's handler from its metadata alone."""
        path = handler_call_details.method
        handler = self._handlers.get(path)
        if handler is None or token_matches(handler_call_details.invocation_metadata or (), self._tokens[path]):
            return handler
        return grpc.stream_stream_rpc_method_handler(partial(self._refuse, path.rpartition("/")[2]))

    async def _refuse(self, method: str, requests: Requests, context: Context) -> None:
        self._recorder.add(GRPC_REQUESTS, method=method, code=grpc.StatusCode.UNAUTHENTICATED.name)
        self._refusals.note("token", context.peer(), "it does not show the run's token")
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token of this call is not the run's token")


def as_answer(failed: Exception, call: str) -> RayZeroError:
    """The error by which the caller learns that a call failed. One that has no name is a fault of ours, and logged."""
    if isinstance(failed, RayZeroError):
        return failed
    if isinstance(failed, DecodeError):
        return TransferError(f"{call} cannot be read: {failed}")
    log.error("%s failed", call, exc_info=failed)
    return StoreError(f"an owner failed: {failed!r}")


# ------------------------------------------------------------------------------------------- transfers

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
        except Exception as failed:
            error = as_answer(failed, f"{method or 'a transfer'} of {opened.client}")
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
