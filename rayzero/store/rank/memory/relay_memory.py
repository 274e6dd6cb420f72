"""Memory of a host for shards whose owners are elsewhere: one rank fetches each, all ranks of the host read it there.

A control slab and slabs with the shards. The rank that comes first makes them, the others find them by the names of
their run, under a lock of the directory; whoever leaves last removes them.

    control   bell | claims, a word a shard (store/shm/claims.py) | fetchers, an entry for each rank that has joined |
              which shards there is memory for, a byte each
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from rayzero.concurrency.processes import has_died, kernel_word, this_process
from rayzero.config.zero import HostFetch
from rayzero.errors import MemoryPlanError, StallError, StoreError
from rayzero.memory.planner import check_shared
from rayzero.quantities import format_bytes
from rayzero.slabs.arena import Arena, ArenaPlan
from rayzero.slabs.directory_lock import locked
from rayzero.slabs.fill_progress import FillProgress
from rayzero.slabs.header import SlabFacts, lay_out_slab
from rayzero.slabs.slab import Slab
from rayzero.slabs.sweep import FoundSlab
from rayzero.store.shm.claims import CLAIM_BYTES, MOST_CLAIMERS, Claims
from rayzero.store.shm.shared_plan import SharedPlan, of_lineage
from rayzero.store.shm.signals import BELL_BYTES, load_acquire_64, store_release_64
from rayzero.store.shm.words import bell_of, key_name, region

log = logging.getLogger(__name__)

CONTROL, SHARDS = "relay", "relayed"  # roles of the slabs
_LIFE = 256  # a number is that of an entry, plus this for each process that has had the entry before
MOST_FETCHERS = _LIFE - 1  # ranks of a host that live at once, and those that have died in another pid namespace
FETCHER_BYTES = 64
_KERNEL, _PID, _STARTED, _MOVED, _LIVES = range(0, 40, 8)
"""Bytes from an entry's start: a process, how many messages it has received, its number."""


def join_memory(
    host_fetch: HostFetch,
    plan: SharedPlan,
    away: Sequence[int],
    key: str,
    model: int,
    directory: Path,
    *,
    who: str,
    patience_s: float,
) -> RelayMemory | None:
    """The memory of this host for the shards of the owners ``away``; None: each rank fetches for itself. ``who``: the
    rank, for the log. See ``RelayMemory.join``, whose errors this raises with host_fetch="always" only."""
    shards = [shard.index for owner in away for shard in plan.shards_of(owner)]
    if host_fetch == "never" or not shards:
        return None
    try:
        memory = RelayMemory.join(plan, shards, key, model, directory, patience_s=patience_s)
    except (MemoryPlanError, StoreError, OSError) as error:
        if host_fetch == "always":
            raise
        log.warning("%s fetches parameters for itself, not once for its host: %s", who, error)
        return None
    log.info("%s fetches %s of parameters together with its host", who, format_bytes(memory.bytes))
    return memory


class _Fetchers:
    """The processes that have joined, by number: that of an entry, from 1, and how often the entry was taken before. So
    a claim of a process that is dead is not taken for one of its successor in the entry. Entries change under the
    directory's lock only."""

    def __init__(self, control: Slab) -> None:
        found = region(control, "fetchers")
        self._address, self._keeper = control.address(found.offset), control.keeper
        self._dead: dict[int, tuple[int, ...]] = {}  # what was in the entry of one that has died

    def take(self) -> int:
        """A number for the calling process. Raises StoreError if there is none."""
        numbers = (self._number_in(entry) for entry in range(1, MOST_FETCHERS + 1))
        former = next((number for number in numbers if self.is_dead(number)), None)
        if former is None:
            raise StoreError(f"all {MOST_FETCHERS} entries for ranks of this host are taken")
        me, number = this_process(), (former + _LIFE) & MOST_CLAIMERS
        written = ((_KERNEL, kernel_word(me)), (_STARTED, me.started), (_MOVED, 0), (_LIVES, number), (_PID, me.pid))
        for word, value in written:
            store_release_64(self._at(number, word), value)
        return number

    def leave(self, number: int) -> None:
        """Free a number."""
        store_release_64(self._at(number, _PID), 0)

    def living_without(self, number: int) -> list[int]:
        """The numbers of processes that are not known to be dead, ``number`` apart."""
        there = [self._number_in(entry) for entry in range(1, MOST_FETCHERS + 1)]
        return [each for each in there if each != number and not self.is_dead(each)]

    def is_dead(self, number: int) -> bool:
        """Whether a process that has joined has left, or is known to have died; not one in another pid namespace."""
        entry = tuple(load_acquire_64(self._at(number, word)) for word in (_KERNEL, _PID, _STARTED))
        kernel, pid, started = entry
        if pid == 0 or self._number_in(number % _LIFE) != number or self._dead.get(number) == entry:
            return True
        dead = has_died(kernel, pid, started)
        if dead:
            self._dead[number] = entry
        return dead

    def moved(self, number: int) -> int:
        """How many messages with shards a process has received."""
        return load_acquire_64(self._at(number, _MOVED))

    def move(self, number: int) -> None:
        """Count one more for the calling process, whose ``number`` this is; one thread at a time."""
        store_release_64(self._at(number, _MOVED), self.moved(number) + 1)

    def _number_in(self, entry: int) -> int:
        """That of the last process in an entry."""
        return load_acquire_64(self._at(entry, _LIVES)) or entry

    def _at(self, number: int, word: int) -> int:
        return self._address + (number % _LIFE - 1) * FETCHER_BYTES + word


class RelayMemory:
    """One rank's end of its host's memory for shards from elsewhere.

    Knows slabs, claims and the processes that have joined; not how bytes come here, or who needs them."""

    def __init__(self, control: Slab, shards: Arena, directory: Path) -> None:
        """Join under the directory's lock. ``join`` calls it."""
        self.control, self.shards, self._directory = control, shards, directory
        self.bell = bell_of(control)
        self._fetchers, found = _Fetchers(control), region(control, "claims")
        self.number, self._num_shards = self._fetchers.take(), found.bytes // CLAIM_BYTES
        self.claims = Claims(control.address(found.offset), control.keeper, self.number)
        self.changing: set[int] = set()  # shards that owners are about to change within a version, also over epochs
        self._counting, self._left = threading.Lock(), False

    @classmethod
    def join(
        cls, plan: SharedPlan, away: Collection[int], key: str, model: int, directory: Path, *, patience_s: float
    ) -> RelayMemory:
        """Find the memory that another rank of this host has made, or make it.

        away: the shards whose owners share no memory with this host's ranks. key: a secret that all ranks of one start
        of a run have, and no others. model: the number of the prepared model. patience_s: how long another rank may
        take to make it.

        Raises MemoryPlanError, with the sum, if there is no room, StallError if the directory stays locked."""
        kernel = key_name(key)
        with locked(directory, patience_s):
            for control, found in _found(plan, model, kernel, directory):
                if (memory := cls._attach(plan, control, [slab for _, slab in found], directory)) is not None:
                    return memory
            return cls(*_make(plan, sorted(away), model, kernel, directory), directory)

    @classmethod
    def _attach(
        cls, plan: SharedPlan, control: FoundSlab, found: Sequence[FoundSlab], directory: Path
    ) -> RelayMemory | None:
        """Join what another rank has made. None: all that had joined are dead, and it is removed."""
        attached = plan.attach(str(control.path), "a rank", writable=True)
        fetchers = _Fetchers(attached)
        if not control.alive and not fetchers.living_without(0):
            attached.close()
            for slab in (control, *found):
                slab.path.unlink(missing_ok=True)
            return None
        slabs = [plan.attach(str(slab.path), "a rank", writable=True) for slab in found]
        return cls(attached, Arena.over(_plan_of(plan, _covered(attached)).places, slabs), directory)

    def has(self, shard: int) -> bool:
        """Whether there is memory for a shard."""
        return shard in self.shards.plan.places

    def tensor(self, shard: int) -> Tensor:
        """A shard's bytes, as its owner publishes them: 1D, the unit's dtype, or a record (codecs/record.py)."""
        return self.shards.tensor(shard)

    def is_dead(self, claimer: int) -> bool:
        """Whether the process of a claimer is known to have died."""
        return self._fetchers.is_dead(claimer)

    def moved(self, claimer: int) -> int:
        """A number that changes while a claimer receives bytes."""
        return self._fetchers.moved(claimer)

    def move(self) -> None:
        """Say that this rank has received something."""
        with self._counting:
            self._fetchers.move(self.number)

    @property
    def bytes(self) -> int:
        """Of the shards' slabs."""
        return sum(slab.header.bytes for slab in self.shards.slabs)

    def close(self) -> None:
        """Leave. Nothing of this rank writes a shard any more. The last one removes the memory. Idempotent."""
        if self._left:
            return
        self._left = True
        self.claims.void(self._num_shards, self.number)
        with suppress(StallError), locked(self._directory, patience_s=1.0):  # else a sweep removes it
            self._fetchers.leave(self.number)
            last = not self._fetchers.living_without(self.number)
            for slab in (self.control, *self.shards.slabs):
                if last and slab.path is not None:
                    slab.path.unlink(missing_ok=True)
                slab.close(unlink=last)
        self.bell.ring()


def _make(plan: SharedPlan, away: Sequence[int], model: int, kernel: str, directory: Path) -> tuple[Slab, Arena]:
    arena_plan, num_shards = _plan_of(plan, away), len(plan.spec.layout.shards)
    check_shared(sum(arena_plan.slabs), directory)
    incarnation = secrets.randbits(63)

    def facts(role: str) -> SlabFacts:
        return plan.facts(role, model, kernel, incarnation)

    arena = Arena.create(arena_plan, facts(SHARDS), directory, on_progress=FillProgress("the host's memory"))
    wanted = (
        ("bell", BELL_BYTES, 0),
        ("claims", num_shards * CLAIM_BYTES, CLAIM_BYTES),
        ("fetchers", MOST_FETCHERS * FETCHER_BYTES, FETCHER_BYTES),
        ("covers", num_shards, 1),
    )
    try:
        control = Slab.create(lay_out_slab(facts(CONTROL), wanted), directory)
    except BaseException:
        arena.close()
        raise
    covers = region(control, "covers")
    control.tensor(covers.offset, covers.bytes, torch.uint8)[list(away)] = 1
    return control, arena


def _plan_of(plan: SharedPlan, shards: Sequence[int]) -> ArenaPlan:
    return plan.params_of([plan.spec.layout.shards[index] for index in shards])


def _covered(control: Slab) -> list[int]:
    covers = region(control, "covers")
    return torch.nonzero(control.tensor(covers.offset, covers.bytes, torch.uint8)).flatten().tolist()


def _found(
    plan: SharedPlan, model: int, kernel: str, directory: Path
) -> Iterator[tuple[FoundSlab, list[tuple[SlabFacts, FoundSlab]]]]:
    """The control slabs of a model in this start of the run, each with the slabs of its shards in their order."""
    there = [(facts, slab) for slab, facts in of_lineage(plan.spec, directory) if facts.index == model]
    for facts, slab in there:
        if (facts.role, facts.kernel) == (CONTROL, kernel):
            shards = [each for each in there if (each[0].role, each[0].incarnation) == (SHARDS, facts.incarnation)]
            yield slab, sorted(shards, key=lambda each: each[0].number)
