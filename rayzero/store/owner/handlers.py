"""Handles each call to an owner's gRPC server: unpack, call a plain object, pack.

Handlers run on the process's one event loop. A call that waits for another client awaits and never holds a thread; a
call that computes or allocates runs in the model's thread pool.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rayzero.codecs.changes import to_record
from rayzero.concurrency.futures import settle
from rayzero.concurrency.processes import this_process
from rayzero.errors import HandshakeError, RayZeroError, StoreError, TransferError
from rayzero.lead.lead import StepLead
from rayzero.memory.process_memory import give_back_freed
from rayzero.owner.service import ShardService
from rayzero.protocol.messages import PROTOCOL_VERSION, Published, require_life
from rayzero.protocol.products import dtype_of
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.calls.allowance import WrongSenderError
from rayzero.store.owner.calls.long_calls import LEAD_CALLS, Repeats, answers_to, begin_questions, ended, result_of
from rayzero.store.owner.calls.rank_links import KnownSpecs
from rayzero.store.owner.follower_calls import FollowerCalls
from rayzero.store.owner.memory.shared_owner import SharedOwner
from rayzero.store.owner.served_model import PublishStream, ServedModel
from rayzero.store.owner.uploads import Stream, receive_push, received
from rayzero.store.wire import translate
from rayzero.store.wire.payload import byte_view
from rayzero.store.wire.rpc import FOLLOWER_SERVICE, OWNER_SERVICE, STORE_SERVICE, caller_of, link_of
from rayzero.store.wire.translate import from_failure, to_failure

T = TypeVar("T")
Context = Any  # of this call: grpc.aio.ServicerContext, LineContext or TransferContext
Requests = AsyncIterator[Any]  # messages, and a TransferError for one that was damaged on the way


_PATIENCE_S = 10.0  # for the last answer that is to go with others
_TOGETHER_BYTES = 32 << 20  # of shards that are sent in one visit to a thread: some are copies, of states


class RankCalls:
    """StoreService: the calls of ranks."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._specs = KnownSpecs(model.service.owner, model.compute)

    # ---- attach, notices, leave

    async def get_host(self, request: pb.GetHostRequest, context: Context) -> pb.GetHostResponse:
        """Say which host's memory this owner can share; empty: none."""
        return pb.GetHostResponse(host=self._model.shared.host if self._model.shared is not None else "")

    async def attach(self, request: pb.AttachRequest, context: Context) -> pb.AttachResponse:
        """Check that both sides agree, then let the service allocate or compare; or ask for the rank's spec. Raises
        HandshakeError if the two sides differ."""
        service = self._model.service
        self._require_same_terms(request)
        process = translate.process_from_pb(request.process)
        if not self._model.replaces_ranks:
            self._model.ranks.require_same(request.rank, process)
        spec = await self._specs.of(request)
        if spec is None:
            return pb.AttachResponse(needs_spec=True)
        comes_back = request.rank in self._model.lives
        shares = self._model.shared is not None and self._model.shared.host == request.host != ""
        attached = await self._model.compute(
            partial(
                service.attach,
                request.rank,
                spec,
                own_gradients=shares,
                comes_back=comes_back,
                summed=tuple(request.summed),
            )
        )
        if request.lost_before:
            service.lost_before(request.rank, request.lost_before)
        self._model.take_spec(spec)
        history = translate.history_from_pb(request.history) if request.HasField("history") else None
        step = 0
        if self._model.leads:
            succeeds = self._model.shared is not None and self._model.shared.took_over
            step = self._connected_lead().attach(request.rank, spec, attached.version, history, succeeds=succeeds)
        settle(self._model.begun, None)
        self._model.ranks.attached(request.rank, process, request.lease_s)
        return pb.AttachResponse(
            step=step,
            version=attached.version,
            needs_load=attached.needs_load,
            kernel=service.kernel,
            shared=translate.paths_to_pb(self._model.shared.offer())
            if self._model.shared is not None and shares
            else None,
        )

    async def share(self, request: pb.ShareRequest, context: Context) -> pb.ShareResponse:
        """Map the slabs that the rank shares. Raises StoreError if this owner shares no memory."""
        if self._model.shared is None:
            raise StoreError(f"optimizer {self._model.service.owner} shares no memory; use transport='grpc'")
        paths = translate.paths_from_pb(request.files)
        back_at = request.back_at if request.HasField("back_at") else None
        door = await self._model.compute(self._model.open_door, tuple(request.away)) if request.away else None
        await self._model.compute(self._model.shared.join, request.rank, paths, dict(request.controls), back_at)
        if door is None:
            return pb.ShareResponse()
        summed, directory = tuple(request.summed), self._model.shared.directory
        await self._model.compute(door.join, request.rank, summed, request.threads, directory)
        unmirrored = self._model.unmirrored
        return pb.ShareResponse(mirror=door.offer, unmirrored=to_failure(unmirrored) if unmirrored else None)

    async def bring(self, request: pb.BringRequest, context: Context) -> pb.BringResponse:
        """Fetch a unit, which a write has changed, again for this host."""
        door = self._model.door
        if door is None or door.offer is None:
            raise StoreError(f"optimizer {self._model.service.owner} keeps no copy for its host")
        await result_of(door.bring(translate.write_from_pb(request.write)))
        return pb.BringResponse()

    async def keep(self, request: pb.KeepRequest, context: Context) -> pb.KeepResponse:
        """Keep a state of the rank's loop."""
        self._model.loop_states.keep(request.rank, translate.loop_state_from_pb(request.state))
        return pb.KeepResponse()

    async def get_kept(self, request: pb.GetKeptRequest, context: Context) -> pb.GetKeptResponse:
        """What was kept of the rank's loop."""
        states = self._model.loop_states.of(request.rank)
        return pb.GetKeptResponse(states=map(translate.loop_state_to_pb, states))

    def _require_same_terms(self, request: pb.AttachRequest) -> None:
        service = self._model.service
        if request.protocol_version != PROTOCOL_VERSION:
            raise HandshakeError(
                f"rank {request.rank} speaks protocol {request.protocol_version}, optimizer {service.owner} speaks "
                f"{PROTOCOL_VERSION}: install the same rayzero on both"
            )
        if (request.owner, request.num_owners) != (service.owner, service.num_owners):
            raise HandshakeError(
                f"rank {request.rank} takes this server for optimizer {request.owner} of {request.num_owners}, "
                f"but it is optimizer {service.owner} of {service.num_owners}"
            )

    def _connected_lead(self) -> StepLead:
        if self._model.lead is None:
            raise StoreError(f"optimizer {self._model.service.owner} leads but has no peers: call connect_peers()")
        return self._model.lead

    async def notices(self, request: pb.NoticesRequest, context: Context) -> None:
        """Tell the rank what is published until it leaves. The first notice comes at once."""
        model = self._model
        stream, opened = model.published.open(f"rank {request.rank}"), model.ranks.opened(request.rank)
        try:
            await context.write(await _first_notice(stream))
            while True:
                published, error = await stream.next()
                stream.hears_totals = not self._sees(request.rank)
                if error is not None or stream.hears_totals:
                    await context.write(_notice(published, error))
        finally:
            model.published.close(stream)
            model.ranks.ended(request.rank, opened)

    def _sees(self, rank: int) -> bool:
        """Whether a rank sees in memory what is published."""
        shared = self._model.shared
        return rank in self._model.copied or (shared is not None and shared.shares_with(rank))

    async def mute(self, request: pb.MuteRequest, context: Context) -> pb.MuteResponse:
        """The rank reads a copy of its host."""
        self._model.copied.add(request.rank)
        return pb.MuteResponse()

    async def leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        """The rank leaves on purpose, or somebody who knows says that it is gone."""
        self._model.lost(request.rank, request.reason)
        return pb.LeaveResponse()

    # ---- bytes

    async def fetch(self, request: pb.FetchRequest, context: Context) -> pb.FetchResponse:
        """Send published shards."""
        await _send_shards(self._model.service, request, context.stream)
        return pb.FetchResponse()

    async def open_tensor_stream(
        self, request: pb.OpenTensorStreamRequest, context: Context
    ) -> pb.OpenTensorStreamResponse:
        """Let the rank open a connection for tensors."""
        client = _client(f"rank {request.rank}", self._model)
        return self._model.tensors.expect(client, STORE_SERVICE, request.host, context)

    async def push(self, request: pb.PushRequest, context: Context) -> pb.PushResponse:
        """Receive gradients into the pushing rank's landing; this may wait for that rank's earlier pushes."""
        for pushed in request.units:
            await receive_push(self._model, pushed, context.stream, _rank_of(context))
        return pb.PushResponse()

    async def load(self, request: pb.LoadRequest, context: Context) -> pb.LoadResponse:
        """Receive initial weights, one shard at a time."""
        for loaded in request.units:
            for index in loaded.shards:
                shard, unit = self._model.shard(index, loaded.unit)
                values = await received(context.stream, shard, unit.initial_dtype)
                await self._model.compute(self._model.service.load, index, values)
        if self._model.service.is_loaded:  # free the received copies, which are as large as the weights
            await self._model.compute(give_back_freed)
        return pb.LoadResponse()

    async def stage(self, request: pb.StageRequest, context: Context) -> pb.StageResponse:
        """Receive the values of a write and keep them until the write."""
        for staged in request.units:
            for index in staged.shards:
                shard, unit = self._model.shard(index, staged.unit)
                values = await received(context.stream, shard, dtype_of(unit, staged.kind))
                self._model.service.stage(index, staged.version, staged.kind, values)
        return pb.StageResponse()

    async def describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        """Say what this owner does for a shard or, with ``step``, what the lead waits for; a door asks it."""
        if request.step and not self._model.leads and (door := self._model.door) is not None:
            text = await result_of(door.questions.describe(context.time_remaining() or _PATIENCE_S))
            return pb.DescribeResponse(text=text)
        return pb.DescribeResponse(text=self._model.describe(request))

    async def ask_lead(self, method: str, request: Any, context: Context) -> Any:
        """Answer what a rank asks the lead (``LEAD_CALLS``), once there is an answer."""
        begin = partial(self._model.steps.begin, method, request)
        return await result_of(self._model.repeats.once(_rank_of(context), method, request, begin))


def _notice(published: Sequence[Published], error: RayZeroError | None) -> pb.NoticesResponse:
    said = map(translate.published_to_pb, published)
    return pb.NoticesResponse(published=said, abort=to_failure(error) if error is not None else None)


async def _first_notice(stream: PublishStream) -> pb.NoticesResponse:
    """What a link begins with: what is published by now, and which process says so."""
    first = _notice(*await stream.next())
    first.process.CopyFrom(translate.process_to_pb(this_process()))
    return first


async def _send_shards(service: ShardService, request: pb.FetchRequest, stream: Stream) -> None:
    """Send shards at the requested version, each as soon as it is published: a thread is sent for once for several that
    are."""
    ready: list[tuple[int, memoryview]] = []
    for index in request.shards:
        read = service.read(index, request.version, request.kind)
        if ready and (not read.done() or sum(len(content) for _, content in ready) >= _TOGETHER_BYTES):
            await stream.send(ready)
            ready = []
        ready.append((index, byte_view(await result_of(read)).data))
    await stream.send(ready)


def _client(name: str, model: ServedModel) -> str:
    """A process as the one that connections for tensors are of: each model of its has its own."""
    return name if not model.number else f"{name} of model {model.number}"


def _rank_of(context: Context) -> int:
    caller = caller_of(context.invocation_metadata() or ())
    assert caller is not None, "no call gets here that does not say which rank it is"
    return caller[0]


_LEAD = -1  # the lead, where ranks have their numbers
_ORDERS = ("Collect", "Apply", "Overwrite")


class OwnerCalls:
    """OwnerService: calls of the lead, of owners that copy this one's parameters for their hosts, and of those of the
    next epoch."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._service, self._steps, self._shared = model.service, model.steps, model.shared
        self._repeats = Repeats()

    async def describe_epoch(self, request: pb.DescribeEpochRequest, context: Context) -> pb.DescribeEpochResponse:
        """Say what the control slab notes of no shard."""
        began, record = self._require_shared().noted()
        return pb.DescribeEpochResponse(kernel=self._service.kernel, began=began, record=record)

    async def give_shards(self, request: pb.GiveShardsRequest, context: Context) -> pb.GiveShardsResponse:
        """Send all of some shards. Nothing changes them: the owners stand still."""
        shared = self._require_shared()
        going = [(index, tensor) for index in request.shards for tensor in shared.carried(self._service.shard(index))]
        await context.stream.send((index, byte_view(tensor).data) for index, tensor in going)
        return pb.GiveShardsResponse()

    async def open_tensor_stream(
        self, request: pb.OpenTensorStreamRequest, context: Context
    ) -> pb.OpenTensorStreamResponse:
        """Let an owner open a connection for tensors. It is known by its number in the present epoch or, where it takes
        shards over, in the next."""
        client = _client(f"optimizer {request.owner}", self._model)
        return self._model.tensors.expect(client, OWNER_SERVICE, request.host, context)

    async def notices(self, request: pb.NoticesRequest, context: Context) -> None:
        """Tell the door of a host what is published. The first notice comes once its ranks have attached. The lead
        learns which process this is, and no more."""
        if request.WhichOneof("listener") is None:
            await context.write(pb.NoticesResponse(process=translate.process_to_pb(this_process())))
            await asyncio.get_running_loop().create_future()  # its link, or the server, ends this
        await self._model.ranks.known(request.ranks)
        stream = self._model.published.open(f"optimizer {request.owner}")
        try:
            await context.write(await _first_notice(stream))
            while True:
                await context.write(_notice(*await stream.next()))
        finally:
            self._model.published.close(stream)

    async def fetch(self, request: pb.FetchRequest, context: Context) -> pb.FetchResponse:
        """Send published shards to an owner that keeps a copy."""
        if request.HasField("since"):
            await self._send_changes(request, context.stream)
        else:
            await _send_shards(self._service, request, context.stream)
        return pb.FetchResponse()

    async def _send_changes(self, request: pb.FetchRequest, stream: Stream) -> None:
        """Send of each shard what the requested version has changed in it, where that is known and smaller."""
        going: list[tuple[int, memoryview]] = []
        for index in request.shards:
            whole = await result_of(self._service.read(index, request.version, request.kind))
            change = await self._model.compute(self._service.changes.newest, index, request.since, request.version)
            going.append((index, memoryview(to_record(change))))
            if change is None:
                going.append((index, byte_view(whole).data))
        await stream.send(going)

    async def push(self, request: pb.PushRequest, context: Context) -> pb.PushResponse:
        """Receive sums of the gradients of a host's ranks."""
        for pushed in request.units:
            await self._model.ranks.known([pushed.contribution.rank])  # a successor of this owner may be new to it
            await receive_push(self._model, pushed, context.stream, None)
        return pb.PushResponse()

    async def describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        """Say what this owner does for a shard or, with ``step``, what the lead waits for."""
        return pb.DescribeResponse(text=self._model.describe(request))

    async def ask(self, request: pb.AskRequest, context: Context) -> pb.AskResponse:
        """Answer what ranks of a host ask: when all of them have their answers, or in a while with those that are
        there; none: its caller has to ask again. What a rank asks that has not attached here waits: the lead before may
        have given it an answer of which this one has not heard."""
        ranks, until = self._model.ranks, asyncio.get_running_loop().time() + _PATIENCE_S
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await ranks.known([each.rank for each in request.questions])
        begun = begin_questions(request, ranks.is_known, partial(self._begin, request.method))
        for answer in begun.values():
            await ended(answer, max(0.0, until - asyncio.get_running_loop().time()))
        return pb.AskResponse(answers=answers_to(begun))

    def _begin(self, method: str, rank: int, life: int, asked: Any) -> Future[Any]:
        """Begin to answer what a rank asks in its ``life``. Raises StoreClosedError if that is over."""
        require_life(rank, life, self._model.lives)
        return self._model.repeats.once(rank, method, asked, partial(self._steps.begin, method, asked))

    def _require_shared(self) -> SharedOwner:
        if self._shared is None:
            raise StoreError(f"optimizer {self._service.owner} has memory of its own, which nobody takes over")
        return self._shared

    async def order(self, method: str, request: Any, context: Context) -> Any:
        """Do what the lead says of a step (``_ORDERS``)."""
        return await result_of(self._steps.begin(method, request))

    async def redo(self, request: pb.RedoRequest, context: Context) -> pb.RedoResponse:
        """Queue the update of a recorded decision, if it was not made."""
        await result_of(self._service.redo(translate.record_from_pb(request.record)))
        return pb.RedoResponse()

    async def begin_shards(self, request: pb.WriteShardsRequest, context: Context) -> pb.BeginShardsResponse:
        """Begin to write this owner's file of a checkpoint."""
        begin = partial(self._service.begin_checkpoint, request.step, Path(request.directory))
        await result_of(self._repeats.once(_LEAD, "BeginShards", request, begin))
        return pb.BeginShardsResponse()

    async def write_shards(self, request: pb.WriteShardsRequest, context: Context) -> pb.WriteShardsResponse:
        """Write this owner's file of a checkpoint."""
        write = partial(self._service.write_checkpoint, request.step, Path(request.directory))
        entry = await result_of(self._repeats.once(_LEAD, "WriteShards", request, write))
        return pb.WriteShardsResponse(file=translate.file_to_pb(entry))

    async def abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End the run for this owner."""
        error = from_failure(request.failure)
        self._service.abort(error if isinstance(error, StoreError) else StoreError(f"an owner failed: {error!r}"))
        return pb.AbortResponse()


Behaviour = Callable[[Any, Context], Awaitable[Any]]


def _require_own(method: str, request: Any, rank: int) -> None:
    """Raise WrongSenderError if a rank sends a message of another one: its certificate, or the token where it shows
    none, allows to be the rank that it says it is. (Pushes: see ``receive_push``.)"""
    said = getattr(request, "report", request)
    described = getattr(said, "DESCRIPTOR", None)
    if described is not None and "rank" in described.fields_by_name and said.rank != rank:
        raise WrongSenderError(f"{method} of rank {said.rank} was sent by rank {rank}")


class ModelCalls:
    """All calls to an owner for one prepared model."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self._of_ranks, self._of_owners = RankCalls(model), OwnerCalls(model)
        self._services: dict[str, RankCalls | OwnerCalls | FollowerCalls] = {
            STORE_SERVICE: self._of_ranks,
            OWNER_SERVICE: self._of_owners,
            FOLLOWER_SERVICE: FollowerCalls(model),
        }

    async def answer(self, service: str, method: str, request: Any, context: Context) -> Any:
        """Call the handler of a method: ``get_decision`` for ``GetDecision``."""
        behaviour = self._behaviour(service, method)
        metadata = context.invocation_metadata() or ()
        caller = caller_of(metadata) if service == STORE_SERVICE else None
        if caller is not None:
            _require_own(method, request, caller[0])
            require_life(*caller, self.model.lives)
            self.model.lose(*caller)  # its earlier lives are over
        try:
            with self.model.calls.running(link_of(metadata)):
                return await behaviour(request, context)
        except TransferError:  # perhaps its link is older because its life is, which says more
            if caller is not None:
                require_life(*caller, self.model.lives)
            raise

    def _behaviour(self, service: str, method: str) -> Behaviour:
        if service == STORE_SERVICE and method in LEAD_CALLS:
            return partial(self._of_ranks.ask_lead, method)
        if service == OWNER_SERVICE and method in _ORDERS:
            return partial(self._of_owners.order, method)
        return getattr(self._services[service], _function_name(method))  # type: ignore[no-any-return]


FindModel = Callable[[int, int | None], Awaitable[ModelCalls]]  # by its number and the epoch of the call


def _function_name(method: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", method).lower()
