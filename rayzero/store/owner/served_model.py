"""What an owner's server has for one prepared model: its service, the running calls, its lead, and the streams that
pass on what it has published to ranks, and to optimizer actors that copy it for their hosts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from rayzero.concurrency.event_loop import shared_loop
from rayzero.concurrency.futures import fail
from rayzero.concurrency.threads import use_torch_threads
from rayzero.errors import (
    ConfigError,
    EpochOverError,
    HandshakeError,
    RayZeroError,
    StoreClosedError,
    StoreError,
    TransferError,
)
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.lead.attempt import OwnerPeer
from rayzero.lead.lead import StepLead
from rayzero.owner.owned_model import LoopStates
from rayzero.protocol.gradient_sum import adds_up, gradient_dtype
from rayzero.protocol.messages import Contribution, ModelSpec, Published, life_is_over
from rayzero.protocol.ownership import owner_map
from rayzero.quantities import count
from rayzero.security.credentials import Identity
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.channel import Caller
from rayzero.store.host.door import Door, require_away
from rayzero.store.host.mirror_memory import MirrorMemory
from rayzero.store.owner.calls.long_calls import Repeats
from rayzero.store.owner.calls.rank_links import RankLinks, RunningCalls
from rayzero.store.owner.hosted import Hosted
from rayzero.store.owner.peers import RemotePeer
from rayzero.store.owner.step_calls import StepCalls
from rayzero.store.owner.tensor_port import TensorPort
from rayzero.store.shm.shared_plan import SharedPlan
from rayzero.store.wire.rpc import CallTerms


class PublishStream:
    """What one listener has yet to hear: only the newest version per shard, so a slow reader costs no memory."""

    def __init__(self, listener: str, known: dict[int, Published], error: RayZeroError | None) -> None:
        self.listener = listener
        self._pending = dict(known)
        self._error = error
        self._is_over = False
        self.hears_totals = True  # False: it sees in shared memory what is in totals
        self._news = asyncio.Event()
        self._news.set()  # the first message says what is published, even if that is nothing

    def add(self, published: Sequence[Published]) -> None:
        """Add to what the listener has yet to hear."""
        self._pending.update((each.shard, each) for each in published)
        self._news.set()

    def fail(self, error: RayZeroError) -> None:
        """The run is over: this comes with the last news."""
        self._error = self._error or error
        self._news.set()

    def end(self) -> None:
        """Its rank has opened a newer stream."""
        self._is_over, self._pending = True, {}
        self._news.set()

    async def next(self) -> tuple[Sequence[Published], RayZeroError | None]:
        """Wait for news. An error ends the run: it comes with the last news. Raises TransferError if the
        listener has opened another stream."""
        await self._news.wait()
        if self._is_over:
            raise TransferError(f"{self.listener} has opened a newer stream of notices")
        self._news.clear()
        published, self._pending = list(self._pending.values()), {}
        return published, self._error


class PublishStreams:
    """What an owner has published, as the event loop knows it, and the streams that pass it on.

    Lives on the event loop; ``publish`` and ``abort`` may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._known: dict[int, Published] = {}  # by shard
        self._error: RayZeroError | None = None
        self._lock = threading.Lock()  # held while ``_versions`` or ``_totals`` changes
        self._versions: dict[int, Published] = {}  # by shard, versions that no stream has yet
        self._totals: dict[int, int] = {}  # by shard, what is in its total that no stream has yet
        self._has_listeners = False  # without any, versions wait for the first one
        self._totals_wanted = True  # False once no listener wants to hear of totals
        self._streams: set[PublishStream] = set()
        self._newest: dict[str, PublishStream] = {}  # by listener, while it is open

    def publish(self, published: Sequence[Published]) -> None:
        """Pass new versions on to every listener. Waking the event loop takes a tenth of a millisecond from the update,
        so it is only done for a listener, and not twice before the loop has looked."""
        with self._lock:
            asked = bool(self._versions)
            self._versions.update((each.shard, each) for each in published)
        if not asked and self._has_listeners:
            self._loop.call_soon_threadsafe(self._tell)

    def abort(self, error: RayZeroError) -> None:
        """Tell every listener that the run has failed; the first error wins."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def open(self, listener: str) -> PublishStream:
        """Add a listener ("rank 3"), which first hears of everything published so far. An older stream of the
        same name ends, because each remembers all shards."""
        older = self._newest.get(listener)
        if older is not None:
            self._streams.discard(older)
            older.end()
        self._has_listeners = True  # from here on, a new version wakes the loop; earlier ones are in ``_versions``
        self._tell()
        stream = self._newest[listener] = PublishStream(listener, self._known, self._error)
        self._streams.add(stream)
        self._totals_wanted = True
        return stream

    def close(self, stream: PublishStream) -> None:
        """Remove a listener."""
        self._streams.discard(stream)
        self._has_listeners = bool(self._streams)
        if self._newest.get(stream.listener) is stream:
            del self._newest[stream.listener]

    def total(self, shard: int, word: int) -> None:
        """Tell listeners what is in a shard's total (``total_word``): several at once, as it comes often."""
        with self._lock:
            asked, self._totals[shard] = bool(self._totals), word
        if not asked and self._totals_wanted:
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        with self._lock:
            published, self._versions = self._versions, {}
            totals, self._totals = self._totals, {}
        for shard, each in published.items():
            before = self._known.get(shard)
            self._known[shard] = each if before is None else each._replace(total=before.total)
        for stream in self._streams if published else ():
            stream.add([self._known[shard] for shard in published])
        self._totals_wanted = any(stream.hears_totals for stream in self._streams)
        told = [self._known[shard]._replace(total=word) for shard, word in totals.items() if shard in self._known]
        self._known.update((each.shard, each) for each in told)
        for stream in self._streams if told else ():
            if stream.hears_totals:
                stream.add(told)

    def _fail(self, error: RayZeroError) -> None:
        self._tell()
        self._error = self._error or error
        for stream in self._streams:
            stream.fail(self._error)


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTerms:
    """The options of a server, for all of its models. Raises ConfigError for an empty token."""

    token: str = field(repr=False)  # what every caller must send
    tls: Identity | None = None  # what it shows, and wants to see, on every address that it protects; None: no TLS
    peer_timeout_s: float = 600.0  # deadline of the lead's calls that compute
    replaces_ranks: bool = False  # somebody starts a rank again that has died, so the others wait for it
    replaces_owners: bool = False  # the same for owners: see ``ServedModel.succeed``
    lineage: str = ""  # of the run's states in shared memory

    def __post_init__(self) -> None:
        if not self.token:
            raise ConfigError("token must not be empty: it is all that keeps others on this network out of the run")


class ServedModel:
    """One prepared model's service behind a server, and its lead.

    Knows the model's number, its peers and the running calls; not what a call does, its own address, or other models.
    After construction only ``connect_peers``, ``end`` and ``close`` may be called off the event loop."""

    def __init__(self, number: int, hosted: Hosted, terms: ServerTerms, tensors: TensorPort) -> None:
        """``tensors``: the server's port for them. Call it off the event loop."""
        self.service, self.shared = hosted  # ``shared``: None if this owner shares no memory
        self.replaces_ranks = terms.replaces_ranks  # a rank that dies is started again
        self.tensors = tensors
        self._loop = shared_loop().loop
        self.published = PublishStreams(self._loop)
        self.steps = StepCalls(self)  # calls within a step, over any transport
        self.lead: StepLead | None = None  # set by connect_peers; used only by the owner of shard 0
        self.spec: ModelSpec | None = None  # set by the first attach
        self.begun: Future[None] = Future()  # done once a rank has attached, also to the lead if it is here
        self.leads = False  # this owner has shard 0
        self.loop_states = LoopStates()
        self.lives: dict[int, int] = {}  # rank -> its present life, if it has died before
        self.repeats = Repeats()  # what ranks ask, also through the door of their host
        self.copied: set[int] = set()  # ranks that read what is published here in a copy of their host
        self.calls = RunningCalls(self.service.owner)
        self.ranks = RankLinks(self.service.owner, self._loop, self.service.recorder, self._gone)
        self.number, self._terms = number, terms
        epoch = 0 if self.service.ownership is None else self.service.ownership.epoch
        self._call_terms = CallTerms(token=terms.token, tls=terms.tls, model=number, epoch=epoch)
        self._peers: list[RemotePeer] = []
        self._addresses: list[str] = []  # of all owners, once peers are connected
        self.unmirrored: RayZeroError | None = None  # why the door keeps no copy
        self._opening = threading.Lock()
        self._pool = ThreadPoolExecutor(2, "rayzero-owner-work", initializer=use_torch_threads, initargs=(1,))
        if self.shared is not None:  # first: a version is in the owner's slabs before a rank learns of it over gRPC
            self.shared.serve(self.service, self.steps)
        self.service.on_publish(self.published.publish)
        self.service.on_total(self.published.total)
        self.service.failed.add_done_callback(self._abort)

    def connect_peers(self, addresses: Sequence[str]) -> None:
        """See ``OwnerServer.connect_peers``. Call it off the event loop."""
        service, terms, shared = self.service, self._terms, self.shared
        if len(addresses) != service.num_owners:
            raise ConfigError(
                f"connect_peers() got {len(addresses)} addresses, but the run has {count(service.num_owners, 'owner')}"
            )
        self._addresses = list(addresses)
        self._peers = [
            RemotePeer(
                owner,
                address,
                self._call_terms,
                succeeds=terms.replaces_owners,
                shared=shared,
                timeout_s=terms.peer_timeout_s,
                recorder=service.recorder,
            )
            for owner, address in enumerate(addresses)
            if owner != service.owner
        ]
        peers: list[OwnerPeer] = list(self._peers)
        peers.insert(service.owner, service)
        self.lead = StepLead(peers, shared, service.recorder, doors=self._doors)

    def succeed(self, owner: int, address: str) -> None:
        """Another owner has died; its successor is at ``address``."""
        if self._addresses:  # first: a door that is opened just now looks there again
            self._addresses[owner] = address
        if (door := self.door) is not None:
            door.succeed(owner, address)
        for peer in self._peers:
            if peer.owner != owner:
                continue
            lead = self.lead if self.leads and owner not in self._doors else None
            caught_up = peer.succeed(address, lead.succeeded(owner) if lead is not None else [])
            if lead is not None:
                caught_up.add_done_callback(partial(_caught_up, lead, owner))

    @property
    def _doors(self) -> range:
        return range(0) if self.service.ownership is None else self.service.ownership.door_numbers

    # ---- for its calls

    def take_spec(self, spec: ModelSpec) -> None:
        """Keep the spec of the first rank that attaches."""
        if self.spec is None:
            self.spec = spec
            shard_map = owner_map(spec, self.service.num_owners, self.service.ownership)
            self.leads = shard_map.owner(0) == self.service.owner
            if self.leads and self.lead is not None:
                for peer in self._peers:
                    peer.open(self.lead.owner_failed)

    def require_lead(self) -> StepLead:
        """The lead. Raises StoreError if this owner does not lead."""
        if self.lead is None or not self.leads:
            raise StoreError(f"optimizer {self.service.owner} is not the lead owner, or no rank has attached to it")
        return self.lead

    def lose(self, rank: int, life: int) -> None:
        """A rank has died and comes back in ``life``: nothing that it did in earlier lives counts any more, unless it
        is decided. Call it on the event loop. Idempotent."""
        before = self.lives.get(rank, 0)
        if before >= life:
            return
        self.lives[rank] = life
        self.ranks.left(rank)
        self.repeats.end(rank, life_is_over(rank, before, life))  # its new life's calls may look the same
        self.copied.discard(rank)
        if self.shared is not None:
            self.shared.leave(rank)
        if self.leads and self.lead is not None:
            self.lead.lose(rank)

    def shard(self, index: int, unit: int | None = None) -> tuple[Shard, UnitLayout]:
        """A shard and its unit. Raises StoreError if the layout has no such shard, or ``unit`` does not have it."""
        if self.spec is None:
            raise StoreError(f"optimizer {self.service.owner}: no rank has attached yet; call attach() first")
        shards = self.spec.layout.shards
        if not 0 <= index < len(shards) or unit not in (None, shards[index].unit):
            raise StoreError(f"optimizer {self.service.owner}: there is no shard {index} in unit {unit}")
        return shards[index], self.spec.layout.units[shards[index].unit]

    def open_door(self, owners: tuple[int, ...]) -> Door:
        """Be the door of this host to ``owners`` of others; blocks. Call it off the event loop, after a rank has shared
        memory. Raises HandshakeError for other owners than those that it is the door to."""
        assert self.spec is not None
        assert self.shared is not None
        with self._opening:
            door = self.shared.door
            if door is None:
                service, terms = self.service, self._terms
                plan = SharedPlan.of(self.spec, service.num_owners, service.ownership)
                require_away(plan, service.owner, owners)
                addresses = tuple(self._addresses)
                door = Door(
                    Caller.optimizer(service.owner),
                    plan,
                    owners,
                    addresses,
                    self._call_terms,
                    succeeds=terms.replaces_owners,
                    stall_timeout=terms.peer_timeout_s,
                    recorder=service.recorder,
                )
                copied = sorted((s for owner in owners for s in plan.shards_of(owner)), key=lambda shard: shard.index)
                try:
                    memory = MirrorMemory.open(plan, copied, terms.token, self.number, self.shared.directory)
                except (RayZeroError, OSError) as error:  # each rank fetches for itself, and says why
                    self.unmirrored = error if isinstance(error, RayZeroError) else StoreError(str(error))
                else:
                    door.mirror(memory, self.shared.ring)
                door.open()
                door.failed.add_done_callback(lambda failed: service.abort(_store_error(failed.result())))
                self.shared.door = door
                for owner in owners:
                    if self._addresses[owner] != addresses[owner]:
                        door.succeed(owner, self._addresses[owner])
            if door.owners != owners:
                raise HandshakeError(
                    f"optimizer {self.service.owner} is the door of its host to optimizers {list(door.owners)}, "
                    f"and a rank asks for {list(owners)}: ranks that share its memory must be on one host"
                )
            return door

    @property
    def door(self) -> Door | None:
        """Of its host, if this owner is that. Freed by: ``close``."""
        return None if self.shared is None else self.shared.door

    def describe(self, request: pb.DescribeRequest) -> str:
        """What this owner does for a shard or, with ``step``, what the lead waits for. Raises StoreError if there is no
        such shard, or this owner does not lead."""
        if request.step:
            return self.require_lead().describe()
        self.shard(request.shard)
        return self.service.describe(request.shard)

    def push_dtype(self, push: Contribution, unit: UnitLayout) -> torch.dtype:
        """The dtype in which the bytes of a push come, before they are encoded."""
        assert self.spec is not None
        if push.summands:
            return torch.float32
        adds = adds_up(self.spec.world_size, self.spec.accumulation_steps)
        return gradient_dtype(unit, adds) if push.sum_of else unit.dtype

    async def compute(self, work: Callable[..., T], *args: Any) -> T:
        """Run ``work``, which allocates or computes, off the event loop. It must not wait for another client."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def _gone(self, rank: int, reason: str) -> None:
        """A rank is gone without having left."""
        if self.replaces_ranks:
            self.lose(rank, self.lives.get(rank, 0) + 1)
        else:
            self.lost(rank, reason)

    def lost(self, rank: int, reason: str) -> None:
        """A rank is gone, on purpose or not. Call it on the event loop."""
        self.ranks.left(rank)
        if self.shared is not None:
            self.shared.leave(rank)
        self.service.left(rank, reason)
        if self.leads and self.lead is not None:
            self.lead.leave(rank, reason)

    # ---- the end

    def _abort(self, failed: Future[StoreError]) -> None:
        self._loop.call_soon_threadsafe(self.ranks.close)  # a rank that goes now is not the cause
        self.published.abort(failed.result())
        if self.leads and self.lead is not None:  # means and saves wait for the lead alone
            self.lead.owner_failed(failed.result())

    def end(self) -> None:
        """Fail every wait, before the server stops listening."""
        fail(self.begun, StoreClosedError(f"optimizer {self.service.owner} was stopped"))
        self.service.abort(StoreClosedError(f"optimizer {self.service.owner} was stopped"))
        if self.leads and self.lead is not None:  # only the owner that leads ends the run for all
            self.lead.close()

    def retire(self, error: EpochOverError) -> None:
        """The next epoch has begun: fail every wait with ``error``, and let its owners have the memory."""
        if self.leads and self.lead is not None:
            self.lead.retire(error)
        if (door := self.door) is not None:
            door.retire(error)
        self.service.retire(error)

    def close(self, *, retires: bool = False) -> None:
        """Close the connections to peers and the shared memory, after its calls have ended. ``retires``: see
        ``SharedOwner.close``."""
        for peer in self._peers:
            peer.close()
        self._pool.shutdown(wait=True)  # first: a door may be opened just now
        if (door := self.door) is not None:
            door.close(retires=retires)
        if self.shared is not None:
            self.shared.close(retires=retires)


def _caught_up(lead: StepLead, owner: int, _: Future[None]) -> None:
    lead.caught_up(owner)


def _store_error(error: BaseException) -> StoreError:
    return error if isinstance(error, StoreError) else StoreError(f"an owner failed: {error!r}")
