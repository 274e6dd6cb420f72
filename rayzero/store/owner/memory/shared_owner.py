"""An owner's end of shared memory: publishes versions there, and takes in what ranks and the lead write."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from rayzero.errors import HandshakeError, RayZeroError, StoreClosedError, StoreError
from rayzero.memory.planner import OwnerPlan, check_shared
from rayzero.owner.service import ShardService
from rayzero.owner.shard import OwnedShard
from rayzero.protocol.messages import ModelSpec, Published, Record, SharedPaths, SharedPlace
from rayzero.protocol.ownership import Ownership
from rayzero.quantities import format_bytes
from rayzero.slabs.arena import Arena
from rayzero.slabs.header import check_header, lay_out_slab
from rayzero.slabs.slab import Slab
from rayzero.slabs.sweep import SHARED_MEMORY, sweep
from rayzero.store.host.door import Door
from rayzero.store.owner.memory.next_epoch import ControlSlab, carried, free_moved
from rayzero.store.owner.memory.slabs import FormerSlabs, OwnerSlabs
from rayzero.store.owner.step_calls import StepCalls
from rayzero.store.shm.mailbox import Answerer, Asker
from rayzero.store.shm.shard_lines import ShardLines, TotalLines
from rayzero.store.shm.shared_plan import LATER, SharedPlan, Wanted, life_of
from rayzero.store.shm.signals import Bell, Listener, host_identity, load_acquire_64, store_release_64
from rayzero.store.shm.words import (
    Places,
    Stamps,
    bell_of,
    cells_of,
    check_regions,
    leads,
    let_stand,
    read_records,
    region,
    write_record,
    write_terms,
)

log = logging.getLogger(__name__)

_FREED = -1  # in place of the version with which parameters that moved away are freed: they are


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank of this host."""

    rank: int
    life: int
    bell: Bell
    stamps: Stamps
    questions: Answerer | None  # None: it asks another owner of this host
    slabs: tuple[Slab, ...]


class SharedOwner:
    """Publishes an owner's versions in shared memory and takes in the pushes and questions of its host's ranks.

    Knows slabs, bells and mailboxes; not what a step is. One thread listens; it waits for nothing but its bell."""

    def __init__(
        self,
        owner: int,
        num_owners: int,
        directory: Path = SHARED_MEMORY,
        *,
        ownership: Ownership | None = None,
        threads: int = 1,
        succeeds: bool = False,
        prepared: Slab | None = None,
    ) -> None:
        """``ownership``: see ``ShardService``. ``threads``: how many update shards. ``succeeds``: this process takes
        over the slabs that a dead process of the same owner has left, or that were prepared for this epoch, if there
        are values in them. ``prepared``: the control slab that this process has prepared; None: it has none. Its lock
        keeps all slabs of the run from being swept between two epochs. Freed by: close()."""
        self._prepared = prepared
        self._ownership = ownership
        self._threads, self.takes_over = threads, succeeds
        self._taken_over = self._published = False
        self._frees_at: int | None = None  # the version with which parameters that moved away are freed
        self.owner, self._num_owners, self.directory = owner, num_owners, directory
        self.host = host_identity(directory)
        self._life = secrets.randbits(63)
        self._lock = threading.Lock()
        self._joining = threading.Lock()  # a repeat of join waits for the call that it repeats
        self._looking = threading.Lock()  # held while reading what others wrote, so that each message is taken once
        self._failed = False  # a message could not be read
        self._ranks: dict[int, _Rank] = {}
        self._orders: dict[int, Asker] = {}  # on the lead: its mailbox to each other owner
        self._lead: Answerer | None = None  # where this owner answers the lead
        self._others: dict[int, Slab] = {}  # control slabs of other owners
        self._listener: Listener | None = None
        self.door: Door | None = None  # of this host, if this owner is that
        self._plan: SharedPlan | None = None
        self._memory: OwnerSlabs | None = None
        self._control: Slab | None = None

    # ---- memory

    def make_memory(self, spec: ModelSpec, kernel: str, plan: OwnerPlan) -> OwnerSlabs:
        """Make the slabs for this owner's tensors and signals, or take over those of a former life; see
        ``MemoryMaker``. Sweeps slabs of dead runs first.

        Raises MemoryPlanError, before anything is allocated, if they and the ranks' gradients do not fit."""
        self._plan = SharedPlan.of(spec, self._num_owners, self._ownership)
        regions = self._plan.owner_control(self.owner, self._threads, plan.undo)
        former = self._take_over(self._plan, regions) if self.takes_over else None
        swept = sweep(self.directory)  # not before the run has a living process again
        if swept:
            size = format_bytes(sum(size for _, size in swept))
            log.info("optimizer %d removed %d slabs of dead processes, %s", self.owner, len(swept), size)
        if former is None:
            check_shared(plan.total - plan.private, self.directory)
            facts = self._plan.facts("control", self.owner, kernel, self._life)
            self._control = Slab.create(lay_out_slab(facts, regions), self.directory, later=LATER)
            self._lines = ShardLines(self._control, self._plan.shards_of(self.owner))
            self._lines.describe(self._plan.first_tiles(self.owner))
            write_terms(self._control, self._plan)
            let_stand(self._control)  # a later epoch stands once its lead is asked to let it (Step.LET_STAND)
        control = self._own_control()
        places = Places(control, self._plan.shards_of(self.owner))
        self._totals = TotalLines(control, self._plan, self.owner)
        self._memory = OwnerSlabs(
            self._plan, control.header.facts, self.directory, self._lines, places, former, totals=self._totals
        )
        self._bell = bell_of(control)
        return self._memory

    def _take_over(self, plan: SharedPlan, regions: Sequence[Wanted]) -> FormerSlabs | None:
        """Take over the control slab of a former life; its other slabs. None: there are none, or its shards had no
        values and they are removed. Raises HandshakeError if they are of another model."""
        spec = plan.spec
        former = FormerSlabs.find(spec, self.owner, self.directory, plan.ownership.epoch)
        if former is None:
            return None
        control, self._prepared = self._prepared or former.control(), None
        try:
            check_header(str(control.path), control.header, run=spec.run, layout_digest=spec.layout.digest)
            check_regions(control, regions, but="undo")  # of which each life has as many as threads
            lines = ShardLines(control, plan.shards_of(self.owner))
            began = lines.news() or plan.ownership.epoch or not plan.shards_of(self.owner)
            if began:  # else a death may have come before the lines say which shards they are of
                lines.check(str(control.path))
        except HandshakeError as error:
            control.close(unlink=False)
            raise HandshakeError(
                f"optimizer {self.owner} cannot go on with what its run has left in memory: {error}; go on with the "
                "same model and config, or resume from a checkpoint by name (run.resume=CHECKPOINT)"
            ) from error
        except BaseException:
            control.close(unlink=False)
            raise
        if not began:
            control.close(unlink=False)
            former.remove()
            return None
        if leads(control):
            let_stand(control)  # the owner that had to may have died; no owner is succeeded before
        self._control, self._lines, self._taken_over = control, lines, True
        return former

    @property
    def took_over(self) -> bool:
        """Whether this owner goes on from what a former life, or the owners of the last epoch, have left."""
        return self._taken_over

    def offer(self) -> SharedPaths:
        """The files that a rank of this host has to map, after the service has attached."""
        assert self._memory is not None
        arena = self._memory.arena
        shards = ((key, at) for key, at in arena.plan.places.items() if isinstance(key, int))
        places = tuple(SharedPlace(shard, at.slab, at.offset) for shard, at in shards)
        return SharedPaths(str(self._own_control().path), tuple(str(slab.path) for slab in arena.slabs), places)

    # ---- for owners on other hosts

    def carried(self, owned: OwnedShard) -> list[Tensor]:
        """All of a shard, for its owner of the next epoch: each 1D uint8."""
        assert self._plan is not None
        return carried(ControlSlab(self._own_control(), self._plan, self.owner), owned)

    def noted(self) -> tuple[bytes, bytes]:
        """What the control slab says of no shard: which version the run began with and, of the lead, its records."""
        assert self._plan is not None
        control = ControlSlab(self._own_control(), self._plan, self.owner)
        record = control.words("record").numpy().tobytes() if leads(control.slab) else b""
        return control.words("began").numpy().tobytes(), record

    # ---- serving

    def serve(self, service: ShardService, steps: StepCalls) -> None:
        """Publish the versions of ``service``; ``steps`` answers questions from mailboxes."""
        self._service, self._steps = service, steps
        service.on_publish(self._publish)
        service.on_write(lambda shard, begins: self._totals.note_write(shard, begins=begins))

    def keep_record(self, record: Record) -> None:
        """On the lead: keep a record of a decision where it outlives this process."""
        write_record(self._own_control(), record)

    def records(self) -> list[Record]:
        """On the lead: what is recorded, by step."""
        return read_records(self._own_control())

    # ---- joining

    def join(self, rank: int, rank_memory: SharedPaths, owners: Mapping[int, str], back_at: int | None = None) -> None:
        """Map a rank's slabs and, once, the control slabs of the other owners of this host (owner -> path). A repeat
        changes nothing.

        ``back_at``: see ``ShardService.map_gradients``. Raises HandshakeError if they are not from this run, StoreError
        if they cannot be mapped."""
        with self._joining:
            if not self._has_mapped(rank, rank_memory):
                self._map(rank, rank_memory, owners, back_at)

    def shares_with(self, rank: int) -> bool:
        """Whether the rank has joined: it sees in shared memory what is published."""
        return rank in self._ranks

    def _has_mapped(self, rank: int, rank_memory: SharedPaths) -> bool:
        joined = self._ranks.get(rank)
        return joined is not None and str(joined.slabs[0].path) == rank_memory.control

    def _map(self, rank: int, rank_memory: SharedPaths, owners: Mapping[int, str], back_at: int | None) -> None:
        plan = self._plan
        assert plan is not None
        who = f"optimizer {self.owner}"
        control = plan.attach(rank_memory.control, who, writable=True)
        slabs = tuple(plan.attach(path, who, writable=False, life=control.header.facts) for path in rank_memory.tensors)
        gradients = Arena(plan.gradients(), slabs)
        bell, incarnation = bell_of(control), control.header.facts.incarnation
        resumes, answerer = self._note_life(rank, incarnation), None
        if plan.answering(owners) == self.owner:
            questions = cells_of(control, "questions", 0, plan.question_bytes)
            answers = cells_of(self._own_control(), "answers", rank, plan.answer_bytes)
            answerer = Answerer(questions, answers, bell, resumes=resumes)
        joined = _Rank(rank, life_of(incarnation), bell, Stamps(control, plan), answerer, (control, *slabs))
        self._service.map_gradients(rank, plan.gradient_memory(gradients), back_at)
        with self._lock:
            self._meet_owners(owners)
            self._ranks[rank] = joined
            if self._listener is None:
                self._listener = Listener(self._bell, self._listen, f"owner-{self.owner}-bell")
        self._bell.ring()

    def _note_life(self, rank: int, life: int) -> bool:
        """Note the life of a rank that joins; returns whether a former life of this owner has noted the same."""
        control = self._own_control()
        word = control.address(region(control, "joined").offset + 8 * rank)
        known = load_acquire_64(word) == life
        store_release_64(word, life)
        return known

    def _meet_owners(self, owners: Mapping[int, str]) -> None:
        """Open the mailboxes between the lead and the other owners, at the first rank's join; anew with an owner that
        has died before it had any value, and whose successor made other slabs."""
        plan = self._plan
        assert plan is not None
        lead = plan.shard_map.owner(0)
        if lead not in owners or self.owner not in owners:
            return
        for owner, path in owners.items():
            if owner == self.owner or lead not in (owner, self.owner):
                continue
            former = self._others.get(owner)
            if former is not None and str(former.path) == path:
                continue
            slab = self._others[owner] = plan.attach(path, f"optimizer {self.owner}", writable=True)
            if former is not None:
                former.close()
            if lead == self.owner:
                orders = cells_of(self._own_control(), "orders", owner, plan.order_bytes)
                replies = cells_of(slab, "replies", 0, plan.reply_bytes)
                self._orders[owner] = Asker(orders, replies, bell_of(slab))
            else:
                orders = cells_of(slab, "orders", self.owner, plan.order_bytes)
                replies = cells_of(self._own_control(), "replies", 0, plan.reply_bytes)
                resumes = self._taken_over and former is None
                self._lead = Answerer(orders, replies, bell_of(slab), resumes=resumes)

    def _own_control(self) -> Slab:
        assert self._control is not None
        return self._control

    # ---- messages

    def _publish(self, published: Sequence[Published]) -> None:
        """Runs in the updater's thread: writes the lines first, then rings every rank's bell."""
        self._published = True
        self._free_moved(published)
        for each in published:
            self._lines.publish(each)
        self.ring()

    def ring(self) -> None:
        """Wake every rank of this host: there are newer versions in memory. Any thread may call it."""
        for rank in list(self._ranks.values()):
            rank.bell.ring()

    def _free_moved(self, published: Sequence[Published]) -> None:
        """See [Note: parameters that moved away]."""
        plan = self._plan
        if plan is None or not plan.ownership.epoch or self._frees_at == _FREED or not published:
            return
        newest = max(each.version for each in published)
        self._frees_at = newest + 2 if self._frees_at is None else self._frees_at
        if newest >= self._frees_at:
            self._frees_at = _FREED
            free_moved(plan.spec, plan.ownership.epoch, self.directory, punched="params")

    def ask(self, owner: int, method: str, request: bytes) -> Future[bytes] | None:
        """On the lead: ask another owner; None if shared memory does not reach it, or cannot take the question."""
        asker = self._orders.get(owner)
        return asker.ask(method, request) if asker is not None else None

    def _listen(self) -> None:
        with self._looking:
            self._look()
        if self.door is not None:
            self.door.look()

    def _hear(self, take: Callable[[], None]) -> None:
        """Take one kind of message. One that cannot be read ends the run; others are still read, so that ranks that ask
        get the error."""
        try:
            take()
        except Exception as exc:  # this loop supervises everything that the owner reads
            if not self._failed:  # it would be logged again at every look
                log.exception("optimizer %d cannot go on", self.owner)
            self._failed = True
            self._service.abort(exc if isinstance(exc, StoreError) else StoreError(f"an owner failed: {exc!r}"))

    def _look(self) -> None:
        for rank in list(self._ranks.values()):
            self._look_at(rank)
        if self._lead is not None:
            self._hear(partial(self._answer_all, self._lead, self._steps.begin_bytes))
        for asker in self._orders.values():
            self._hear(asker.take_answers)

    def _look_at(self, rank: _Rank) -> None:
        self._hear(partial(self._observe, rank))
        if rank.questions is not None:
            self._hear(partial(self._answer_all, rank.questions, partial(self._ask, rank)))

    def _observe(self, rank: _Rank) -> None:
        for unit, pushes in rank.stamps.news():
            for pushed in pushes:
                self._service.observe(rank.rank, unit, pushed)

    def _ask(self, rank: _Rank, method: str, request: bytes) -> Future[bytes]:
        """Begin to answer a rank, or let the door of this host ask the lead."""
        assert self._plan is not None
        if self.owner == self._plan.shard_map.owner(0):
            return self._steps.begin_bytes(method, request)
        assert self.door is not None, "a rank's door is opened before its questions are read"
        return self.door.questions.ask(rank.rank, rank.life, method, request)

    def _answer_all(self, answerer: Answerer, ask: Callable[[str, bytes], Future[bytes]]) -> None:
        for slot, number, method, request in answerer.take_questions():
            try:
                answer = ask(method, request)
            except RayZeroError as exc:
                answerer.answer(slot, number, exc)
                continue
            answer.add_done_callback(partial(_pass_on, answerer, slot, number))

    # ---- the end

    def leave(self, rank: int) -> None:
        """A rank is gone. Its last messages are read first, because they may come after the news that it left; then
        nothing of it is read but gradients that already count."""
        with self._lock:
            gone = self._ranks.pop(rank, None)
        if gone is None:
            return
        with self._looking:
            self._look_at(gone)
        if gone.questions is not None:  # the rank's next life has the same cells here
            gone.questions.close()
        if self.door is not None:
            self.door.leave(rank)
        for slab in gone.slabs:
            slab.close()

    def close(self, *, retires: bool = False) -> None:
        """End the listener and close the control slabs. The service closes the tensors. Idempotent. ``retires``: the
        next epoch has control slabs of its own."""
        if self._listener is not None:
            self._listener.close()
        error = StoreClosedError(f"optimizer {self.owner} was closed")
        for asker in self._orders.values():
            asker.close(error)
        for rank in list(self._ranks):
            self.leave(rank)
        for slab in self._others.values():
            slab.close()
        if self._prepared is not None:
            self._prepared.close()
        if self._control is not None:  # what was taken over but refused stays for another successor
            self._control.close(unlink=self._published or retires or not self._taken_over)
        if retires and self._plan is not None:
            free_moved(self._plan.spec, self._plan.ownership.epoch + 1, self.directory, punched="state")


def _pass_on(answerer: Answerer, slot: int, number: int, done: Future[bytes]) -> None:
    error = done.exception()
    if error is None:
        answerer.answer(slot, number, done.result())
    else:
        answerer.answer(slot, number, error if isinstance(error, RayZeroError) else StoreError(repr(error)))
