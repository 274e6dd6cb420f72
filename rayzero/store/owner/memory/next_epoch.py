"""Prepares an owner's memory for the next epoch, while the owners of the present one stand still, and frees what moved.

On one host, the tensors of shards stay where they are, in slabs that their first owners have made: ranks' windows over
them stay as they are, and nothing is copied. What an owner has to know of its shards (what was published and applied,
where the tensors lie, how often each slice was updated) is in the control slabs of their owners, and is written into a
new one. Shards of owners on other hosts come from those, with all that they have of them (``ShardSource``), into slabs
that are made here. From there on, that owner's process takes over as a successor does. Nothing that is made
here counts before the new lead's slab is told that its epoch stands.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rayzero.errors import HandshakeError, StateLostError, StoreError
from rayzero.kernels.stamps import STAMP, STAMP_BYTES
from rayzero.layout.model_layout import Shard
from rayzero.memory.planner import check_shared, undo_bytes
from rayzero.owner.owned_model import choose_rule
from rayzero.owner.shard import OwnedShard, allocate
from rayzero.protocol.messages import ModelSpec
from rayzero.protocol.ownership import Ownership
from rayzero.slabs.arena import REGION
from rayzero.slabs.header import SlabFacts, lay_out_slab
from rayzero.slabs.slab import Slab
from rayzero.store.owner.memory.slabs import TENSORS, OwnerSlabs, is_control
from rayzero.store.shm import words
from rayzero.store.shm.shard_lines import APPLIED, CONTENT, DECIDED, PUBLISHED, ShardLines
from rayzero.store.shm.shared_plan import (
    LATER,
    LINE_BYTES,
    ON_DEVICE,
    PLACE_BYTES,
    PLACES,
    SLICE_BYTES,
    SharedPlan,
    of_lineage,
)
from rayzero.store.shm.words import Places, SlabId, all_places, region


class ControlSlab:
    """An owner's control slab in one epoch, and where its shards' entries are.

    Knows places and sizes; not what the entries mean."""

    def __init__(self, slab: Slab, plan: SharedPlan, owner: int) -> None:
        """``plan``: of the slab's epoch."""
        self.slab, self._layout = slab, plan.spec.layout
        self._line = {shard.index: i for i, shard in enumerate(plan.shards_of(owner))}
        self._tiles, self._slices = plan.first_tiles(owner), plan.first_slices(owner)

    def words(self, kind: str, offset: int = 0, size: int | None = None) -> Tensor:
        """``size`` bytes of a region from ``offset`` on; None: all of it. 1D uint8."""
        found = region(self.slab, kind)
        return self.slab.tensor(found.offset + offset, found.bytes if size is None else size, torch.uint8)

    def line(self, shard: Shard) -> Tensor:
        """A shard's version line: 1D, 8 int64."""
        return self.words("versions", self._line[shard.index] * LINE_BYTES, LINE_BYTES).view(torch.int64)

    def places(self, shard: Shard) -> Tensor:
        """Where a shard's tensors lie: 1D uint8."""
        return self.words("places", self._line[shard.index] * PLACES * PLACE_BYTES, PLACES * PLACE_BYTES)

    def progress(self, shard: Shard) -> list[Tensor]:
        """A shard's line of its total, and its tile stamps and slices, if it is trained: each 1D uint8. On a device it
        has no stamps."""
        found = [self.words("totals", self._line[shard.index] * LINE_BYTES, LINE_BYTES)]
        if self._tiles.get(shard.index, ON_DEVICE) != ON_DEVICE:
            tiles = -(-shard.numel // STAMP)
            found.append(self.words("tiles", self._tiles[shard.index] * STAMP_BYTES, tiles * STAMP_BYTES))
        if shard.index in self._slices:
            slices = len(self._layout.slices(shard))
            found.append(self.words("slices", self._slices[shard.index] * SLICE_BYTES, slices * SLICE_BYTES))
            found.append(self.words("present", 2 * self._slices[shard.index], 2 * slices))
        return found


@dataclass(frozen=True, slots=True)
class EpochFacts:
    """What an owner says of the present epoch to one on another host that takes shards over."""

    kernel: str
    began: Tensor  # which version the run began with, as its control slab has it: 1D uint8
    record: Tensor | None  # of the lead: its records of decisions, 1D uint8


class ShardSource(Protocol):
    """An owner of the present epoch on another host, which stands still."""

    def facts(self) -> EpochFacts:
        """What it says of the epoch; blocks."""
        ...

    def give(self, shards: Mapping[int, Sequence[Tensor]]) -> None:
        """Fill each shard's tensors (``carried``); blocks. Raises StoreError if it cannot be reached, or goes."""
        ...


class PreparedMemory:
    """The slabs of one owner for the next epoch: its control slab, and those of shards from other hosts."""

    def __init__(self, control: Slab, arrived: OwnerSlabs | None, moved_bytes: int = 0) -> None:
        """``moved_bytes``: of the shards that it does not have in the present epoch, or that come from another host."""
        self.control, self.moved_bytes = control, moved_bytes
        self._arrived = arrived

    def enter(self) -> Slab:
        """The next epoch has begun: returns the control slab, for the owner that takes all of it over."""
        if self._arrived is not None:
            self._arrived.leave()
        return self.control

    def close(self) -> None:
        """The next epoch does not begin: remove what was made."""
        if self._arrived is not None:
            self._arrived.close()
        self.control.close()


def prepare(
    spec: ModelSpec,
    owner: int,
    before: Ownership,
    after: Ownership,
    directory: Path,
    threads: int,
    source: Callable[[int], ShardSource],
) -> PreparedMemory:
    """Make the slabs of ``owner`` for the epoch of ``after``, from those of the epoch before, whose owners have
    published every decision. ``threads``: that update its shards. ``source``: by owner of the epoch before. The caller
    closes what is made.

    Raises StoreError if a shard's owner cannot be reached, HandshakeError if it computes with another kernel,
    MemoryPlanError if there is no room."""
    former, plan = (SharedPlan.of(spec, each.num_owners, each) for each in (before, after))
    rule = choose_rule(spec)
    facts = plan.facts("control", owner, rule.kernel, secrets.randbits(63))
    undo = undo_bytes(spec.layout, plan.shard_map, owner, rule.room)
    with ExitStack() as stack:
        _remove_abandoned(spec, owner, after.epoch, directory)
        there = _controls(stack, spec, former, directory)
        header = lay_out_slab(facts, plan.owner_control(owner, threads, undo))
        check_shared(sum(size for _, size in header.spans(LATER)), directory)
        slab, arrived = Slab.create(header, directory, later=LATER), None
        try:
            new = ControlSlab(slab, plan, owner)
            here = {shard.index: former.shard_map.owner(shard.index) for shard in plan.shards_of(owner)}
            away = defaultdict[int, list[Shard]](list)
            for shard in plan.shards_of(owner):
                if here[shard.index] not in there:
                    away[here[shard.index]].append(shard)
            if away:
                arrived = _take_in(spec, plan, facts, new, directory, {source(each): away[each] for each in away})
            _fill(new, [(shard, there.get(here[shard.index])) for shard in plan.shards_of(owner)])
            _note_epoch(new, plan, owner, former.shard_map.owner(0), there, source)
            ShardLines(slab, plan.shards_of(owner)).describe(plan.first_tiles(owner))
            words.write_terms(slab, plan)
        except BaseException:
            PreparedMemory(slab, arrived).close()
            raise
    new_here = [shard for shard, was in here.items() if after.number_of(was) != owner or was not in there]
    return PreparedMemory(slab, arrived, sum(plan.shard_map.sizes[shard] for shard in new_here))


def carried(control: ControlSlab, owned: OwnedShard) -> list[Tensor]:
    """All of a shard: its line, its other entries, its tensors. Each 1D uint8, in the control slab or the shard's
    memory."""
    own = [owned.params] if owned.master is None or owned.master is owned.params else [owned.params, owned.master]
    tensors = [*own, *(tensor for moment in owned.states.values() for tensor in moment.tensors)]
    tensors += [each for each in (owned.class_states, owned.total) if each is not None]
    noted = [control.line(owned.shard), *control.progress(owned.shard)]
    return [each.view(torch.uint8) for each in (*noted, *tensors)]


def _remove_abandoned(spec: ModelSpec, owner: int, epoch: int, directory: Path) -> None:
    """Remove what a process has left that died while the owners were to change, and did not."""
    for slab, facts in of_lineage(spec, directory):
        made_then = is_control(facts, epoch) or (facts.role in TENSORS and facts.epoch == epoch)
        if made_then and facts.index == owner:
            slab.path.unlink(missing_ok=True)


def _controls(stack: ExitStack, spec: ModelSpec, plan: SharedPlan, directory: Path) -> dict[int, ControlSlab]:
    """The control slabs of an epoch that are on this host, by owner."""
    found = {}
    for slab, facts in of_lineage(spec, directory):
        if is_control(facts, plan.ownership.epoch):
            mapped = plan.attach(str(slab.path), "the next epoch", writable=False)
            stack.callback(mapped.close)
            found[facts.index] = ControlSlab(mapped, plan, facts.index)
    return found


def _take_in(
    spec: ModelSpec,
    plan: SharedPlan,
    facts: SlabFacts,
    new: ControlSlab,
    directory: Path,
    away: Mapping[ShardSource, Sequence[Shard]],
) -> OwnerSlabs:
    """Make slabs for the shards of owners on other hosts, and fill them and their entries."""
    shards = sorted((shard for each in away.values() for shard in each), key=lambda shard: shard.index)
    places = Places(new.slab, plan.shards_of(facts.index))
    tensors = replace(facts, epoch=plan.ownership.epoch)  # says what to remove if this process dies before it stands
    memory = OwnerSlabs(plan, tensors, directory, places=places, shards=shards)
    try:
        rule = choose_rule(spec)
        numbers = [each.index for each in shards]
        owned = allocate(spec, numbers, rule.state_kinds, memory, room=rule.room, splits=rule.splits)
        for source, theirs in away.items():
            source.give({shard.index: carried(new, owned[shard.index]) for shard in theirs})
        for each in owned.values():
            each.give_back_spare()
    except BaseException:
        memory.close()
        raise
    return memory


def _fill(new: ControlSlab, shards: Sequence[tuple[Shard, ControlSlab | None]]) -> None:
    """Write what is known of each shard. With each of them the control slab, of the present epoch, that knows it; None:
    that is on another host, and it has come from there."""
    for shard, old in shards:
        line = new.line(shard)
        was = line if old is None else old.line(shard)
        if not was[PUBLISHED // 8]:
            raise StoreError(f"shard {shard.index} has no values yet: ask again once the run has taken a step")
        if was[PUBLISHED // 8] != was[DECIDED // 8] and was[DECIDED // 8]:
            raise HandshakeError(f"shard {shard.index} has a decision that is not published: the owners do not stand")
        if old is None:
            continue
        for word in (PUBLISHED, CONTENT, DECIDED, APPLIED):
            line[word // 8] = was[word // 8]
        for known, here in zip(
            (old.places(shard), *old.progress(shard)), (new.places(shard), *new.progress(shard)), strict=True
        ):
            here.copy_(known)


def _note_epoch(
    new: ControlSlab,
    plan: SharedPlan,
    owner: int,
    lead: int,
    there: Mapping[int, ControlSlab],
    source: Callable[[int], ShardSource],
) -> None:
    """Write what is of no shard. ``lead``: of the present epoch."""
    leads = plan.shard_map.owner(0) == owner
    if lead in there:
        facts = _facts_of(there[lead])
    elif there and not leads:
        facts = _facts_of(next(iter(there.values())))
    else:
        facts = source(lead).facts()
    ours = new.slab.header.facts.kernel
    if facts.kernel != ours:
        raise HandshakeError(
            f"optimizer {owner} computes with kernel {ours!r}, those that it takes over from with {facts.kernel!r}: "
            "all owners of a run must agree"
        )
    new.words("began").copy_(facts.began)
    if leads and facts.record is None:
        raise StateLostError(f"optimizer {lead} leads, and has no records")
    if leads and facts.record is not None:
        new.words("record").copy_(facts.record)


def _facts_of(control: ControlSlab) -> EpochFacts:
    record = control.words("record") if words.leads(control.slab) else None
    return EpochFacts(kernel=control.slab.header.facts.kernel, began=control.words("began"), record=record)


def free_moved(spec: ModelSpec, epoch: int, directory: Path, *, punched: str) -> int:
    """Free the memory of tensors that no owner of this host uses in an epoch that stands: remove slabs, and give pages
    back of slabs of the role ``punched`` ("params", "state") that have other tensors, too. Returns the bytes.
    Idempotent; the owners of a host may call it at once.

    [Note: parameters that moved away] What a rank has mapped stays, if its slab is removed; but pages that are given
    back read as zeros. So parameters are not given back before the ranks of this host have ended the step in which the
    owners changed, and the next one, whose parameters may still be copied from there to a device."""
    assert punched in TENSORS
    used = _used(spec, epoch, directory)
    freed = 0
    for slab, facts in of_lineage(spec, directory):
        if facts.role not in TENSORS:
            continue
        ranges = used.get((facts.role, SlabId.of(facts)))
        if ranges is None:
            slab.path.unlink(missing_ok=True)
            freed += slab.bytes
        elif facts.role == punched:
            freed += _punch(spec, slab.path, ranges)
    return freed


def _used(spec: ModelSpec, epoch: int, directory: Path) -> Mapping[tuple[str, SlabId], Sequence[tuple[int, int]]]:
    """What the owners of an epoch that are on this host use, by slab and its role: (start, stop), in bytes."""
    used = defaultdict[tuple[str, SlabId], list[tuple[int, int]]](list)
    for slab, facts in of_lineage(spec, directory):
        if is_control(facts, epoch):
            control = Slab.attach(slab.path, writable=False, run=spec.run, layout_digest=spec.layout.digest)
            for role, at, offset, size in all_places(control):
                used[role, at].append((offset, offset + size))
            control.close()
    return used


def _punch(spec: ModelSpec, path: Path, ranges: Sequence[tuple[int, int]]) -> int:
    try:
        slab = Slab.attach(path, writable=True, run=spec.run, layout_digest=spec.layout.digest)
    except HandshakeError:  # another owner has removed it
        return 0
    freed = sum(slab.punch(start, stop - start) for start, stop in _gaps(slab, ranges))
    slab.close()
    return freed


def _gaps(slab: Slab, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What of the tensors' region is in none of the ranges: (start, stop), in bytes from the slab's start."""
    for found in slab.header.regions_of(REGION):
        at = found.offset
        for start, stop in sorted(ranges):
            if at < start:
                yield at, start
            at = max(at, stop)
        if at < found.offset + found.bytes:
            yield at, found.offset + found.bytes
