"""What one optimizer actor of a host does for all of its ranks: it copies what owners on other hosts publish, sends
them one sum of the ranks' gradients, and asks the lead what the ranks ask."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from rayzero.concurrency.event_loop import shared_loop
from rayzero.concurrency.futures import fail, settle, then, when_all
from rayzero.errors import HandshakeError, RayZeroError, StoreClosedError, StoreError
from rayzero.layout.model_layout import Shard
from rayzero.protocol.messages import Write
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.channel import Caller
from rayzero.store.host.host_sums import HostSums, SummedRanks
from rayzero.store.host.lead_questions import LeadQuestions
from rayzero.store.host.mirror_memory import MirrorMemory
from rayzero.store.host.mirrors import Mirror
from rayzero.store.host.owner_link import AnyChannel, LinkUser, OwnerLink
from rayzero.store.host.transfer_calls import TransferThreads
from rayzero.store.host.waits import PublishBoard, PushOrder, StallWatch
from rayzero.store.host.wire_transfers import WireTransfers
from rayzero.store.shm.shared_plan import SharedPlan
from rayzero.store.wire import translate
from rayzero.store.wire.rpc import CallTerms
from rayzero.store.wire.translate import from_failure, to_failure
from rayzero.telemetry.recorder import Recorder

log = logging.getLogger(__name__)

_STREAMS = 2  # of each method, to one owner: while the bytes of one call move, the next one is asked
DOOR_TRANSFERS = 2 * _STREAMS  # between a door and one owner: fetches and pushes


def require_away(plan: SharedPlan, owner: int, owners: Sequence[int]) -> None:
    """Raise HandshakeError unless an owner can be the door of its host to ``owners``, as a rank says."""
    strange = [each for each in owners if each == owner or not 0 <= each < plan.shard_map.num_owners]
    if strange or len(set(owners)) < len(owners):
        raise HandshakeError(
            f"optimizer {owner} is to be the door of its host to optimizers {list(owners)}; it takes each of the "
            f"others of {plan.shard_map.num_owners} at most once"
        )


def _shards_by_unit(plan: SharedPlan, owners: Sequence[int]) -> dict[int, dict[int, list[Shard]]]:
    """Of trained units, the shards of each owner."""
    found: dict[int, dict[int, list[Shard]]] = defaultdict(lambda: defaultdict(list))
    for owner in owners:
        for shard in plan.shards_of(owner):
            if plan.spec.layout.units[shard.unit].trainable:
                found[shard.unit][owner].append(shard)
    return {unit: dict(by_owner) for unit, by_owner in found.items()}


class Door(LinkUser):
    """The links of a host to the owners of other hosts, what it copies of them, and what its ranks send and ask them.

    Knows which owners are on other hosts; not who reads copies, or when ranks push or ask. Thread-safe."""

    def __init__(
        self,
        caller: Caller,
        plan: SharedPlan,
        owners: Sequence[int],
        addresses: Sequence[str],
        terms: CallTerms,
        *,
        succeeds: bool,
        stall_timeout: float,
        recorder: Recorder,
    ) -> None:
        """``owners``: those on other hosts that have shards. ``addresses``: of all owners, by index. ``succeeds``: an
        owner that dies gets a successor. ``stall_timeout``: seconds."""
        self.owners, self._plan, self._caller, self._timeout_s = tuple(owners), plan, caller, stall_timeout
        self._token, self.succeeds = terms.token, succeeds
        self._shards = _shards_by_unit(plan, owners)
        self.failed: Future[RayZeroError] = Future()  # done with why the sums of this host do not reach an owner
        self._watch, self._board = StallWatch(caller.name, stall_timeout), PublishBoard()
        self._lock = threading.Lock()
        self._brought: dict[int, tuple[Write, Future[None]]] = {}  # by unit, the last write
        self._memory: MirrorMemory | None = None
        self._mirrors: dict[int, Mirror] = {}
        self._sums: dict[tuple[int, ...], HostSums] = {}  # by the ranks whose gradients are added
        self._threads = TransferThreads(len(owners), caller.name, _STREAMS)  # freed by: close()
        self._links = {
            owner: OwnerLink(caller, owner, addresses[owner], terms, self, recorder) for owner in owners
        }  # freed by: close()
        self._wires = {
            owner: WireTransfers(
                link,
                self._threads,
                board=self._board,
                order=PushOrder(),
                watch=self._watch,
                lead_says=None,
                compression="none",
                recorder=recorder,
            )
            for owner, link in self._links.items()
        }

        lead = self._links.get(plan.shard_map.owner(0))  # None: it is on this host
        loop = shared_loop().loop
        self._questions = None if lead is None else LeadQuestions(lead, partial(_call_later, loop))

    # ---- what ranks ask

    @property
    def questions(self) -> LeadQuestions:
        """What ranks ask the lead. Raises StoreError if that is on this host: ranks ask it themselves."""
        if self._questions is None:
            raise StoreError(f"{self._caller.name} asks the lead for no rank: the lead is on its own host")
        return self._questions

    # ---- what is published

    def mirror(self, memory: MirrorMemory, show: Callable[[], None]) -> None:
        """Keep a copy in ``memory``, which has places for all shards of the owners. ``show``: called in any thread when
        there are newer versions in it."""
        self._memory, units = memory, self._plan.spec.layout.units
        self._mirrors = {
            owner: Mirror(self._plan.shards_of(owner), units, memory, wire, show) for owner, wire in self._wires.items()
        }

    def open(self) -> None:
        """Begin: follow what the owners publish."""
        for link in self._links.values():
            link.open()

    @property
    def offer(self) -> pb.SharedFiles | None:
        """The files that ranks of this host map; None: there is no copy."""
        return None if self._memory is None else translate.paths_to_pb(self._memory.offer())

    def bring(self, write: Write) -> Future[None]:
        """Fetch again what a write, which is made, has changed; done once it is here. Each rank asks for each write."""
        done: Future[None] = Future()
        with self._lock:
            before = self._brought.get(write.unit)
            if before is not None and before[0] == write and (not before[1].done() or before[1].exception() is None):
                return then(before[1], lambda _: None)  # one of its own: a caller that gives up ends no other's wait
            self._brought[write.unit] = write, done
        brought = [mirror.bring(write.unit) for mirror in self._mirrors.values()]
        when_all(brought, lambda _: settle(done, None), partial(fail, done))
        return then(done, lambda _: None)

    def hear(self, link: OwnerLink, notice: pb.NoticesResponse) -> None:
        published = list(map(translate.published_from_pb, notice.published))
        self._board.publish(published)
        if notice.HasField("abort"):
            self._board.release(link.owner, from_failure(notice.abort))
        if link.owner in self._mirrors:
            self._mirrors[link.owner].hear(published)

    def lost(self, link: OwnerLink, error: RayZeroError) -> None:
        log.info("%s hears nothing of %s any more: %s", link.caller.name, link.name, error)  # ranks say the same
        if link.owner in self._mirrors:
            self._mirrors[link.owner].end(error)

    # ---- what ranks push

    def join(self, rank: int, ranks: Sequence[int], threads: int, directory: Path) -> None:
        """A rank of this host has come, whose gradients leave it in the sum of ``ranks``; empty: it sends its own.
        ``threads``: that may add for each of them. ``directory``: of the ranks' memory. Raises HandshakeError if others
        say that they are added to other ranks."""
        if self._questions is not None:
            self._questions.meet(rank)
        group = tuple(ranks)
        if not group:
            return
        with self._lock:
            other = next((each for each in self._sums if each != group and set(each) & {rank, *group}), None)
            if other is not None:
                raise HandshakeError(
                    f"rank {rank} says that its gradients leave its host in the sum of ranks {list(group)}, and others "
                    f"that they leave it in that of {list(other)}: start every rank with the same zero.host_push and "
                    "slab_dir"
                )
            if group not in self._sums:
                name = f"{self._caller.name} sums of rank {group[0]}"
                number = min(max(1, threads) * len(group), os.cpu_count() or 1)
                summed = SummedRanks(self._plan, directory, group, self._token, self._caller.name, number)
                units = self._plan.spec.layout.units
                self._sums[group] = HostSums(summed, units, self._shards, self._wires, self._lacks, self._fail, name)
            sums = self._sums[group]
        sums.join()

    def leave(self, rank: int) -> None:
        """A rank of this host is gone."""
        if self._questions is not None:
            self._questions.leave(rank)

    @property
    def awaited(self) -> list[int]:
        """Of each group of ranks whose gradients are added, the first one."""
        return [group[0] for group in list(self._sums)]

    def look(self) -> None:
        """Ranks of this host have announced something, perhaps."""
        for sums in list(self._sums.values()):
            sums.look()

    def _lacks(self, owner: int, unit: int, step: int) -> bool:
        return self._board.content([shard.index for shard in self._shards[unit][owner]], step + 1) is None

    def _fail(self, error: BaseException) -> None:
        """The sums of this host do not reach an owner, so no step is decided any more: end the run by name."""
        why = error if isinstance(error, RayZeroError) else StoreError(f"{self._caller.name}: {error!r}")
        log.error("%s cannot send the gradients of its host: %s", self._caller.name, why, exc_info=error)
        request = pb.AbortRequest(failure=to_failure(why))
        for link in self._links.values():
            link.ask("Abort", request)
        settle(self.failed, why)

    # ---- deaths, and the end

    def succeed(self, owner: int, address: str) -> None:
        """An owner's process has died; its successor is at ``address``."""
        if owner in self._links:
            self._links[owner].succeed(address)

    def rejoin(self, link: OwnerLink, channel: AnyChannel) -> None:
        """Give a successor again what only its predecessor had; it publishes what it has by itself."""
        for sums in list(self._sums.values()):
            sums.send_again(link.owner, channel, self._timeout_s)

    def retire(self, error: RayZeroError) -> None:
        """Other owners have taken over: fail what ranks ask with ``error``."""
        if self._questions is not None:
            self._questions.close(error)

    def close(self, *, retires: bool) -> None:
        """End links and threads. ``retires``: another epoch has begun, and its door goes on in the same memory.
        Idempotent."""
        self._threads.closing.set()
        closed = StoreClosedError(f"the door of {self._caller.name} was closed")
        self.retire(closed)
        for sums in self._sums.values():
            sums.stop()
        for link in self._links.values():
            link.close()
        for mirror in self._mirrors.values():
            mirror.end(closed)
        self._watch.close(closed)
        self._threads.close()
        for sums in self._sums.values():
            sums.close()
        if self._questions is not None:
            self._questions.join()
        for link in self._links.values():
            link.join()
        if self._memory is not None:
            self._memory.close(unlink=not retires)


def _call_later(loop: asyncio.AbstractEventLoop, seconds: float, call: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(loop.call_later, seconds, call)
