"""Reports an owner's health by grpc.health.v1, for probes, which have no token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

SERVICE = "grpc.health.v1.Health"

_WATCHERS = 64  # the most at once: callers without a token must not fill this process's memory


class Health:
    """Answers whether this owner serves.

    [Note: requests unread] Callers show no token, so nothing they send is read, not even which service they ask about:
    all services of a server are in one state, and an unknown one gets the same answer. Runs on the event loop."""

    def __init__(self) -> None:
        self._status, self._watchers = HealthCheckResponse.SERVING, 0
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Answer from now on that this owner does not serve."""
        self._status = HealthCheckResponse.NOT_SERVING
        self._changed.set()

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The handler for a grpc.aio server."""
        answer = HealthCheckResponse.SerializeToString
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Check": grpc.stream_unary_rpc_method_handler(self._check, None, answer),
                "Watch": grpc.stream_stream_rpc_method_handler(self._watch, None, answer),
            },
        )

    async def _check(self, requests: AsyncIterator[bytes], context: Any) -> HealthCheckResponse:
        return HealthCheckResponse(status=self._status)

    async def _watch(self, requests: AsyncIterator[bytes], context: Any) -> None:
        if self._watchers >= _WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_WATCHERS} callers watch already: use Check")
        self._watchers += 1
        try:
            await context.write(HealthCheckResponse(status=self._status))
            if self._status == HealthCheckResponse.SERVING:
                await self._changed.wait()
                await context.write(HealthCheckResponse(status=self._status))
        finally:
            self._watchers -= 1
