"""A rank's end of shared memory: its gradients, its messages to owners, and the owners' parameters."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rayzero.errors import EpochOverError, HandshakeError, RayZeroError
from rayzero.memory.mapping import PageLock, beyond_limit
from rayzero.memory.planner import check_shared
from rayzero.protocol.gradient_sum import GradientMemory
from rayzero.protocol.messages import FinishReport, LoopState, Pushed, SharedPaths
from rayzero.quantities import count
from rayzero.slabs.arena import Arena
from rayzero.slabs.header import lay_out_slab
from rayzero.slabs.slab import FillProgress, Slab
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.store.host.mirror_memory import MirrorLines
from rayzero.store.host.waits import PublishBoard
from rayzero.store.rank.unit_windows import UnitWindows
from rayzero.store.shm.mailbox import Asker
from rayzero.store.shm.recovery import LoopSlab, loop_states, remove_former_lives
from rayzero.store.shm.shard_lines import ShardLines, TotalLines
from rayzero.store.shm.shared_plan import POOL, RANK, SharedPlan, life_of, rank_incarnation
from rayzero.store.shm.signals import Bell, Listener
from rayzero.store.shm.words import Finishes, Stamps, bell_of, cell_of, cells_of, key_digest


def doubt_of_locks(plan: SharedPlan, owners: Sequence[int], *, pooled: bool) -> str | None:
    """Why a rank may fail to page-lock its gradients and the parameters of ``owners``, which are on its host; None if
    there is no such reason. ``pooled``: see ``SharedRank``."""
    params = sum(sum(plan.params(owner).slabs) for owner in owners)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return beyond_limit(params, plan.gradient_bytes(pooled=pooled), soft)


class _Owner:
    """An owner of this host: its control slab, its parameters and its bell."""

    def __init__(self, owner: int, control: Slab, params: Arena, plan: SharedPlan) -> None:
        self.owner, self.control, self.params = owner, control, params
        self.bell = bell_of(control)
        self.lines = ShardLines(control, plan.shards_of(owner))
        self.lines.check(str(control.path))
        self.totals = TotalLines(control, plan, owner)
        self.units = {shard.unit for shard in plan.shards_of(owner)}

    def close(self) -> None:
        for slab in (self.control, *self.params.slabs):
            slab.close()


class SharedRank:
    """What one rank shares with the owners of its host.

    Knows slabs, bells, windows and a mailbox; not steps, or owners on other hosts. One thread waits on the
    bell and takes in published versions and answers."""

    def __init__(
        self,
        rank: int,
        plan: SharedPlan,
        directory: Path = SHARED_MEMORY,
        *,
        life: int = 0,
        key: str = "",
        page_lock: torch.device | None = None,
        pooled: bool = True,
    ) -> None:
        """Allocate the rank's gradient memory. ``key``: a secret of this start of the run, by which the door of a
        host knows its ranks. ``page_lock``: lock it and the owners' parameters, for copies to and
        from this CUDA device; None: neither. ``life``: how often the rank has died and come back. ``pooled``: units
        take turns in a pool, if there are totals; False: owners on other hosts need what was pushed for a whole step,
        so each unit has a place of its own. Raises MemoryPlanError if there is no room."""
        self.rank, self._plan, self._page_lock, self.directory = rank, plan, page_lock, directory
        self._loop: LoopSlab | None = None  # made at the first keep
        # the step with which this life has come back, while the memory of former lives is here
        self.back_at: int | None = None
        self._locks: list[PageLock] = []
        gradients, self._incarnation = plan.gradients(), rank_incarnation(life)
        self.pooled = pooled and POOL in gradients.places
        self.gives_back = self.pooled or plan.spec.accumulation_steps > 1  # ranges while a step goes on
        check_shared(plan.gradient_bytes(pooled=pooled), directory)
        self._gradients = Arena.create(
            gradients,
            plan.facts("grads", rank, "", self._incarnation),
            directory,
            on_progress=FillProgress(f"rank {rank}"),
            sparse=POOL in gradients.places,
        )
        try:
            if POOL in gradients.places:
                self.take()
            header = lay_out_slab(plan.facts("control", rank, RANK, self._incarnation), plan.rank_control())
            self._control = Slab.create(header, directory)
        except BaseException:
            self._gradients.close()
            raise
        self._bell: Bell = bell_of(self._control)
        self._stamps = Stamps(self._control, plan)
        self._finishes = Finishes(self._control)
        cell_of(self._control, "key").write(key_digest(key))
        self.on_bell: Callable[[], None] = lambda: None  # also called when the bell rings, and at least once a second
        self._owners: dict[int, _Owner] = {}
        self.door: int | None = None  # the owner that sends this rank's gradients to other hosts in sums
        self.mirror: MirrorLines | None = None  # this host's copy of what other owners publish
        self._windows: UnitWindows | None = None
        self._asker: Asker | None = None  # of the lead, or of the door that asks it
        self._taking = threading.RLock()  # held while answers are taken, each once
        self._listener: Listener | None = None

    # ---- joining

    def gradients(self) -> GradientMemory:
        """The memory for this rank's gradients. Of a pool and homes, only what is used all the time is page-locked."""
        if self._page_lock is not None and not self._locks:
            self._locks = list(self._lock_pages(self._page_lock))
        memory = self._plan.gradient_memory(self._gradients)
        return memory if self.pooled else replace(memory, pool=None)

    def _lock_pages(self, device: torch.device) -> Iterator[PageLock]:
        places = self._gradients.plan.places
        if POOL not in places:
            yield from (slab.page_lock(device) for slab in self._gradients.slabs)
            return
        for place in map(places.__getitem__, self._lasting):
            yield self._gradients.slabs[place.slab].page_lock(device, place.offset, place.bytes)

    @property
    def _lasting(self) -> list[Hashable]:
        """What has pages whether it is used or not: the pool, or the first homes."""
        return [key for key in self._gradients.plan.places if (key == POOL if self.pooled else isinstance(key, int))]

    def release(self) -> None:
        """Give the pages of ranges that have some all the time back until ``take``. Nothing reads or writes there any
        more. CUDA would go on with the pages that it has locked."""
        for key in self._lasting if self._page_lock is None else ():
            self._gradients.punch(key)

    def take(self) -> None:
        """Have them again. No effect on those that are there. Raises MemoryPlanError if there is no room."""
        for key in self._lasting:
            self._gradients.allocate(key)

    def allocate(self, unit: int, number: int) -> None:
        """See ``HomePages.allocate``. Without a pool, first homes always have their pages."""
        if self.pooled or number:
            self._gradients.allocate((unit, number) if number else unit)

    def give_back(self, unit: int, number: int) -> None:
        """See ``HomePages.give_back``."""
        if self.pooled or number:
            self._gradients.punch((unit, number) if number else unit)

    def offer(self) -> SharedPaths:
        """The files that owners have to map."""
        return SharedPaths(str(self._control.path), tuple(str(slab.path) for slab in self._gradients.slabs))

    def meet(self, memories: Mapping[int, SharedPaths]) -> None:
        """Map the slabs of this host's owners. Raises HandshakeError if they are not from this run."""
        for owner, memory in memories.items():
            self._owners[owner] = self._met(owner, memory)
        if memories:
            self._open_mailbox()

    def _open_mailbox(self) -> None:
        """Ask the owner of this host that answers its ranks."""
        answering, plan = self._owners[self._plan.answering(self._owners)], self._plan
        questions = cells_of(self._control, "questions", 0, plan.question_bytes)
        answers = cells_of(answering.control, "answers", self.rank, plan.answer_bytes)
        self._asker = Asker(questions, answers, answering.bell)

    def _met(self, owner: int, memory: SharedPaths) -> _Owner:
        plan, who = self._plan, f"rank {self.rank}"
        control = plan.attach(memory.control, who, writable=True)
        writes = self._page_lock is not None  # CUDA locks only what may be written
        slabs = [plan.attach(path, who, writable=writes) for path in memory.tensors]  # perhaps others' too
        shapes = plan.params(owner).places
        if shapes.keys() != {key for key, _, _ in memory.places}:
            raise HandshakeError(
                f"optimizer {owner} says where {count(len(memory.places), 'shard')} of its {len(shapes)} lie, or where "
                "others do: install the same rayzero in every process"
            )
        places = {key: replace(shapes[key], slab=slab, offset=offset) for key, slab, offset in memory.places}
        return _Owner(owner, control, Arena.over(places, slabs), plan)

    def meet_mirror(self, memory: SharedPaths) -> Arena:
        """Map this host's copy of what owners on other hosts publish; returns its shards. Raises as ``meet`` does."""
        writes = self._page_lock is not None  # CUDA locks only what may be written
        before = self.mirror
        self.mirror = MirrorLines.attach(self._plan, memory, f"rank {self.rank}", writable=writes)
        if before is not None:
            before.close()
        self._bell.ring()
        return self.mirror.shards

    def enter(self, plan: SharedPlan, memories: Mapping[int, SharedPaths], board: PublishBoard) -> None:
        """Go on with the owners of the next epoch; ``enter_windows`` comes later. ``memories``: of those of this host.
        Questions to the lead that have no answer must be asked again. Raises HandshakeError as ``meet`` does."""
        before, self._plan, self._board = self._owners, plan, board
        asker, self._asker, self._owners = self._asker, None, {}
        if asker is not None:
            asker.close(EpochOverError(f"rank {self.rank}: the lead was another one before"))
        self.meet(memories)
        for each in before.values():
            each.close()
        self._bell.ring()

    def enter_windows(self, others: Mapping[int, Arena]) -> None:
        """Let windows show the owners of this epoch; see ``windows``."""
        if self._windows is not None:
            self._windows.enter(self._plan, {**others, **self._params()})

    def listen(self, board: PublishBoard) -> None:
        """Start the thread that brings published versions to ``board`` and takes in the lead's answers."""
        self._board = board
        self._listener = Listener(self._bell, self._look, f"rayzero-rank{self.rank}-bell")

    def windows(self, others: Mapping[int, Arena]) -> UnitWindows:
        """Windows over the parameters of all owners that ``meet`` has mapped, and over what this host has of the
        others'."""
        self._windows = UnitWindows(self._plan, {**others, **self._params()}, page_lock=self._page_lock)
        return self._windows

    def _params(self) -> dict[int, Arena]:
        return {owner.owner: owner.params for owner in self._owners.values()}

    def _look(self) -> None:
        for owner in self._owners.values():
            published = owner.lines.news()
            if published:
                self._board.publish(published)
        if self.mirror is not None and (arrived := self.mirror.lines.news()):
            self._board.arrived(arrived)
        self.take_answers()
        self.on_bell()

    def take_answers(self) -> None:
        """Settle the questions that have answers. Any thread may call it."""
        if self._asker is not None:
            with self._taking:
                self._asker.take_answers()

    # ---- a step

    def finished(self, report: FinishReport) -> None:
        """Announce to the door of this host how often each unit was pushed."""
        self._finishes.write(report)
        if self.door is not None and (door := self._owners.get(self.door)) is not None:  # else other owners take over
            door.bell.ring()

    def note(self, unit: int, pushed: Sequence[Pushed]) -> None:
        """See ``Joined``."""
        self._stamps.write(unit, pushed)

    @property
    def totals(self) -> Mapping[int, TotalLines]:
        """By owner of this host, what is in its totals."""
        return {owner: each.totals for owner, each in self._owners.items()}

    def announce(self, unit: int, pushed: Sequence[Pushed]) -> None:
        """Tell the unit's owners of this host, and its door, about pushes whose bytes are all there."""
        self._stamps.write(unit, pushed)
        for owner in self._owners.values():
            if unit in owner.units or owner.owner == self.door:
                owner.bell.ring()

    def keep(self, state: LoopState) -> None:
        """Write a state of the rank's loop into a slab. Raises MemoryPlanError if there is no room."""
        before = self._loop
        if before is None or not before.takes(state):
            self._loop = LoopSlab.create(self._plan, self.rank, self._incarnation, len(state.content), self.directory)
            if before is not None:
                for older in before.states():
                    self._loop.write(older)
                before.close()
        assert self._loop is not None
        self._loop.write(state)
        if self.back_at is not None and state.step >= self.back_at + 3:
            # a step is decided behind theirs, so all that they pushed is applied, and this one's loop has newer states
            remove_former_lives(self._plan.spec, self.rank, life_of(self._incarnation), self.directory)
            self.back_at = None

    def kept(self) -> list[LoopState]:
        """The states that this rank's lives have kept here, oldest first."""
        return loop_states(self._plan, self.rank, self.directory)

    def ask_lead(self, method: str, request: bytes) -> Future[bytes] | None:
        """Ask the lead, perhaps through the door of this host; None where the mailbox does not hold the question."""
        return self._asker.ask(method, request) if self._asker is not None else None

    def ask_again(self) -> None:
        """The lead has died: take the answers that have come, and ask its successor the rest."""
        if self._asker is not None:
            with self._taking:
                self._asker.take_answers()
                self._asker.ask_again()

    @property
    def questions(self) -> list[tuple[str, bytes]]:
        """(method, request) of each question to the lead that has no answer."""
        return [] if self._asker is None else self._asker.open

    def lost(self, owner: int, error: RayZeroError) -> None:
        """An owner is gone. If it was the lead, or answered for it, pending questions fail with ``error``."""
        if self._asker is not None and owner in (self._plan.shard_map.owner(0), self._plan.answering(self._owners)):
            self._asker.close(error)

    # ---- parameters

    def shard(self, owner: int, shard: int) -> Tensor:
        """A shard's published parameters where its owner has them, or in this host's copy: 1D, the unit's dtype, or a
        record (codecs/record.py). Do not write to it."""
        if owner in self._owners:
            return self._owners[owner].params.tensor(shard)
        assert self.mirror is not None
        return self.mirror.shards.tensor(shard)

    # ---- the end

    def close(self, error: RayZeroError) -> None:
        """End the listener and release everything. Pending questions fail with ``error``. Idempotent."""
        if self._listener is not None:
            self._listener.close()
        if self._asker is not None:
            self._asker.close(error)
        for lock in self._locks:
            lock.release()
        for owner in self._owners.values():
            owner.close()
        if self.mirror is not None:
            self.mirror.close()
        if self._loop is not None:
            self._loop.close()
        self._control.close()
        self._gradients.close()
