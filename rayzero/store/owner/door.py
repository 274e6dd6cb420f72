"""Lets calls in: by the run's token, by the role in the caller's certificate, and to the model they are about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from rayzero.errors import HandshakeError, RayZeroError, TransferError
from rayzero.security.credentials import names_shown, require_role
from rayzero.security.refusals import Refusals
from rayzero.store.owner.handlers import Behaviour, Context, ModelCalls, Requests
from rayzero.store.wire.rpc import (
    OWNER_SERVICE,
    STORE_SERVICE,
    caller_of,
    epoch_of,
    methods,
    model_of,
    to_status,
    token_matches,
)
from rayzero.telemetry.names import GRPC_REQUEST_SECONDS, GRPC_REQUESTS
from rayzero.telemetry.recorder import Recorder

FindModel = Callable[[int, int], Awaitable[ModelCalls]]  # by its number and the epoch of the call


def _require_role(service: str, method: str, context: Context, refusals: Refusals) -> None:
    """Raise HandshakeError if the caller's certificate does not allow this call. Without TLS the token allows all."""
    names = names_shown(context.auth_context())
    if names is None:
        return
    caller = caller_of(context.invocation_metadata() or ())
    of_owners = service == OWNER_SERVICE or (method == "GetKept" and caller is None)  # as the next owner of a rank
    try:
        require_role(names, method, of_owners=of_owners, rank=None if caller is None else caller[0])
    except HandshakeError as refused:
        refusals.note("role", context.peer(), str(refused))
        raise


def _guarded(service: str, method: str, find: FindModel, recorder: Recorder, refusals: Refusals) -> Behaviour:
    """The handler of a method for callers with the token. It counts calls, and turns a RayZeroError into a status with
    metadata."""

    def count(code: grpc.StatusCode, began: float) -> None:
        recorder.add(GRPC_REQUESTS, method=method, code=code.name)
        recorder.observe(GRPC_REQUEST_SECONDS, time.perf_counter() - began, method=method)

    async def guarded(request: Any, context: Context) -> Any:
        began = time.perf_counter()
        if isinstance(request, TransferError):  # its caller takes that for a broken link, and repeats the call
            count(grpc.StatusCode.UNAVAILABLE, began)
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(request))
        try:
            _require_role(service, method, context, refusals)
            metadata = context.invocation_metadata() or ()
            calls = await find(model_of(metadata), epoch_of(metadata))
            answer = await calls.answer(service, method, request, context)
            count(grpc.StatusCode.OK, began)
            return answer
        except asyncio.CancelledError:  # the caller is gone
            count(grpc.StatusCode.CANCELLED, began)
            raise
        except RayZeroError as error:
            code, details, sent = to_status(error)
            count(code, began)
            await context.abort(code, details, sent)

    return guarded


class TokenDoor(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic when it runs
    """Both services of store.proto, behind the run's token.

    [Note: bodies of strangers] The token is in a call's metadata, which comes before its body. A call without it gets a
    handler for streams that reads nothing and ends the call: this process never holds more of the body than HTTP/2's
    flow control lets through, and parses none of it. (A unary handler is only called once the body has been read.)"""

    def __init__(self, find: FindModel, token: str, recorder: Recorder) -> None:
        """``find``: returns the calls of a prepared model, by its number, in an epoch."""
        self._token, self._recorder, self._refusals = token, recorder, Refusals("owner", recorder)
        self._handlers = {
            method.path: method.handler(_guarded(service, name, find, recorder, self._refusals))
            for service in (STORE_SERVICE, OWNER_SERVICE)
            for name, method in methods(service).items()
        }

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Choose a call's handler from its metadata alone."""
        path = handler_call_details.method
        handler = self._handlers.get(path)
        if handler is None or token_matches(handler_call_details.invocation_metadata or (), self._token):
            return handler
        return grpc.stream_stream_rpc_method_handler(partial(self._refuse, path.rpartition("/")[2]))

    async def _refuse(self, method: str, requests: Requests, context: Context) -> None:
        self._recorder.add(GRPC_REQUESTS, method=method, code=grpc.StatusCode.UNAUTHENTICATED.name)
        self._refusals.note("token", context.peer(), "it does not show the run's token")
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token of this call is not the run's token")
