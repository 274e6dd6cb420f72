"""Serves an owner over gRPC, with all of its prepared models behind one address."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from rayzero.concurrency.event_loop import shared_loop
from rayzero.errors import EpochOverError, StoreClosedError, StoreError, UnsupportedError
from rayzero.protocol.ownership import Ownership, Prepared
from rayzero.security.clients import host_of, is_loopback
from rayzero.security.credentials import Identity
from rayzero.store.owner.entrances.access import AccessCheck, TransferCalls
from rayzero.store.owner.entrances.lobby import CallsInMemory
from rayzero.store.owner.handlers import ModelCalls
from rayzero.store.owner.hosted import ByModel, HostedModels
from rayzero.store.owner.memory.next_epoch import PreparedMemory, prepare
from rayzero.store.owner.served_model import ServedModel, ServerTerms
from rayzero.store.owner.shard_source import RemoteShards
from rayzero.store.owner.tensor_port import TensorPort
from rayzero.store.shm.words import leads, let_stand
from rayzero.store.wire.rpc import SERVER_OPTIONS, CallTerms, add_port
from rayzero.store.wire.translate import spec_from_bytes, spec_to_bytes

_QUICK_S = 30.0  # starting and stopping a server
_GRACE_S = 2.0  # time for calls to end when the server stops

log = logging.getLogger(__name__)


class OwnerServer:
    """Serves one owner over gRPC: the ``ShardService`` of each prepared model and, on the owner of shard 0, its
    ``StepLead``.

    Knows its address, its models and when it is stopping; not what a call does (handlers.py). All servers of a
    process share one event-loop thread. The server does not own its models: their maker closes them, after
    ``stop()``."""

    def __init__(
        self,
        models: HostedModels,
        terms: ServerTerms,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    ) -> None:
        """Listen on ``host`` (``port`` 0: any free one); ``address`` says where.

        ``interceptors``: grpc.aio server interceptors, around every call.

        Raises StoreError if the port is taken.
        """
        self._loop = shared_loop()
        self._owner, self._recorder, self._epoch = models.owner, models.recorder, models.epoch
        self._hosted, self._stopped = models, False
        self._prepared: dict[int, PreparedMemory] = {}  # of the next epoch, by model. freed by: enter(), abandon()
        self._changing = threading.Lock()  # held while the next epoch is prepared, given up or entered
        self._given_up = threading.Event()  # ends what is prepared now
        self._making = ThreadPoolExecutor(1, "rayzero-owner-models")  # makes models, which opens channels
        self._tensors = TensorPort(self._recorder, TransferCalls(self._find, self._recorder).answer)
        self._terms = terms
        self._addresses: tuple[str, ...] | None = None
        self._models = ByModel(self._serve)
        self._models[0]
        self._servers: list[Any] = []  # one a port
        self._in_memory: list[CallsInMemory] = []  # the same for processes of this host
        self._health = Health()
        self._interceptors = list(interceptors)
        self.address = self.listen(host, port)

    def _serve(self, number: int) -> ModelCalls:
        """Make what serves one model, at the model's first call."""
        served = ServedModel(number, self._hosted[number], self._terms, self._tensors)
        if self._addresses is not None:
            served.connect_peers(self._addresses)
        return ModelCalls(served)

    async def _find(self, number: int, epoch: int | None) -> ModelCalls:
        """Find a model by its number. A new one is made off the event loop, because that opens channels. Raises
        EpochOverError for calls that are not of this epoch. ``epoch``: None: of a follower, for whom none is made."""
        if epoch not in (None, self._epoch):
            raise _over(self._owner, epoch, self._epoch)
        models = self._models
        calls = models.known(number)
        if calls is None and epoch is None:
            raise StoreClosedError(f"optimizer {self._owner} has no model {number} to follow (yet)")
        if calls is None:
            loop = asyncio.get_running_loop()
            calls = await loop.run_in_executor(self._making, lambda: models[number])
        return calls

    def listen(self, host: str, port: int = 0) -> str:
        """Listen on ``host`` too (``port`` 0: any free one); returns the address there. Raises StoreError if the port
        is taken."""
        address: str = self._loop.run(self._listen(host, port), _QUICK_S)
        if self._hosted.share is not None:
            terms = self._terms
            calls = CallsInMemory(
                self._hosted.share, address, terms.token, terms.lineage, self._find, self._recorder, terms.tls
            )
            self._in_memory.append(calls)
        if self._terms.tls is None and not is_loopback(host):
            log.warning("optimizer %d listens on %s without TLS", self._owner, address)
        return address

    def tensor_address(self, address: str) -> str:
        """Where clients that know this owner by ``address`` make connections for tensors."""
        host = host_of(address)
        return _joined(host, self._tensors.port_at(host))

    async def _listen(self, host: str, port: int) -> str:
        server = grpc.aio.server(
            handlers=(AccessCheck(self._find, self._terms.token, self._recorder), self._health.handler()),
            interceptors=self._interceptors,
            options=SERVER_OPTIONS,
        )
        bound = self._bind(server, _joined(host, port), self._terms.tls)
        try:
            self._tensors.listen(host)
        except OSError as exc:
            raise StoreError(f"optimizer {self._owner} cannot listen on {host} for tensors: {exc}") from exc
        await server.start()
        self._servers.append(server)
        return _joined(host, bound)

    def _bind(self, server: Any, address: str, tls: Identity | None) -> int:
        try:
            return add_port(server, address, tls)
        except RuntimeError as exc:
            raise StoreError(f"optimizer {self._owner} cannot listen on {address}: {exc}") from exc

    def connect_peers(self, addresses: Sequence[str]) -> None:
        """Give this owner the addresses of all owners (by index, itself included), before the first rank attaches.

        Only the owner of shard 0, which leads, uses them. Raises ConfigError unless there is one for each owner."""
        self._addresses = tuple(addresses)
        for calls in self._models.made:
            calls.model.connect_peers(addresses)

    def succeed(self, owner: int, address: str) -> None:
        """Another owner's process has died; its successor is at ``address``. Does not wait for it."""
        if self._addresses is not None:
            self._addresses = (*self._addresses[:owner], address, *self._addresses[owner + 1 :])
        for calls in self._models.made:
            calls.model.succeed(owner, address)

    def lose(self, rank: int, life: int) -> None:
        """A rank has died and comes back in ``life``; see ``ServedModel.lose``. Call it off the event loop."""
        served = [calls.model for calls in self._models.made]
        self._loop.run(_lose(served, rank, life), _QUICK_S)

    def lost(self, rank: int, reason: str) -> None:
        """Somebody who supervises ranks knows that this one is gone: end what waits for it now, instead of after its
        lease. Does not block."""
        for calls in self._models.made:
            self._loop.loop.call_soon_threadsafe(calls.model.lost, rank, reason)

    # ---- between two epochs: rayzero/elastic/reform.py says in which order

    def hold(self) -> dict[int, int]:
        """Decide nothing more for the models that this owner leads; blocks, also until a rank has attached to this
        process. Returns the steps that stay open, by model."""
        models = [calls.model for calls in self._models.made]
        for model in models:
            model.begun.result()
        held = {number: model.require_lead().hold() for number, model in enumerate(models) if model.leads}
        return {number: each.result() for number, each in held.items()}

    def settle(self) -> dict[int, bytes]:
        """Apply and publish what is decided, after ``hold``; blocks, also until all first values are there. Returns the
        specs of this owner's models."""
        settled = [calls.model.service.settled() for calls in self._models.made]
        return {number: spec_to_bytes(each.result()) for number, each in enumerate(settled)}

    def prepare(self, after: Ownership, specs: Mapping[int, bytes], addresses: Sequence[str]) -> Prepared:
        """Make this owner's memory of the next epoch, which ``after`` describes, once all owners have settled; blocks
        while shards come from other hosts. ``specs``: by model. ``addresses``: of the owners of this epoch. Raises
        UnsupportedError if what the owners have cannot be taken over, MemoryPlanError if it does not fit, StoreError if
        an owner on another host cannot be reached."""
        hosted = self._hosted
        if hosted.share is None:
            raise UnsupportedError(f"optimizer {self._owner} shares no memory, so nobody can take over what it has")
        before, owner = after.before, hosted.number_in(after)
        models = {number: spec_from_bytes(spec) for number, spec in specs.items()}
        hosted.check_change(list(models.values()), after)
        with self._changing:
            self._given_up.clear()
            self._drop_prepared()
            for number, spec in models.items():
                source = partial(self._source, number, before, addresses, owner)
                self._prepared[number] = prepare(spec, owner, before, after, hosted.share, hosted.terms.threads, source)
            moved = sum(prepared.moved_bytes for prepared in self._prepared.values())
            leading = any(leads(prepared.control) for prepared in self._prepared.values())
            return Prepared(leads=leading, moved_bytes=moved)

    def _source(self, model: int, before: Ownership, addresses: Sequence[str], taker: int, owner: int) -> RemoteShards:
        terms = self._terms
        return RemoteShards(
            owner,
            addresses[owner],
            CallTerms(token=terms.token, tls=terms.tls, model=model, epoch=before.epoch),
            taker=taker,
            timeout_s=terms.peer_timeout_s,
            given_up=self._given_up,
        )

    def let_stand(self) -> None:
        """The next epoch begins, at this moment, for the models that this owner leads in it."""
        with self._changing:
            for prepared in self._prepared.values():
                if leads(prepared.control):
                    let_stand(prepared.control)

    def abandon(self) -> None:
        """The next epoch does not begin: go on in this one. Idempotent."""
        self._given_up.set()
        with self._changing:
            self._drop_prepared()
        for calls in self._models.made:
            calls.model.service.go_on()
            if calls.model.leads:
                calls.model.require_lead().release()

    def _drop_prepared(self) -> None:
        for prepared in self._prepared.values():
            prepared.close()
        self._prepared = {}

    def enter(self, ownership: Ownership, addresses: Sequence[str]) -> None:
        """The next epoch has begun. End everything of the last one, and serve what was prepared; nothing more if that
        is nothing. ``addresses``: of all owners."""
        hosted = self._hosted
        with self._changing:
            over = _over(self._owner, self._epoch, ownership.epoch)
            self._epoch, retired = ownership.epoch, self._models.close()
            for calls in retired:
                calls.model.retire(over)
            self._loop.run(_end_calls(retired, over), _QUICK_S)
            for calls in retired:
                calls.model.close(retires=True)
            prepared, self._prepared = self._prepared, {}
            hosted.enter(ownership, {number: each.enter() for number, each in prepared.items()})
            self._owner, self._addresses = hosted.owner, tuple(addresses)
            if prepared:
                self._models = ByModel(self._serve)
                self._models[0]

    def stop(self) -> None:
        """Stop listening, end every call and stream, close the connections to peers. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        served = [calls.model for calls in self._models.close()]
        for model in served:
            model.end()
        self._loop.run(self._stop(served), _QUICK_S)
        for calls in self._in_memory:
            calls.close(_GRACE_S)
        self._tensors.close()
        for model in served:
            model.close()
        self._drop_prepared()
        self._making.shutdown(wait=True)

    async def _stop(self, served: Sequence[ServedModel]) -> None:
        self._health.stop()
        for model in served:
            model.calls.end(StoreError(f"optimizer {self._owner} was stopped"))
        # without grace, callers whose calls just ended would see a reset link
        await asyncio.gather(*(server.stop(_GRACE_S) for server in self._servers))
        await self._tensors.stop()

    def __enter__(self) -> OwnerServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _over(owner: int, epoch: int | None, present: int) -> EpochOverError:
    return EpochOverError(f"optimizer {owner} was asked in epoch {epoch}, and is in epoch {present}")


async def _end_calls(models: Sequence[ModelCalls], error: EpochOverError) -> None:
    for calls in models:
        calls.model.calls.end(error)


async def _lose(served: Sequence[ServedModel], rank: int, life: int) -> None:
    for model in served:
        model.lose(rank, life)


def serve_models(
    models: HostedModels,
    *,
    host: str = "127.0.0.1",
    interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    **terms: Any,
) -> OwnerServer:
    """Serve all of an owner's models. ``terms``: see ``ServerTerms``."""
    return OwnerServer(models, ServerTerms(**terms), host=host, interceptors=interceptors)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
