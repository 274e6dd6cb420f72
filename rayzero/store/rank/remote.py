"""Connects a rank to owners in other processes: through shared memory on its own host, over gRPC to other hosts."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch

from rayzero.concurrency.futures import settled
from rayzero.config.zero import HostFetch, HostPush, HostVoice
from rayzero.errors import (
    ConfigError,
    EpochOverError,
    RayZeroError,
    UnsupportedError,
)
from rayzero.kernels.rank_sum import summed_with
from rayzero.memory.malloc import keep_some_buffers
from rayzero.protocol.gathers import UnitGathers
from rayzero.protocol.gradient_sum import FormerRank
from rayzero.protocol.messages import Attached, LoopState, ModelSpec, Pushed
from rayzero.protocol.ownership import Ownership
from rayzero.quantities import format_bytes
from rayzero.security.credentials import Identity
from rayzero.slabs.arena import Arena
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.rank.connection import Joined
from rayzero.store.rank.epochs import Epochs
from rayzero.store.rank.gathers.host_gathers import Host, join_gathers
from rayzero.store.rank.lead_line import RemoteLead
from rayzero.store.rank.links.channel import QUICK_S, Channel
from rayzero.store.rank.links.handshake import Handshake
from rayzero.store.rank.links.owner_link import OwnerLink, say_goodbye
from rayzero.store.rank.loop_states import LoopStates
from rayzero.store.rank.memory.gradient_region import GradientRegion, gradient_memory
from rayzero.store.rank.memory.host_ranks import HostRanks
from rayzero.store.rank.memory.relay_memory import RelayMemory, join_memory
from rayzero.store.rank.memory.shared_memory import SharedRank, doubt_of_locks
from rayzero.store.rank.memory.unit_windows import UnitWindows
from rayzero.store.rank.publish_board import PublishBoard
from rayzero.store.rank.stall import StallWatch
from rayzero.store.rank.store import closed_error
from rayzero.store.rank.transfers.repeated_pushes import NOTHING, RepeatedPushes, nothing_kept
from rayzero.store.rank.transfers.wire import WireOptions
from rayzero.store.rank.voice.participant import VoiceParticipant
from rayzero.store.rank.ways import Ways
from rayzero.store.shm.former_ranks import former_ranks
from rayzero.store.shm.host_sums import GradientBytes, adding_threads
from rayzero.store.shm.plan import SharedPlan
from rayzero.store.shm.same_host import host_identity
from rayzero.store.wire import translate
from rayzero.store.wire.rpc import from_failure
from rayzero.telemetry.recorder import NullRecorder, Recorder

log = logging.getLogger(__name__)

_MAKING_S = 120.0
"""How long another rank of the host may take to make memory for what comes from elsewhere: tens of seconds for a large
model. Whoever else holds the directory's lock keeps ranks from sharing it, and from nothing more."""


class RemoteConnection:
    """A ``Connection`` to owners in other processes.

    Knows the owners' addresses, which versions they have published and which transport reaches each; not units, or
    what owners and the engine do."""

    in_process = False

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str],
        *,
        token: str,
        tls: Identity | None = None,
        model: int = 0,
        life: int = 0,
        stall_timeout: float = 600.0,
        chunk_bytes: int = WireOptions().chunk_bytes,
        stream_bytes: int = WireOptions().stream_bytes,
        wire_compression: str = "none",
        broadcast: str = "pull",
        share: Path | None = None,
        share_with_all: bool = False,
        host_fetch: HostFetch = "never",
        host_push: HostPush = "never",
        host_voice: HostVoice = "never",
        ranks_here: Sequence[int] = (),
        outlives_owners: bool = False,
        keep_pushed: bool = True,
        ownership: Ownership | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Open a channel to each owner (``addresses`` by owner index); nothing is sent before ``attach``.

        ``model``: the number of the prepared model that this connection is for. ``life``: how often the rank has died
        and come back. ``stall_timeout``: seconds a wait for a peer may last without progress. ``chunk_bytes``,
        ``stream_bytes``, ``wire_compression``, ``broadcast``: see ``ZeroConfig``. ``share``: the directory for memory
        shared with owners of this host; None: gRPC to all. ``share_with_all``: attach raises UnsupportedError if an
        owner shares no memory with this rank. ``host_fetch``: see ``ZeroConfig``; "auto" here: other ranks share the
        directory. ``host_push``, ``host_voice``: see ``ZeroConfig``. ``ranks_here``: the ranks of this host, the same
        in every life of this one.
        ``outlives_owners``: wait for the successor of an owner whose process has died (``succeed``), and take part in a
        change of the owners (``next``); else either is the end of the run.
        ``keep_pushed``: see ``ZeroConfig``. ``ownership``: who owns what by now; None: it is the run's first epoch.
        Raises ConfigError without addresses."""
        options = WireOptions(
            chunk_bytes=chunk_bytes, stream_bytes=stream_bytes, wire_compression=wire_compression, broadcast=broadcast
        )
        if not addresses:
            raise ConfigError("a store needs the address of at least one owner")
        self.rank, self.life, self.stall_timeout = rank, life, stall_timeout
        self.recorder = recorder or NullRecorder()
        self._ownership = ownership
        epoch = 0 if ownership is None else ownership.epoch
        self.epochs = Epochs(epoch, change=outlives_owners)
        self._next = partial(
            RemoteConnection,
            rank,
            token=token,
            tls=tls,
            model=model,
            life=life,
            stall_timeout=stall_timeout,
            chunk_bytes=chunk_bytes,
            stream_bytes=stream_bytes,
            wire_compression=wire_compression,
            broadcast=broadcast,
            share=share,
            share_with_all=share_with_all,
            host_fetch=host_fetch,
            host_push=host_push,
            host_voice=host_voice,
            ranks_here=ranks_here,
            outlives_owners=outlives_owners,
            keep_pushed=keep_pushed,
            recorder=recorder,
        )
        self._links = [  # freed by: leave() and free()
            OwnerLink(
                rank,
                owner,
                address,
                token=token,
                tls=tls,
                model=model,
                epoch=epoch,
                life=life,
                recorder=self.recorder,
                hear=self._hear,
                over=self._lost,
                rejoin=self._rejoin if outlives_owners else None,
            )
            for owner, address in enumerate(addresses)
        ]
        self._handshake = Handshake(rank, self._links, stall_timeout)
        self._keep_pushed = outlives_owners and keep_pushed
        self._board = PublishBoard()
        self._watch = StallWatch(rank, stall_timeout)
        self._ways = Ways(  # freed by: retire() and free()
            rank,
            self._links,
            options,
            board=self._board,
            watch=self._watch,
            lead_says=self._lead_says,
            recorder=self.recorder,
        )
        self._share, self._share_with_all = share, share_with_all
        self._token, self._host_push, self._ranks_here = token, host_push, tuple(ranks_here)
        self._model = model
        self._voice = VoiceParticipant(  # freed by: end(), leave(), and _join()
            host_voice,
            rank,
            self._ranks_here,
            share,
            key=token,
            model=model,
            epoch=epoch,
            life=life,
            stall_timeout=stall_timeout,
        )
        self._fetches_here = host_fetch != "never"
        self._summed: tuple[int, ...] = ()  # after attach: whose gradients come elsewhere as one sum
        self._host: HostRanks | None = None  # the same, if there are any. freed by: free()
        self._join_memory = partial(join_memory, host_fetch, key=token, model=model, who=f"rank {rank}")
        self._relay: RelayMemory | None = None  # after attach, if this host keeps what comes from elsewhere
        self._shares = True  # with owners of this host: a rank that began without any goes on without
        self._shares_with_owners = False  # or has shared
        self._shared: SharedRank | None = None  # after attach, if an owner of this host shares memory
        self._windows: UnitWindows | None = None
        self._gradients: GradientRegion | None = None
        self._lead: RemoteLead | None = None  # after attach
        self._plan: SharedPlan | None = None  # after attach
        self._repeats: RepeatedPushes | None = None  # after attach, if this rank keeps what it pushes
        self._loop: LoopStates | None = None  # after attach

    # ---- handshake

    def attach(self, spec: ModelSpec, *, page_lock: torch.device | None) -> Joined:
        """Shake hands with every owner; see ``Connection.attach``."""
        if self._lead is None:
            self._summed = self._summed_with(spec)
        self._shake_hands(spec)
        plan = SharedPlan.of(spec, len(self._links), self._ownership)
        step = self._handshake.answers[plan.shard_map.owner(0)].step
        if self._lead is None:
            try:
                self._join_host(plan, step, page_lock)
            except RayZeroError:
                self._handshake.check_successors()  # the cause, if what an owner offered has gone with it
                self._shake_hands(spec)  # fails with the cause, if it has gone because the next epoch has begun there
                raise
            if self._gradients is None and self._keep_pushed:
                self._gradients = GradientRegion(spec, gradient_memory(spec, pinned_for=page_lock))
            link = self._links[plan.shard_map.owner(0)]
            self._lead = RemoteLead(link, self._shared, self._watch, self.epochs)  # freed by: free()
            self._open_voice(plan)
            self._loop = LoopStates(
                self.rank,
                self._keeper,
                plan,
                self._shared,
                self._share,
                maps=self._keeper.owner not in self._ways.senders,
                back_at=step if self.life else None,
            )
            former = self._former(plan, step) if self.life else NOTHING
            self._repeats, self._plan = self._repeated(plan, former), plan
            if self.life:
                self._push_again()
            self._handshake.check_successors()
        return self._joined(plan, page_lock)

    def _joined(self, plan: SharedPlan, page_lock: torch.device | None) -> Joined:
        if self._ways.senders:
            keep_some_buffers()  # message buffers would otherwise be fresh pages each time
        assert self._lead is not None
        answers = self._handshake.answers
        return Joined(
            attached=Attached(
                version=answers[0].version,
                needs_load=any(answer.needs_load for answer in answers),
                step=answers[plan.shard_map.owner(0)].step,
            ),
            spec=plan.spec,
            shard_map=plan.shard_map,
            transfers=self._ways.transfers,
            senders=self._ways.senders,
            lead=self._lead,
            windows=self._windows,
            fetches=self._ways.fetches,
            host=self._host,
            gradients=self._gradients,
            keeps_pushed=self._keep_pushed and bool(self._ways.senders),
            gradient_tier="shm" if self._shared is not None else "ram" if page_lock is None else "pinned",
            kernel=answers[0].kernel,
            transport=self._ways.transport,
        )

    def _shake_hands(self, spec: ModelSpec, told: tuple[int, pb.Told] | None = None) -> None:
        """Attach to every owner; see ``Handshake.attach``."""
        host = host_identity(self._share) if self._share is not None and self._shares else ""
        self._handshake.attach(spec, host=host, summed=self._summed, voice=self._voice.who_speaks(spec), told=told)

    def _join_host(self, plan: SharedPlan, step: int, page_lock: torch.device | None) -> None:
        """Share memory with the owners of this host. ``step``: the open one."""
        offers = self._handshake.offers
        away = [link.owner for link in self._links if link.owner not in offers]
        if self._share_with_all and away:
            raise UnsupportedError(
                f"transport='shm', but optimizers {away} share no memory with rank {self.rank}: use 'auto'"
            )
        if self._share is None:
            return
        ways = {"shared memory": list(offers), "gRPC (another host or container)": away}
        said = ", ".join(f"{way} to optimizers {owners}" for way, owners in ways.items() if owners)
        log.info("rank %d: %s", self.rank, said)
        self._relay = self._join_memory(  # freed by: free()
            plan=plan, away=away, directory=self._share, patience_s=min(_MAKING_S, max(QUICK_S, self.stall_timeout))
        )
        elsewhere = {} if page_lock is not None else self._elsewhere(away)
        if offers or self._summed:
            self._share_with_host(plan, offers, step, page_lock, elsewhere)
        elif elsewhere:
            self._windows = UnitWindows(plan, elsewhere, page_lock=None)  # freed by: free()
        if self._relay is not None:
            self._ways.relay(self._relay, plan.spec.layout.units, self._windows)

    def _summed_with(self, spec: ModelSpec) -> tuple[int, ...]:
        """The ranks of this host, itself included, with which this one adds its gradients before they travel; empty:
        its own travel alone. The same for all of them, so it depends on nothing that they may see differently."""
        if self._host_push == "never" or self._share is None:
            return ()
        ranks = summed_with(self.rank, self._ranks_here)
        gain = GradientBytes.of(spec.layout.units, spec.accumulation_steps).sums_gain(len(ranks))
        if not ranks or (self._host_push == "auto" and not gain):
            return ()
        needed = len(self._ranks_here) * sum(SharedPlan.of(spec, len(self._links), self._ownership).gradients().slabs)
        needed += sum(unit.size_bytes for unit in spec.layout.units) if self._fetches_here else 0
        if self._host_push == "auto" and needed > _size_of(self._share):
            log.warning(
                "rank %d: the gradients of this host leave it rank by rank, because %s is too small for %s; set "
                "slab_dir to a larger one",
                self.rank,
                self._share,
                format_bytes(needed),
            )
            return ()
        return ranks

    def _share_with_host(
        self,
        plan: SharedPlan,
        offers: Mapping[int, pb.SharedFiles],
        step: int,
        page_lock: torch.device | None,
        elsewhere: Mapping[int, Arena],
    ) -> None:
        assert self._share is not None
        if page_lock is not None and (doubt := doubt_of_locks(plan, list(offers))) is not None:
            log.warning("rank %d: %s", self.rank, doubt)
        shared = self._shared = SharedRank(  # freed by: free()
            self.rank, plan, self._share, life=self.life, key=self._token, page_lock=page_lock
        )
        for owner, files in offers.items():
            shared.meet(owner, translate.paths_from_pb(files))
        if offers:
            self._share_memory(shared, back_at=step if self.life else None)
            self._shares_with_owners = True
        if offers or elsewhere:
            self._windows = shared.windows(elsewhere)  # freed by: free()
        if self._summed:
            cores = len(os.sched_getaffinity(0))
            threads = adding_threads(cores, len(self._ranks_here), on_gpu=page_lock is not None)
            self._host = HostRanks(shared, plan, self._summed, self._token, threads)  # freed by: free()
            self._want_sums()
        self._gradients = GradientRegion(plan.spec, shared.gradients())
        shared.listen(self._board)

    def _want_sums(self) -> None:
        """Let the ranks of this host whose gradients leave it as one sum find each other, if any leave it."""
        if self._host is not None:
            self._host.want(sums=bool(self._ways.senders))
            if self._ways.senders:
                log.info("rank %d: gradients of ranks %s leave this host as one sum", self.rank, list(self._summed))

    def _open_voice(self, plan: SharedPlan) -> None:
        """Ask the lead through the voice of this host, if the lead is elsewhere, and hear through it of other owners
        that are; and be it, if this rank is the one."""
        assert self._lead is not None
        lead, away = self._links[plan.shard_map.owner(0)], {owner: self._links[owner] for owner in self._ways.senders}
        self._lead.speak_through(self._voice.open(plan.spec, lead, away, self._board))

    def _join(self) -> None:
        """Wait for the threads of links and of the line to the voice, once these are closed."""
        for link in self._links:
            link.join()
        self._voice.join()

    def _elsewhere(self, away: Sequence[int]) -> dict[int, Arena]:
        """What this host has of the parameters of the owners ``away``, by owner."""
        return {} if self._relay is None else dict.fromkeys(away, self._relay.shards)

    def _share_memory(self, shared: SharedRank, back_at: int | None) -> None:
        """Reach the owners of this host, whose files are mapped, through shared memory, and let them map this
        rank's."""
        self._ways.share(self._handshake.offers, shared)
        self._handshake.share(shared.offer(), back_at)

    def join_gathers(self, spec: ModelSpec, device: str) -> UnitGathers | None:
        """See ``Connection.join_gathers``."""
        if len(self._ranks_here) < 2:
            return None
        if self._share is None:
            raise UnsupportedError(
                "host_gather=True needs memory that a host's ranks share, and this rank reaches all owners over gRPC; "
                "use transport='auto' and a slab_dir that works, or host_gather=False"
            )
        host = Host(
            ranks=self._ranks_here,
            rank=self.rank,
            key=self._token,
            model=self._model,
            directory=self._share,
            stall_s=self.stall_timeout,
        )
        return join_gathers(SharedPlan.of(spec, len(self._links), self._ownership), host, device)

    # ---- another epoch

    def next(self, addresses: Sequence[str], ownership: Ownership) -> RemoteConnection:
        """A connection to the owners of the next epoch; see ``take_over``."""
        after = self._next(addresses, ownership=ownership)
        after.epochs = self.epochs
        return after

    def end(self) -> None:
        """The epoch of these owners is over: end every wait and call. Idempotent."""
        over = EpochOverError(f"rank {self.rank}: other owners have taken over")
        self._board.fail(over)
        self._ways.end(over)
        for link in self._links:
            link.close()
        self._voice.close()
        self._watch.close(over)

    def retire(self) -> None:
        """End every transfer and thread, after ``end``. What this rank has itself stays, for the next connection."""
        self._ways.close()
        self._join()

    def take_over(self, before: RemoteConnection) -> Joined:
        """Shake hands with the owners of this epoch, and go on where ``before``, which is retired, has ended; blocks.
        Raises as ``attach`` does, and StateLostError if an owner lacks what this rank has not kept."""
        assert before._plan is not None
        assert before._lead is not None
        assert before._loop is not None
        plan = SharedPlan.of(before._plan.spec, len(self._links), self._ownership)
        self._shared, self._windows, self._gradients = before._shared, before._windows, before._gradients
        self._lead, self._loop, self._shares = before._lead, before._loop, before._shares_with_owners
        self._relay = before._relay
        self._shares_with_owners, self._summed, self._host = self._shares, before._summed, before._host
        lead, told = plan.shard_map.owner(0), self._lead.told()
        self._lead.enter(self._links[lead], self._shared, self._watch)  # first: its successor is told the same
        self._loop.enter(self._keeper)
        self._shake_hands(plan.spec, (lead, told))
        answers, offers = self._handshake.answers, self._handshake.offers
        for link, answer in zip(self._links, answers, strict=True):
            if answer.needs_load:
                raise self._handshake.lost_values(link)
        away = [link.owner for link in self._links if link.owner not in offers]
        elsewhere = {} if self._windows is None or self._windows.page_locked else self._elsewhere(away)
        if self._shared is not None:
            memories = {owner: translate.paths_from_pb(files) for owner, files in offers.items()}
            self._shared.enter(plan, memories, self._board, elsewhere)
            self._share_memory(self._shared, back_at=answers[lead].step if self.life else None)
        elif self._windows is not None:
            self._windows.enter(plan, elsewhere)
        if self._relay is not None:
            self._ways.relay(self._relay, plan.spec.layout.units, self._windows)
        self._want_sums()
        self._open_voice(plan)
        self._repeats, self._plan = self._repeated(plan), plan
        self._loop.give_all(plan, maps=self._keeper.owner not in self._ways.senders)
        for owner in self._ways.senders:
            if not self._keep_pushed:
                raise nothing_kept(self.rank, owner)
        self._push_again()
        self._handshake.check_successors()
        return self._joined(plan, page_lock=None)

    # ---- successors of owners

    def succeed(self, owner: int, address: str) -> None:
        """An owner's process has died; its successor is at ``address``. Calls that were not answered are repeated."""
        self._links[owner].succeed(address)

    def _rejoin(self, link: OwnerLink, channel: Channel) -> None:
        """Shake hands with a successor, which has taken over its predecessor's memory, and give it again what this rank
        has sent and only the predecessor had. Raises StateLostError if it lacks values that the predecessor had,
        or if this rank has not kept what it pushed."""
        if not self._handshake.has_begun:
            return
        if self._plan is not None and link.owner in self._ways.senders and not self._keep_pushed:
            raise nothing_kept(self.rank, link.owner)
        told = None
        if self._lead is not None and self._lead.is_over(link):
            self._voice.drop()
            told = self._lead.told()
        self._handshake.greet(link, channel, told)
        if self._loop is not None and self._loop.is_with(link):
            self._loop.give(channel, max(QUICK_S, self.stall_timeout))
        if self._plan is not None:
            self._handshake.require_values(link)
        self._handshake.share_again(link, channel)
        self._ways.wires[link.owner].stage_again(channel, self.stall_timeout)
        if link.owner in self._ways.senders and self._repeats is not None:
            self._repeats.send(link.owner, channel)

    def _repeated(self, plan: SharedPlan, former: FormerRank = NOTHING) -> RepeatedPushes | None:
        """What owners elsewhere may have to get again; None: nothing is kept for them."""
        if self._gradients is None:
            return None
        return RepeatedPushes(
            self.rank,
            plan,
            self._gradients,
            self._ways.wires,
            self._board,
            self._ways.order,
            self.stall_timeout,
            former,
            self._host,
        )

    def _former(self, plan: SharedPlan, step: int) -> FormerRank:
        """What this rank had pushed of the last decided step before it died: an owner elsewhere that has died too may
        not have applied it. If nothing is left, those owners are told. ``step``: the open one."""
        if self._host is not None and self._host.has(step - 1):
            return NOTHING  # what the ranks of this host have left is added again
        if self._shared is not None and self._keep_pushed and self._host is None:
            left = former_ranks(plan, f"rank {self.rank}", self._shared.directory, step - 1).get(self.rank)
            if left is not None:
                return left
        self._handshake.admit_loss(self._ways.senders, before=step)
        return NOTHING

    def _push_again(self) -> None:
        """Send again what owners elsewhere may lack; blocks."""
        if self._repeats is not None:
            self._repeats.send_all([self._links[owner] for owner in self._ways.senders], self._ways.pushes)

    def announce(self, unit: int, pushed: Pushed) -> None:
        """See ``Connection.announce``."""
        if self._shared is not None:
            self._shared.announce(unit, pushed)

    # ---- the loop's state

    def keep(self, state: LoopState) -> Future[None]:
        """See ``Connection.keep``."""
        assert self._loop is not None
        return self._loop.keep(state)

    def kept(self) -> list[LoopState]:
        """See ``Connection.kept``."""
        assert self._loop is not None
        return self._loop.kept()

    @property
    def _keeper(self) -> OwnerLink:
        """The owner that keeps the states of this rank's loop."""
        return self._links[self.rank % len(self._links)]

    # ---- notices

    def _hear(self, link: OwnerLink, notice: pb.NoticesResponse) -> None:
        self._voice.pass_on(link, notice)  # first: what follows here may take a while
        self._board.publish(link.owner, translate.published_from_pb(notice))
        self._voice.heard(link, notice)
        if notice.HasField("abort"):
            log.debug("rank %d: %s ends the run: %s", self.rank, link.name, notice.abort.message)
            self._board.release(link.owner, from_failure(notice.abort))

    def _lost(self, link: OwnerLink, error: RayZeroError) -> None:
        """The owner will never answer again: every wait fails, because nothing would end it."""
        self._board.fail(error)
        if self._shared is not None:
            self._shared.lost(link.owner, error)

    def _lead_says(self, timeout_s: float) -> Future[str]:
        """Ask the lead whom the step waits for."""
        if self._lead is None:
            return settled("unknown until attach() has ended")
        return self._lead.describe(timeout_s)

    # ---- close

    def leave(self, reason: str) -> None:
        """Tell the owners and end every wait; see ``Connection.leave``."""
        self._ways.give_up()
        self._voice.leave()  # what the voice has not said yet, this rank says itself, before it leaves
        if self._handshake.has_begun:
            say_goodbye(self._links, reason)
        self._board.fail(closed_error(self.rank))
        self._ways.end(closed_error(self.rank))
        for link in self._links:
            link.close()  # an attach in another thread fails
        self._voice.close()
        self._watch.close()  # after the links, so that no unanswered question holds up its thread

    def free(self) -> None:
        """Release everything; see ``Connection.free``."""
        if self._windows is not None:
            self._windows.close()
        if self._shared is not None:
            self._shared.close(closed_error(self.rank))
        if self._lead is not None:
            self._lead.close()
        self._ways.close()
        self._join()
        if self._relay is not None:
            self._relay.close()
        if self._host is not None:
            self._host.close()


def _size_of(directory: Path) -> int:
    """Bytes of the file system of a directory, used or not."""
    found = os.statvfs(directory)
    return found.f_blocks * found.f_frsize
