"""Computes what lies where in the shared memory of a run, with the same result in every process of the host.

An owner has ``params`` slabs (its shards' published parameters, mapped by ranks), ``state`` slabs (which nobody else
maps) and one ``control`` slab; a rank has ``grads`` slabs (its gradients, mapped by owners) and one ``control`` slab::

    control of an owner   bell | version lines, one a shard | tile stamps | undo log, an entry a thread | slices of
                          shards | lines of totals, one a shard | which slices totals have, twice | a total before
                          a round is added | places of their tensors | answers, for each rank | the lives of the
                          ranks that joined | the run's first version | whether the epoch stands | who owns what |
                          the layout, for followers | orders, for each owner | replies | of the lead: records of
                          decisions
    control of a rank     bell | stamps, one a unit | questions | its last finishes | what ranks of this start of the
                          run have in common

Every word has one writer, except bells: a process that has news for a bell's listener rings it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from rayzero.codecs.record import kept_bytes
from rayzero.errors import HandshakeError, StoreError
from rayzero.kernels.stamps import STAMP, STAMP_BYTES, UNDO_BYTES
from rayzero.layout.model_layout import Shard, UnitLayout, runs
from rayzero.layout.shard_map import ShardMap
from rayzero.protocol.gradient_sum import (
    GradientMemory,
    adds_up,
    gradient_dtype,
    has_totals,
    most_rounds,
    pool_bytes,
)
from rayzero.protocol.messages import MEAN_BYTES, ModelSpec, canonical_json
from rayzero.protocol.ownership import Ownership, device_owners, owner_map
from rayzero.quantities import PAGE
from rayzero.slabs.arena import Arena, ArenaPlan, SlabGroup, SlabPiece, plan_arena
from rayzero.slabs.header import SlabFacts
from rayzero.slabs.slab import Slab
from rayzero.slabs.sweep import FoundSlab, list_slabs
from rayzero.store.shm.mailbox import Cells
from rayzero.store.shm.signals import BELL_BYTES, Cell

KEPT_BYTES = (
    64  # before the kept total: WHOLE of its line, and at these bytes the line's and how many elements are kept
)
KEPT_LINE, KEPT_COUNT = 8, 16
POOL = "pool"  # key of a rank's pool among its gradients
LINE_BYTES = 64  # a shard's version line fills one cache line
SLICE_BYTES = 32  # of one slice: two copies of (count of updates, parameter group)
PLACES = 8  # of tensors of one shard: parameters, master, two for each of two coded states, or three; total
PLACE_BYTES = 32
RECORDS = 2  # slots: owners answer a collect after the updates before it, so they lack the last decision at most
LATER = ("answers", "orders")  # regions with mailboxes for every rank and owner, of which few are on one host: the
# cells of one get their pages when it is opened. With 1,000 ranks and 256 owners all of them would be gigabytes
RANK = "rank"  # in place of a kernel in the facts of a rank's control slab and its loop's
_ERROR_BYTES = 9000  # the longest error text, and its name
_REQUEST_BYTES = 256  # a mean without its names and values: rank, number, weight, a shape of 64 dimensions
FINISHES = (
    2  # of a rank that it announces: it may finish a step of which it needs nothing before owners have applied the
)
# last one, whose sums a successor may need again
KEY_BYTES = 32  # a digest of the run's token
ON_DEVICE = (1 << 62) - 1  # in place of a first tile: the shard's states are in a device's memory
STAMP_HEAD, STAMP_PUSH = 24, 16  # of a rank's stamp, and of each push in it before its presence bits (words.py)

_RANDOM_BITS = 40  # of an incarnation of a rank

Wanted = tuple[str, int, int]  # region kind, bytes, stride


def rank_incarnation(life: int) -> int:
    """A new incarnation for the slabs of a rank in its ``life``. Those of later lives are higher."""
    return life << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)


def life_of(incarnation: int) -> int:
    """The life of a rank whose slabs have this incarnation."""
    return incarnation >> _RANDOM_BITS


@dataclass(frozen=True)
class SharedPlan:
    """The sizes and places of one model's shared memory, over its owners."""

    spec: ModelSpec
    shard_map: ShardMap
    ownership: Ownership  # that led to the map

    @classmethod
    def of(cls, spec: ModelSpec, num_owners: int, ownership: Ownership | None = None) -> SharedPlan:
        """``num_owners``, ``ownership``: see ``owner_map``."""
        beside = device_owners(spec.world_size, spec.offload_fraction)
        return cls(spec, owner_map(spec, num_owners, ownership), ownership or Ownership(num_owners - beside))

    def facts(self, role: str, index: int, kernel: str, incarnation: int) -> SlabFacts:
        """The facts in the header of a slab of this run."""
        return SlabFacts(
            run=self.spec.run,
            role=role,
            index=index,
            incarnation=incarnation,
            layout_digest=self.spec.layout.digest,
            kernel=kernel,
            lineage=self.spec.lineage,
            epoch=self.ownership.epoch if role == "control" else 0,
        )

    def attach(self, path: str, who: str, *, writable: bool, life: SlabFacts | None = None) -> Slab:
        """Map another process's slab. ``who``: the process that maps it, for messages. ``life``: the facts of another
        slab of the same process.

        Raises HandshakeError if the slab is from another run or life, StoreError if it cannot be mapped."""
        slab = self._attach(path, who, writable=writable)
        facts = slab.header.facts
        if life is not None and (facts.index, facts.incarnation) != (life.index, life.incarnation):
            slab.close()
            raise HandshakeError(
                f"{path} has {facts.role} of process {facts.index} in its life {facts.incarnation:x}, {who} talks to "
                f"process {life.index} in its life {life.incarnation:x}: one of the two has been restarted"
            )
        return slab

    def _attach(self, path: str, who: str, *, writable: bool) -> Slab:
        try:
            return Slab.attach(Path(path), writable=writable, run=self.spec.run, layout_digest=self.spec.layout.digest)
        except OSError as exc:
            raise StoreError(f"{who} cannot map {path}: {exc.strerror}; set transport='grpc'") from exc

    def answering(self, owners: Iterable[int]) -> int:
        """The owner that answers the ranks of a host, of those that are there: the lead, or else the host's door."""
        here, lead = set(owners), self.shard_map.owner(0)
        return lead if lead in here else min(here)

    def shards_of(self, owner: int) -> list[Shard]:
        """An owner's shards, in the order of its version lines."""
        return [self.spec.layout.shards[index] for index in self.shard_map.shards_of(owner)]

    # ---- tensors

    def params(self, owner: int) -> ArenaPlan:
        """An owner's published parameters by shard index. A run of shards starts on a page, so that ranks can map a
        unit's shards from several owners side by side (store/rank/unit_windows.py)."""
        return self.params_of(self.shards_of(owner))

    def params_of(self, shards: Sequence[Shard]) -> ArenaPlan:
        """The same of some shards, ascending."""
        units = self.spec.layout.units
        groups = [
            SlabGroup(pieces=tuple(_piece(units[shard.unit], shard) for shard in run), align=PAGE)
            for run in runs(shards)
        ]
        return plan_arena(groups)

    def gradients(self) -> ArenaPlan:
        """A rank's gradients: ``POOL``, if owners keep totals, and the units' homes: the first by unit index, those of
        further rounds by (unit index, their number). Each is contiguous; a pool and first homes are on their own pages.
        Further homes, of which few have pages at any time, are in one file: a rank has few open."""
        adds = adds_up(self.spec.world_size, self.spec.accumulation_steps)
        trained = [unit for unit in self.spec.layout.units if unit.trainable]
        pieces = [SlabPiece(key=u.index, numel=u.numel, dtype=gradient_dtype(u, adds)) for u in trained]
        if has_totals(self.spec.world_size):
            size = pool_bytes(self.spec.layout, self.spec.accumulation_steps)
            pieces.insert(0, SlabPiece(key=POOL, numel=size, dtype=torch.uint8))
        rounds = most_rounds(self.spec.accumulation_steps) if has_totals(self.spec.world_size) else 1
        more = [
            SlabPiece(key=(unit.index, number), numel=unit.numel, dtype=unit.dtype)
            for number in range(1, rounds)
            for unit in trained
        ]
        groups = [SlabGroup(pieces=(piece,), align=PAGE) for piece in pieces]
        return plan_arena([*groups, SlabGroup(pieces=tuple(more), align=PAGE)] if more else groups)

    def gradient_memory(self, gradients: Arena) -> GradientMemory:
        """A rank's gradients where its slabs are mapped."""
        homes = {key: gradients.tensor(key) for key in gradients.plan.places if isinstance(key, int)}
        pool = gradients.tensor(POOL) if POOL in gradients.plan.places else None
        return GradientMemory(homes, pool, lambda unit, number: gradients.tensor((unit, number)))

    def gradient_bytes(self, *, pooled: bool) -> int:
        """What a rank's gradients take. ``pooled``: in a pool, where there are totals: homes take pages only while they
        are used. Otherwise all units are in their first homes, and there is no pool."""
        places = self.gradients().places
        if pooled and POOL in places:
            return places[POOL].bytes
        return sum(place.bytes for key, place in places.items() if isinstance(key, int))

    # ---- control

    def owner_control(self, owner: int, threads: int, undo: int = 0) -> Sequence[Wanted]:
        """The regions of an owner's control slab. ``threads``: how many update its shards. ``undo``: bytes of an undo
        copy (``OwnerPlan.undo``)."""
        lines = len(self.shard_map.shards_of(owner)) * LINE_BYTES
        record = (
            (("record", RECORDS * self._record_bytes, self._record_bytes),) if owner == self.shard_map.owner(0) else ()
        )
        return (
            ("bell", BELL_BYTES, 0),
            ("versions", lines, LINE_BYTES),
            ("tiles", self._tiles(owner)[1] * STAMP_BYTES, STAMP_BYTES),
            ("undo", threads * UNDO_BYTES, UNDO_BYTES),
            ("before", KEPT_BYTES + undo if undo else 0, 0),
            ("slices", self._slices(owner)[1] * SLICE_BYTES, SLICE_BYTES),
            ("totals", lines, LINE_BYTES),
            ("present", 2 * self._slices(owner)[1], 1),
            ("kept", self._kept_bytes(owner), 0),
            ("places", len(self.shard_map.shards_of(owner)) * PLACES * PLACE_BYTES, PLACE_BYTES),
            ("answers", *_cells(self.answer_bytes, self.spec.world_size)),
            ("joined", self.spec.world_size * 8, 8),
            ("began", 8, 0),
            ("stands", 8, 0),
            ("ownership", len(canonical_json(self.ownership.to_json())), 0),
            ("layout", len(canonical_json(self.spec.layout.to_json())), 0),
            ("orders", *_cells(self.order_bytes, self.shard_map.num_owners)),
            ("replies", *_cells(self.reply_bytes, 1)),
            *record,
        )

    def _kept_bytes(self, owner: int) -> int:
        """What a total is before a round is added to it: of the largest shard."""
        if not has_totals(self.spec.world_size) or self.spec.accumulation_steps == 1:
            return 0
        shards = [shard for shard in self.shards_of(owner) if self.spec.layout.units[shard.unit].trainable]
        return KEPT_BYTES + 4 * max((shard.numel for shard in shards), default=0)

    def first_tiles(self, owner: int) -> dict[int, int]:
        """Number of the first tile stamp of each trained shard, by shard index; ``ON_DEVICE`` without stamps."""
        return self._tiles(owner)[0]

    def _tiles(self, owner: int) -> tuple[dict[int, int], int]:
        first, count = {}, 0
        on_device = self.shard_map.on_device(owner)
        for shard in self.shards_of(owner):
            if on_device:
                first[shard.index] = ON_DEVICE
            elif self.spec.layout.units[shard.unit].trainable:
                first[shard.index] = count
                count += -(-shard.numel // STAMP)
        return first, count

    def first_slices(self, owner: int) -> dict[int, int]:
        """Number of the first slice of each trained shard in the owner's "slices", by shard index."""
        return self._slices(owner)[0]

    def _slices(self, owner: int) -> tuple[dict[int, int], int]:
        first, count = {}, 0
        for shard in self.shards_of(owner):
            if self.spec.layout.units[shard.unit].trainable:
                first[shard.index] = count
                count += len(self.spec.layout.slices(shard))
        return first, count

    @cached_property
    def _record_bytes(self) -> int:
        return Cell.bytes_for(64 + self._hyper_bytes + (16 + self._report_bytes) * self.spec.world_size)

    def rank_control(self) -> Sequence[Wanted]:
        """The regions of a rank's control slab."""
        stride = Cell.bytes_for(self.stamp_bytes)
        return (
            ("bell", BELL_BYTES, 0),
            ("stamps", stride * len(self.spec.layout.units), stride),
            ("questions", *_cells(self.question_bytes, 1)),
            ("finished", FINISHES * Cell.bytes_for(self._report_bytes), Cell.bytes_for(self._report_bytes)),
            ("key", Cell.bytes_for(KEY_BYTES), 0),
        )

    @cached_property
    def _hyper_bytes(self) -> int:
        """Room for hyper-parameters, which may get longer during training, with more digits. In steps, so that a run
        that begins with other digits finds the same places."""
        return 8192 + 4 * len(canonical_json(self.spec.hyper)) // 4096 * 4096

    @cached_property
    def _report_bytes(self) -> int:
        return 96 + 10 * len(self.spec.layout.units)

    @cached_property
    def stamp_bytes(self) -> int:
        """The longest stamp of a unit."""
        pushes = most_rounds(self.spec.accumulation_steps) if has_totals(self.spec.world_size) else 1
        longest = max(((len(unit.slots) + 7) // 8 for unit in self.spec.layout.units), default=0)
        return STAMP_HEAD + pushes * (STAMP_PUSH + longest)

    @cached_property
    def question_bytes(self) -> int:
        """The longest finish, commit or mean."""
        return max(self._report_bytes + self._hyper_bytes, _REQUEST_BYTES + MEAN_BYTES)

    @cached_property
    def answer_bytes(self) -> int:
        """The longest decision or error."""
        return _ERROR_BYTES + self._hyper_bytes + 10 * self.spec.world_size

    @cached_property
    def order_bytes(self) -> int:
        """The longest collect or apply."""
        return self._report_bytes * self.spec.world_size + self._hyper_bytes

    @cached_property
    def reply_bytes(self) -> int:
        """The longest list of norm parts, or an error."""
        layout = self.spec.layout
        return _ERROR_BYTES + 32 * sum(len(layout.slices(shard)) for shard in layout.shards)


def of_lineage(spec: ModelSpec, directory: Path) -> list[tuple[FoundSlab, SlabFacts]]:
    """The slabs of a run and its lineage, of all its processes."""
    found = [(slab, slab.header.facts) for slab in list_slabs(directory) if slab.header is not None]
    return [(slab, facts) for slab, facts in found if (facts.run, facts.lineage) == (spec.run, spec.lineage)]


def _piece(unit: UnitLayout, shard: Shard) -> SlabPiece:
    """The memory of a shard's published parameters: a record if they are kept encoded."""
    if unit.is_coded:
        return SlabPiece(key=shard.index, numel=kept_bytes(unit, shard), dtype=torch.uint8)
    return SlabPiece(key=shard.index, numel=shard.numel, dtype=unit.dtype)


def _cells(capacity: int, sides: int) -> tuple[int, int]:
    """Bytes of a region with ``Cells`` for each side, and bytes of one side's ``Cells``."""
    stride = Cells.bytes_for(capacity)
    return stride * sides, stride
