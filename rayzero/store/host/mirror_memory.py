"""The memory of a host's mirror: what owners on other hosts publish, where the ranks of the host read it.

    control    version lines, one a shard of the model: those of shards without a copy are zero | what is in their
               totals, a ``total_word`` each | the last epoch in which it was kept
    mirrored   the shards, each at a place that the layout alone determines; only those with a copy have pages

One optimizer actor of the host writes it. It outlives that process and the epoch: whichever process has the work next
takes it over (``Slab.adopt``), so that ranks stay where they are mapped.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from rayzero.errors import HandshakeError
from rayzero.layout.model_layout import Shard
from rayzero.memory.planner import check_shared
from rayzero.protocol.gradient_sum import has_pushed
from rayzero.protocol.messages import Published, Pushed, SharedPaths
from rayzero.slabs.arena import Arena
from rayzero.slabs.header import SlabFacts, check_header, lay_out_slab
from rayzero.slabs.slab import Slab
from rayzero.slabs.sweep import FoundSlab
from rayzero.store.shm.shard_lines import ShardLines
from rayzero.store.shm.shared_plan import LINE_BYTES, SharedPlan, of_lineage
from rayzero.store.shm.signals import load_acquire_64, store_release_64
from rayzero.store.shm.words import key_name, region

CONTROL, SHARDS = "mirror", "mirrored"  # roles of the slabs
_WORD_BYTES = 8


class MirrorLines:
    """The version lines of a mirror and its shards, as the ranks of the host read them."""

    def __init__(self, plan: SharedPlan, control: Slab, slabs: Sequence[Slab]) -> None:
        """``slabs``: with the shards. Raises HandshakeError if they are not those of this plan's model."""
        layout = plan.spec.layout
        self.control, self.shards = control, Arena.over(plan.params_of(layout.shards).places, slabs)
        self.lines, self._totals = ShardLines(control, layout.shards), control.address(region(control, "totals").offset)
        self.lines.check(str(control.path))

    def in_total(self, shard: int, pushed: Pushed) -> bool:
        """Whether what a rank has pushed is in a shard's total."""
        return has_pushed(load_acquire_64(self._totals + _WORD_BYTES * shard), pushed)

    @classmethod
    def attach(cls, plan: SharedPlan, memory: SharedPaths, who: str, *, writable: bool) -> MirrorLines:
        """Map the memory that another process keeps. ``who``: maps it, for messages. ``writable``: the shards; CUDA
        locks only what may be written. Raises as ``SharedPlan.attach`` does."""
        control = plan.attach(memory.control, who, writable=False)
        return cls(plan, control, [plan.attach(path, who, writable=writable) for path in memory.tensors])

    def close(self) -> None:
        """Leave it. Idempotent."""
        for slab in (self.control, *self.shards.slabs):
            slab.close(unlink=False)


class MirrorMemory:
    """A mirror's memory at the process that writes it.

    Knows slabs and lines; not where bytes come from."""

    def __init__(self, control: Slab, shards: Arena, lines: ShardLines) -> None:
        """``open`` calls it."""
        self._control, self._shards, self._lines = control, shards, lines
        self._totals = control.address(region(control, "totals").offset)
        self.former = {each.shard: each for each in lines.news()}  # what an earlier process has left, by shard

    @classmethod
    def open(cls, plan: SharedPlan, copied: Sequence[Shard], key: str, model: int, directory: Path) -> MirrorMemory:
        """Take over what an earlier process of this host has left, or make it.

        copied: the shards that are to have memory, ascending. key: a secret of this start of the run. model: the
        number of the prepared model.

        Raises MemoryPlanError, with the sum, if there is no room, StoreError if another process still writes it."""
        former = _find(plan, key_name(key), model, directory)
        check_shared(_new_bytes(plan, copied, former is not None), directory)
        control, shards = _make(plan, key_name(key), model, directory) if former is None else _adopt(plan, *former)
        try:
            lines = ShardLines(control, plan.spec.layout.shards)
            lines.describe({})
            _forget_others(plan, control, lines, copied)
            for shard in copied:
                shards.allocate(shard.index)
        except BaseException:
            for slab in (control, *shards.slabs):
                slab.close(unlink=former is None)
            raise
        return cls(control, shards, lines)

    def tensor(self, shard: Shard) -> Tensor:
        """A shard's bytes as its owner publishes them: 1D, the unit's dtype, or a record (codecs/record.py)."""
        return self._shards.tensor(shard.index)

    def show(self, published: Published) -> None:
        """A shard's bytes are whole, and of this version. The caller rings bells afterwards."""
        self._lines.publish(published)

    def total(self, shard: int, word: int) -> None:
        """Show what is in a shard's total (``total_word``). The caller rings bells afterwards."""
        store_release_64(self._totals + _WORD_BYTES * shard, word)

    def forget(self, shard: Shard) -> None:
        """A shard's bytes are about to change within their version: the next process to take over fetches it again."""
        self._lines.publish(Published(shard.index, -1, -1))

    def offer(self) -> SharedPaths:
        """The files that ranks of this host map."""
        return SharedPaths(str(self._control.path), tuple(str(slab.path) for slab in self._shards.slabs))

    def close(self, *, unlink: bool) -> None:
        """Leave it to another process of this run, or remove it. Idempotent."""
        for slab in (self._control, *self._shards.slabs):
            slab.close(unlink=unlink)


def _forget_others(plan: SharedPlan, control: Slab, lines: ShardLines, copied: Sequence[Shard]) -> None:
    """Forget what was not kept up to now: writes that changed it within a version were not brought here."""
    epoch = control.address(region(control, "epoch").offset)
    kept = {shard.index for shard in copied} if plan.ownership.epoch - load_acquire_64(epoch) in (0, 1) else set()
    for shard in plan.spec.layout.shards:
        if shard.index not in kept:
            lines.publish(Published(shard.index, -1, -1))
    store_release_64(epoch, plan.ownership.epoch)


_Former = tuple[FoundSlab, list[FoundSlab]]  # the control slab, and those with shards in their order


def _find(plan: SharedPlan, kernel: str, model: int, directory: Path) -> _Former | None:
    """What is there; that of an earlier start of the run, which no process maps any more, is removed."""
    roles = [
        (facts, slab)
        for slab, facts in of_lineage(plan.spec, directory)
        if facts.role in (CONTROL, SHARDS) and facts.index == model
    ]
    for facts, slab in roles:
        if facts.kernel != kernel and not slab.alive:
            slab.path.unlink(missing_ok=True)
    there = [(facts, slab) for facts, slab in roles if facts.kernel == kernel]
    for facts, control in there:
        if facts.role == CONTROL:
            shards = [each for each in there if (each[0].role, each[0].incarnation) == (SHARDS, facts.incarnation)]
            return control, [slab for _, slab in sorted(shards, key=lambda each: each[0].number)]
    return None


def _new_bytes(plan: SharedPlan, copied: Sequence[Shard], exists: bool) -> int:
    """Of the shards, where none of them has memory yet."""
    return 0 if exists else sum(place.bytes for place in plan.params_of(copied).places.values())


def _make(plan: SharedPlan, kernel: str, model: int, directory: Path) -> tuple[Slab, Arena]:
    layout, incarnation = plan.spec.layout, secrets.randbits(63)

    def facts(role: str) -> SlabFacts:
        return plan.facts(role, model, kernel, incarnation)

    shards = Arena.create(plan.params_of(layout.shards), facts(SHARDS), directory, sparse=True)
    number = len(layout.shards)
    regions = (
        ("versions", number * LINE_BYTES, LINE_BYTES),
        ("totals", number * _WORD_BYTES, _WORD_BYTES),
        ("epoch", 8, 0),
    )
    try:
        return Slab.create(lay_out_slab(facts(CONTROL), regions), directory), shards
    except BaseException:
        shards.close()
        raise


def _adopt(plan: SharedPlan, control: FoundSlab, shards: Sequence[FoundSlab]) -> tuple[Slab, Arena]:
    places = plan.params_of(plan.spec.layout.shards)
    if len(shards) != len(places.slabs):
        raise HandshakeError(f"{control.path} is the mirror of a host, and some of its shards are gone")
    taken = Slab.adopt(control.path)
    try:
        check_header(str(taken.path), taken.header, run=plan.spec.run, layout_digest=plan.spec.layout.digest)
        return taken, Arena.adopt(places.places, [slab.path for slab in shards])
    except BaseException:
        taken.close(unlink=False)
        raise
