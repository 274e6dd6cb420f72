"""Connects a rank to owners in other processes: through shared memory on its own host, over gRPC to other hosts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rayzero.concurrency.futures import DONE, settled, then
from rayzero.config.zero import HostPush
from rayzero.errors import ConfigError, EpochOverError, RayZeroError, UnsupportedError
from rayzero.protocol.gradient_sum import NOTHING_LEFT, FormerRank
from rayzero.protocol.messages import Attached, LoopState, ModelSpec, Pushed, SharedPaths, Write
from rayzero.protocol.ownership import Ownership
from rayzero.security.credentials import Identity
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.channel import QUICK_S, Caller
from rayzero.store.host.owner_link import AnyChannel, LinkUser, OwnerLink, say_goodbye
from rayzero.store.host.waits import PublishBoard, StallWatch
from rayzero.store.rank.connection import ChangingConnection, Epochs, GradientSender, Joined, nothing
from rayzero.store.rank.rank_memory import RankMemory
from rayzero.store.rank.rank_store import closed_error
from rayzero.store.remote.handshake import LEASE, Handshake
from rayzero.store.remote.lead_line import RemoteLead
from rayzero.store.remote.ways import RepeatedPushes, Ways
from rayzero.store.shm.shared_plan import SharedPlan
from rayzero.store.wire import translate
from rayzero.store.wire.rpc import CallTerms
from rayzero.store.wire.translate import from_failure
from rayzero.telemetry.recorder import NullRecorder, Recorder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTerms:
    """How a rank reaches owners in other processes, in each epoch."""

    token: str = field(repr=False)
    tls: Identity | None = None
    model: int = 0  # the number of the prepared model that the connection is for
    life: int = 0  # how often the rank has died and come back
    ranks_here: Sequence[int] = ()  # the ranks of this host, the same in every life of this one
    share: Path | None = None  # directory for memory shared with owners of this host; None: gRPC to all
    share_with_all: bool = False  # attach raises UnsupportedError if an owner shares no memory with this rank
    host_push: HostPush = "never"  # see ``ZeroConfig``
    wire_compression: str = "none"  # see ``ZeroConfig``
    stall_timeout: float = 600.0  # seconds that a wait for a peer may last without progress
    outlives_owners: bool = False
    """Wait for the successor of an owner whose process has died (``RemoteConnection.succeed``), take part in a change
    of the owners (``RemoteConnection.next``), and keep what was pushed for both; else either is the end of the run."""
    recorder: Recorder = field(default_factory=NullRecorder)


class RemoteConnection(ChangingConnection, LinkUser):
    """To owners in other processes. Uses the links to them.

    Knows the owners' addresses, which versions they have published and which transport reaches each; not units, or
    what owners and the engine do."""

    in_process = False

    def __init__(
        self, rank: int, addresses: Sequence[str], terms: RankTerms, ownership: Ownership | None = None
    ) -> None:
        """Make a link to each owner (``addresses`` by owner index); nothing is sent before ``attach``. ``ownership``:
        who owns what by now; None: it is the run's first epoch. Raises ConfigError without addresses."""
        if not addresses:
            raise ConfigError("a store needs the address of at least one owner")
        self.rank, self.recorder, self.stall_timeout = rank, terms.recorder, terms.stall_timeout
        self._terms, self._ownership, self.succeeds = terms, ownership, terms.outlives_owners
        epoch = 0 if ownership is None else ownership.epoch
        self.epochs = Epochs(epoch, change=terms.outlives_owners)
        caller = Caller.rank(rank, terms.life)
        calls = CallTerms(token=terms.token, tls=terms.tls, model=terms.model, epoch=epoch, memory=terms.share)
        self._links = {  # by owner. freed by: leave() and free(); of doors on other hosts by _part_with_doors()
            owner: OwnerLink(caller, owner, address, calls, self, terms.recorder)
            for owner, address in enumerate(addresses)
        }
        self._num_owners = len(addresses)
        self._handshake = Handshake(rank, self._links, self._num_owners, terms.stall_timeout)
        self._board = PublishBoard()
        self._watch = StallWatch(f"rank {rank}", terms.stall_timeout)
        self._ways = Ways(  # freed by: retire() and free()
            rank,
            list(self._links.values()),
            terms.wire_compression,
            board=self._board,
            watch=self._watch,
            lead_says=self._lead_says,
            recorder=terms.recorder,
        )
        self._memory = RankMemory(  # freed by: free()
            rank,
            terms.share,
            life=terms.life,
            key=terms.token,
            ranks=terms.ranks_here,
            host_push=terms.host_push,
            keeps_pushed=terms.outlives_owners,
        )
        self._lead: RemoteLead | None = None  # after attach
        self._plan: SharedPlan | None = None  # after attach
        self._repeats: RepeatedPushes | None = None  # after attach, if this rank keeps what it pushes
        self._copied: tuple[int, ...] = ()  # the owners of which this host has a copy, after attach
        self._callers: tuple[int, ...] = ()  # the owners of this host, if they call others for this rank

    # ---- handshake

    def attach(self, spec: ModelSpec, *, page_lock: torch.device | None) -> Joined:
        plan = SharedPlan.of(spec, self._num_owners, self._ownership)
        if self._lead is None:
            here = self._owners_on(self._memory.identity) if self._memory.may_sum or self._doors else []
            self._part_with_doors(here)
            if self._memory.may_sum:
                self._memory.choose_sums(plan, here)
            self._callers = tuple(here) if self._memory.summed else ()
        self._shake_hands(plan, self._memory.identity)
        if self._lead is None:
            try:
                self._join_host(plan, page_lock)
            except RayZeroError:
                self._handshake.check_successors()  # the cause, if what an owner offered has gone with it
                # fails with the cause, if it has gone because the next epoch has begun there
                self._shake_hands(plan, self._memory.identity)
                raise
            self._begin(plan)
            self._handshake.check_successors()
        return self._joined(plan, page_lock)

    def _owners_on(self, host: str) -> list[int]:
        """The owners that share the memory of this host; blocks. Those that serve now are found there; without any, all
        are asked. Raises as ``Handshake.owners_on``."""
        found = [owner for owner, link in self._links.items() if host and link.is_here()]
        return found or self._handshake.owners_on(host)

    def _part_with_doors(self, here: Sequence[int]) -> None:
        """Leave the doors of other hosts alone: this rank has nothing to do with them. ``here``: the owners of this
        host."""
        for owner in self._doors:
            if owner not in here and owner in self._links:
                link = self._links.pop(owner)
                link.close()
                link.join()

    @property
    def _doors(self) -> range:
        return range(0) if self._ownership is None else self._ownership.door_numbers

    def _shake_hands(self, plan: SharedPlan, host: str, history: tuple[int, pb.LeadHistory] | None = None) -> None:
        """Attach to every owner; see ``Handshake.attach``."""
        self._handshake.attach(plan.spec, host=host, summed=self._memory.summed, history=history)

    def _join_host(self, plan: SharedPlan, page_lock: torch.device | None) -> None:
        """Share memory with the owners and the other ranks of this host."""
        offers = self._handshake.offers
        away = self._away(plan)
        if self._terms.share_with_all and away:
            raise UnsupportedError(
                f"transport='shm', but optimizers {away} share no memory with rank {self.rank}: use 'auto'"
            )
        if self._terms.share is not None:
            ways = {"shared memory": list(offers), "gRPC (another host or container)": away}
            said = ", ".join(f"{way} to optimizers {owners}" for way, owners in ways.items() if owners)
            log.info("rank %d: %s", self.rank, said)
        self._memory.meet(plan, offers, away, page_lock)
        self._share_memory(plan, away, page_lock=page_lock is not None)
        self._memory.open(plan, away, self._board, page_lock)

    def _away(self, plan: SharedPlan) -> list[int]:
        """The owners on other hosts that have shards."""
        offers, shards = self._handshake.offers, plan.shard_map
        return [owner for owner in self._links if owner not in offers and shards.num_shards_of(owner)]

    def _share_memory(self, plan: SharedPlan, away: Sequence[int], *, page_lock: bool) -> None:
        """Reach the owners of this host through shared memory, and let them map this rank's. One of them copies what
        the owners ``away`` publish."""
        self._memory.require_door(away, self._handshake.offers)
        self._ways.use([owner for owner in self._links if plan.shard_map.num_shards_of(owner)])
        shared = self._memory.shared
        if shared is None:
            return
        self._ways.share(self._handshake.offers, shared)
        shared.door = min(self._handshake.offers) if away and self._memory.summed else None
        back_at = self._open_step(plan) if self._terms.life else None
        threads = self._memory.adding_threads(on_gpu=page_lock)
        mirror = self._handshake.share(shared.offer(), back_at, away, threads)
        self._copied = ()
        if isinstance(mirror, SharedPaths):  # first: what is in the copy must not be missed
            self._board.copied(shard.index for owner in away for shard in plan.shards_of(owner))
        if self._memory.meet_mirror(mirror):
            self._ways.mirror(away, shared)
            self._copied = tuple(away)
            for owner in away:
                self._mute(self._links[owner])
        elif self._callers:  # without a copy, this rank has to hear what those publish; a line does not say it
            self._callers = ()
            for owner in away:
                self._links[owner].open_again()

    def _mute(self, link: OwnerLink) -> None:
        """Hear no more from an owner what it publishes: it is in the copy. Without an answer, its link is over."""
        link.ask("Mute", pb.MuteRequest(rank=self.rank))

    def _bring_written(self, write: Write) -> Future[None]:
        """Let this host's copy have what was written; done once it has."""
        request = pb.BringRequest(rank=self.rank, write=translate.write_to_pb(write))
        asked = self._handshake.door.ask("Bring", request, max(QUICK_S, self.stall_timeout))
        return then(asked, lambda _: None)

    def _open_step(self, plan: SharedPlan) -> int:
        return self._handshake.answers[plan.shard_map.owner(0)].step

    def _begin(self, plan: SharedPlan) -> None:
        """Be connected to the lead, and send again what a former life had pushed."""
        link, shared = self._links[plan.shard_map.owner(0)], self._memory.shared
        self._lead = RemoteLead(link, self._door(plan), shared, self._watch, self.epochs)  # freed by: free()
        step = self._open_step(plan) if self._terms.life else None
        former = NOTHING_LEFT if step is None else self._former(plan, step)
        self._repeats, self._plan = self._repeated(plan, former), plan
        if shared is not None:
            shared.back_at = step
        if step is not None:
            self._push_again()

    def _door(self, plan: SharedPlan) -> OwnerLink | None:
        """The owner of this host that asks the lead for its ranks; None: the lead is here, or no owner is."""
        offers, lead = self._handshake.offers, plan.shard_map.owner(0)
        return self._links[plan.answering(offers)] if offers and lead not in offers else None

    @property
    def _senders(self) -> Mapping[int, GradientSender]:
        """What this rank sends itself: nothing, if its host's door sends it in a sum."""
        return {} if self._memory.summed else self._ways.senders

    def _joined(self, plan: SharedPlan, page_lock: torch.device | None) -> Joined:
        assert self._lead is not None
        answers, shared = self._handshake.answers, self._memory.shared
        return Joined(
            attached=Attached(
                version=answers[0].version,
                needs_load=any(answer.needs_load for answer in answers.values()),
                step=self._open_step(plan),
            ),
            spec=plan.spec,
            shard_map=plan.shard_map,
            transfers=self._ways.wires,
            versions=self._board,
            senders=self._senders,
            lead=self._lead,
            windows=self._memory.windows,
            bring=self._bring_written if self._copied else None,
            finished=shared.finished if self._memory.summed and shared is not None else None,
            gradients=self._memory.gradients,
            pages=shared,
            announce=nothing if shared is None else shared.announce,
            note=nothing if shared is None else shared.note,
            keeps_pushed=self._terms.outlives_owners and bool(self._senders),
            gradient_tier="shm" if shared is not None else "ram" if page_lock is None else "pinned",
            kernel=answers[0].kernel,
            transport=self._ways.transport,
        )

    # ---- another epoch

    def next(self, addresses: Sequence[str], ownership: Ownership) -> RemoteConnection:
        """A connection to the owners of the next epoch; see ``take_over``."""
        after = RemoteConnection(self.rank, addresses, self._terms, ownership)
        after.epochs = self.epochs
        return after

    def end(self) -> None:
        """The epoch of these owners is over: end every wait and call. Idempotent."""
        over = EpochOverError(f"rank {self.rank}: other owners have taken over")
        self._board.fail(over)
        self._ways.end(over)
        for link in list(self._links.values()):
            link.close()
        self._watch.close(over)

    def retire(self) -> None:
        """End every transfer and thread, after ``end``. What this rank has itself stays, for the next connection."""
        self._ways.close()
        self._join()

    def _join(self) -> None:
        """Wait for the threads of links, once these are closed."""
        for link in self._links.values():
            link.join()

    def take_over(self, before: RemoteConnection) -> Joined:
        """Shake hands with the owners of this epoch, and go on where ``before``, which is retired, has ended; blocks.
        Raises as ``attach`` does, and StateLostError if an owner lacks values that the former one had."""
        assert before._plan is not None
        assert before._lead is not None
        plan = SharedPlan.of(before._plan.spec, self._num_owners, self._ownership)
        self._memory, self._lead = before._memory, before._lead
        lead, history = plan.shard_map.owner(0), self._lead.history()
        self._lead.enter(self._links[lead], self._memory.shared, self._watch)  # first: its successor is told the same
        identity = self._memory.identity if self._memory.shares else ""
        here = self._owners_on(identity) if self._memory.summed or self._doors else []
        self._part_with_doors(here)
        self._callers = tuple(here) if self._memory.summed else ()
        self._shake_hands(plan, identity, (lead, history))
        for owner, answer in self._handshake.answers.items():
            if answer.needs_load:
                raise self._handshake.lost_values(self._links[owner])
        offers, away = self._handshake.offers, self._away(plan)
        self._memory.enter(plan, offers, away, self._board)
        self._share_memory(plan, away, page_lock=self._memory.page_locked)
        self._memory.enter_windows(away)
        self._lead.meet_door(self._door(plan))
        self._repeats, self._plan = self._repeated(plan), plan
        self._push_again()
        self._handshake.check_successors()
        return self._joined(plan, page_lock=None)

    # ---- successors of owners

    def callers_here(self, link: OwnerLink, missing_s: float) -> Sequence[str]:
        """See ``LinkUser.callers_here``. None when they have been missing for so long that an owner may soon take this
        rank for gone, too."""
        callers = [self._links[owner] for owner in self._callers]
        if link in callers or missing_s > self.stall_timeout * LEASE / 2:
            return ()
        return [each.address for each in callers]

    def succeed(self, owner: int, address: str) -> None:
        """An owner's process has died; its successor is at ``address``. Calls that were not answered are repeated."""
        if (link := self._links.get(owner)) is not None:
            link.succeed(address)

    def rejoin(self, link: OwnerLink, channel: AnyChannel) -> None:
        """Shake hands with a successor, which has taken over its predecessor's memory, and give it again what this rank
        has sent and only the predecessor had. Raises StateLostError if it lacks values that the predecessor
        had."""
        if not self._handshake.has_begun:
            return
        history = None
        if self._lead is not None and self._lead.is_over(link):
            history = self._lead.history()
        self._handshake.greet(link, channel, history)
        if self._plan is not None:
            self._handshake.require_values(link)
        self._handshake.share_again(link, channel)
        if link.owner in self._copied:
            self._mute(link)
        self._ways.wires[link.owner].stage_again(channel, self.stall_timeout)
        if link.owner in self._senders and self._repeats is not None:
            self._repeats.send(link.owner, channel)

    def _repeated(self, plan: SharedPlan, former: FormerRank = NOTHING_LEFT) -> RepeatedPushes | None:
        """What owners on other hosts may have to get again; None: nothing is kept for them."""
        if self._memory.gradients is None:
            return None
        return RepeatedPushes(
            self.rank,
            plan,
            self._memory.gradients,
            self._ways.wires,
            self._board,
            self._ways.order,
            self.stall_timeout,
            former,
        )

    def _former(self, plan: SharedPlan, step: int) -> FormerRank:
        """What this rank had pushed of the last decided step before it died: an owner elsewhere that has died too may
        not have applied it. If nothing is left, those owners are told. ``step``: the open one."""
        left = self._memory.left(plan, step - 1)
        if left is None:
            self._handshake.admit_loss(self._ways.senders, before=step)
        return NOTHING_LEFT if left is None else left

    def _push_again(self) -> None:
        """Send again what owners on other hosts may lack; blocks."""
        if self._repeats is not None:
            self._repeats.send_all([self._links[owner] for owner in self._senders], self._ways.threads.pushes)

    def in_totals(self, unit: int, pushed: Pushed) -> bool:
        """See ``Connection.in_totals``. Owners on other hosts say so in their notices, to this rank or to its door."""
        plan, shared = self._plan, self._memory.shared
        if plan is None:
            return False
        here = {} if shared is None else shared.totals
        copied = shared.mirror if shared is not None and self._copied else None
        away = self._board if copied is None else copied
        return all(
            here[owner].has(shard.index, pushed) if owner in here else away.in_total(shard.index, pushed)
            for shard in plan.spec.layout.shards_by_unit[unit]
            for owner in (plan.shard_map.owner(shard.index),)
        )

    def on_bell(self, look: Callable[[], None]) -> None:
        if self._memory.shared is not None and self._memory.shared.gives_back:
            self._memory.shared.on_bell = look

    # ---- the loop's state

    def keep(self, state: LoopState) -> Future[None]:
        if self._memory.shared is not None:
            self._memory.shared.keep(state)
            return DONE
        request = pb.KeepRequest(rank=self.rank, state=translate.loop_state_to_pb(state))
        return then(self._keeper.ask("Keep", request), lambda _: None)

    def kept(self) -> list[LoopState]:
        if self._memory.shared is not None:
            return self._memory.shared.kept()
        answer = self._keeper.ask("GetKept", pb.GetKeptRequest(rank=self.rank)).result()
        return list(map(translate.loop_state_from_pb, answer.states))

    @property
    def _keeper(self) -> OwnerLink:
        """The owner that keeps the states of this rank's loop, the same in each of its lives, where the rank has no
        shared memory: then no owner is succeeded, and no others take over."""
        keepers = list(self._links.values())
        return keepers[self.rank % len(keepers)]

    # ---- notices

    def hear(self, link: OwnerLink, notice: pb.NoticesResponse) -> None:
        self._board.publish(map(translate.published_from_pb, notice.published))
        if notice.HasField("abort"):
            log.debug("rank %d: %s ends the run: %s", self.rank, link.name, notice.abort.message)
            self._board.release(link.owner, from_failure(notice.abort))

    def lost(self, link: OwnerLink, error: RayZeroError) -> None:
        """The owner will never answer again: every wait fails, because nothing would end it."""
        self._board.fail(error)
        if self._memory.shared is not None:
            self._memory.shared.lost(link.owner, error)

    def _lead_says(self, timeout_s: float) -> Future[str]:
        """Ask the lead whom the step waits for."""
        if self._lead is None:
            return settled("unknown until attach() has ended")
        return self._lead.describe(timeout_s)

    # ---- close

    def leave(self, reason: str) -> None:
        self._ways.give_up()
        if self._lead is not None:
            self._lead.leave()
        if self._handshake.has_begun:
            say_goodbye(list(self._links.values()), reason)
        self._board.fail(closed_error(self.rank))
        self._ways.end(closed_error(self.rank))
        for link in list(self._links.values()):
            link.close()  # an attach in another thread fails
        self._watch.close()  # after the links, so that no unanswered question holds up its thread

    def free(self) -> None:
        self._ways.close()
        self._join()
        self._memory.close(closed_error(self.rank))
        if self._lead is not None:
            self._lead.close()
