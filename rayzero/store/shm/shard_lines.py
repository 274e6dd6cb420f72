"""One cache line per shard in its owner's control slab: what was decided, applied and published. Ranks read it while
the owner lives, recovery reads it after the owner's death.

Eight 64-bit words: published version + 1, content version + 1, shard index, start, stop, decided version + 1, twice
(applied version + 1) and which copy of its slices holds, first tile stamp + 1. Zero means a shard without values, a
version that never was, a shard without tiles. The owner writes all of them. The words from ``decided`` on are only read
once it is dead (store/shm/recovery.py), or by its successor.

Another cache line says what is in the shard's total. Ranks read there which gradients they may give back; a successor,
what it need not add up again. Four 64-bit words: WHOLE, 0 while there is no whole total, else its ``total_word``
(protocol/gradient_sum.py), + 1 if ranks keep their gradients all the same; two digests of summands, of which the one
with the number rounds mod 2 holds; WRITES, which a user's write to the shard raises as it begins, to an odd number, and
as it ends, for followers. So do two copies of which slices have a gradient, in another region, a byte each.

[Note: a total is kept] A round is added to a total in place, and ranks have given back what is in it. So the owner
notes the total's WHOLE, copies each part of the total before it changes it, and says how far it has come. If it dies
before WHOLE says that the round is in, its successor copies that back. One shard is added to at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import torch

from rayzero.errors import HandshakeError
from rayzero.kernels.stamps import STAMP, TileStamps, UndoCopy
from rayzero.layout.model_layout import Shard
from rayzero.protocol.gradient_sum import MOST_ROUNDS, WORD_STEP, KeptTotal, Total, TotalLine, digest_of, has_pushed
from rayzero.protocol.messages import FormerShard, Published, Pushed
from rayzero.slabs.slab import Slab
from rayzero.store.shm.shared_plan import (
    KEPT_BYTES,
    KEPT_COUNT,
    KEPT_LINE,
    LINE_BYTES,
    ON_DEVICE,
    SLICE_BYTES,
    SharedPlan,
)
from rayzero.store.shm.signals import changed, load_acquire_64, store_release_64
from rayzero.store.shm.words import region

PUBLISHED, CONTENT, INDEX, START, STOP, DECIDED, APPLIED, TILES = range(0, 64, 8)  # bytes from a line's start
WHOLE, *DIGESTS, WRITES = range(0, 32, 8)  # bytes from the start of a total's line


class ShardLines:
    """The lines of one owner. Its owner writes; ranks read."""

    def __init__(self, slab: Slab, shards: Sequence[Shard]) -> None:
        """``shards``: the owner's shards, in the order of their lines."""
        found = region(slab, "versions")
        self._slab, self._address, self._keeper = slab, slab.address(found.offset), slab.keeper
        self._shards = shards
        self._line = {shard.index: self._address + i * LINE_BYTES for i, shard in enumerate(shards)}
        self._seen = array("Q", [0] * len(shards))

    def describe(self, first_tiles: Mapping[int, int]) -> None:
        """Write which shard each line is of and where its tile stamps begin. The owner does this first."""
        for shard in self._shards:
            line, first = self._line[shard.index], first_tiles.get(shard.index, -1)
            for at, value in ((INDEX, shard.index), (START, shard.start), (STOP, shard.stop), (TILES, first + 1)):
                store_release_64(line + at, value)

    def check(self, source: str) -> None:
        """Raise HandshakeError unless the lines are of the shards that this process expects."""
        for shard in self._shards:
            line = self._line[shard.index]
            there = tuple(load_acquire_64(line + at) for at in (INDEX, START, STOP))
            if there != (shard.index, shard.start, shard.stop):
                raise HandshakeError(f"{source} has shard {there}, this process has {shard}, as (index, start, stop)")

    def publish(self, published: Published) -> None:
        """Make a version visible. The caller rings bells afterwards."""
        line = self._line[published.shard]
        store_release_64(line + CONTENT, published.content + 1)
        store_release_64(line + PUBLISHED, published.version + 1)

    def news(self) -> list[Published]:
        """The versions published since the last look."""
        found = []
        for i in changed(self._address, LINE_BYTES, self._seen, len(self._shards)):
            content = load_acquire_64(self._address + i * LINE_BYTES + CONTENT) - 1
            found.append(Published(self._shards[i].index, self._seen[i] - 1, content))
        return found

    def former(self, shard: int, journal: LineJournal | None) -> FormerShard | None:
        """What a former life of the owner has left of a shard; None: it never had values."""
        line = self._line[shard]
        published, content = (load_acquire_64(line + at) - 1 for at in (PUBLISHED, CONTENT))
        if published < 0:
            return None
        applied, slices = journal.left if journal is not None else (-1, ())
        return FormerShard(published=published, content=content, applied=applied, slices=slices)

    def first_version(self, version: int, *, noted: bool) -> int:
        """Note the version that the run began with. ``noted``: a former life has; returns what it noted."""
        began = self._slab.address(region(self._slab, "began").offset)
        if not noted:
            store_release_64(began, version + 1)
        return load_acquire_64(began) - 1

    def journal(self, shard: int, first_slice: int, num_slices: int) -> LineJournal | None:
        """The journal of a shard; None if the shard has no tile stamps. ``first_slice``: of the shard, in "slices"."""
        line = self._line[shard]
        first = load_acquire_64(line + TILES) - 1
        if not 0 <= first < ON_DEVICE:
            return None
        slices = self._slab.tensor(
            region(self._slab, "slices").offset + first_slice * SLICE_BYTES, num_slices * 4, torch.int64
        )
        undo = region(self._slab, "undo")
        log = self._slab.tensor(undo.offset, undo.bytes, torch.uint8).view(-1, undo.stride)
        stamps, copies = tile_stamps(self._slab, line, first), slices.view(2, num_slices, 2)
        return LineJournal(line, stamps, first, log, undo_copy(self._slab), copies)


class LineJournal:
    """A ``ShardJournal`` (owner/memory.py) in a shard's line."""

    def __init__(
        self,
        line: int,
        stamps: torch.Tensor,
        first: int,
        undo: torch.Tensor,
        copy: UndoCopy | None,
        slices: torch.Tensor,
    ) -> None:
        """``line``: its address. ``slices``: int64, (2, slices, 2): two copies, of which the line says which holds."""
        self._line, self._stamps, self._first, self._undo, self._copy = line, stamps, first, undo, copy
        self._slices = slices.numpy()  # written faster than a tensor

    def stamps(self, version: int) -> TileStamps:
        """See ``ShardJournal.stamps``."""
        return TileStamps(self._stamps, version, self._first, self._undo, self._copy)

    def decided(self, version: int) -> None:
        """See ``ShardJournal.decided``."""
        store_release_64(self._line + DECIDED, version + 1)

    def applied(self, version: int, slices: Sequence[tuple[int, int]]) -> None:
        """See ``ShardJournal.applied``: one store makes version and slices valid together."""
        other = 1 - self._holds
        self._slices[other] = slices
        store_release_64(self._line + APPLIED, 2 * (version + 1) + other)

    def keep(self, slices: Sequence[tuple[int, int]]) -> None:
        """See ``ShardJournal.keep``."""
        self.applied(self.left[0], slices)

    @property
    def left(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """The version that a former life applied last, and the slices with it (``FormerShard``)."""
        applied = load_acquire_64(self._line + APPLIED) // 2 - 1
        return applied, tuple((count, group) for count, group in self._slices[self._holds].tolist())

    @property
    def _holds(self) -> int:
        return load_acquire_64(self._line + APPLIED) % 2


def undo_copy(slab: Slab) -> UndoCopy | None:
    """Where an owner keeps what an update of a whole shard is about to overwrite; None: its kernel has a log."""
    found = region(slab, "before")
    if not found.bytes:
        return None
    words = slab.tensor(found.offset, 2, torch.int64)
    return UndoCopy(words, slab.tensor(found.offset + KEPT_BYTES, found.bytes - KEPT_BYTES, torch.uint8))


def tile_stamps(slab: Slab, line: int, first: int) -> torch.Tensor:
    """The stamps of the shard whose line is at address ``line``, from stamp ``first`` on: 1D int64."""
    numel = load_acquire_64(line + STOP) - load_acquire_64(line + START)
    return slab.tensor(region(slab, "tiles").offset + first * 8, -(-numel // STAMP), torch.int64)


class SlabTotalLine(TotalLine):
    """In a control slab."""

    def __init__(self, line: int, present: torch.Tensor, kept: _KeptTotals, keeper: object) -> None:
        """``line``: its address. ``present``: (2, slices of the shard), uint8. ``kept``: of all lines."""
        self._line, self._present, self._kept, self._keeper = line, present, kept, keeper
        self._written: list[tuple[bool, ...]] = [(), ()]  # of ``present``, by this process

    def write(self, made: Total) -> None:
        assert not isinstance(made.summands, int)
        before, word = load_acquire_64(self._line + WHOLE), made.word
        which = word >> 1 & 1
        if self._written[which] != made.present:
            self._present[which] = torch.tensor(made.present, dtype=torch.uint8, device="cpu")
            self._written[which] = made.present
        store_release_64(self._line + DIGESTS[which], digest_of(made.summands))
        held = before & 1 if before >> WORD_STEP == word >> WORD_STEP else 0
        store_release_64(self._line + WHOLE, word | held)

    def hold(self) -> None:
        store_release_64(self._line + WHOLE, load_acquire_64(self._line + WHOLE) | 1)

    def clear(self) -> None:
        store_release_64(self._line + WHOLE, 0)

    def keeps(self, total: torch.Tensor) -> KeptTotal:
        return self._kept.open(self._line, load_acquire_64(self._line + WHOLE), total)

    def read(self, total: torch.Tensor) -> Total | None:
        whole = load_acquire_64(self._line + WHOLE)
        rounds = whole >> 1 & MOST_ROUNDS
        if not rounds:
            return None
        self._kept.bring_back(self._line, whole, total)
        present = tuple(map(bool, self._present[rounds % 2].tolist()))
        return Total((whole >> WORD_STEP) - 1, rounds, load_acquire_64(self._line + DIGESTS[rounds % 2]), present)


class _KeptTotals:
    """What a total was before the round that is being added to it. See [Note: a total is kept]."""

    def __init__(self, slab: Slab, first: int) -> None:
        """``first``: the address of the first line."""
        found = region(slab, "kept")
        self._slab, self._first = slab, first
        self._address, self._offset, self._bytes = slab.address(found.offset), found.offset, found.bytes
        self._made: dict[int, KeptTotal] = {}  # by number of elements

    def open(self, line: int, whole: int, total: torch.Tensor) -> KeptTotal:
        kept = self._of(total)
        for at, value in ((0, 0), (KEPT_COUNT, 0), (KEPT_LINE, line - self._first), (0, whole | 1)):
            store_release_64(self._address + at, value)
        return kept

    def bring_back(self, line: int, whole: int, total: torch.Tensor) -> None:
        if not self._bytes or load_acquire_64(self._address) != whole | 1:
            return
        if load_acquire_64(self._address + KEPT_LINE) == line - self._first:
            kept = self._of(total)
            there = int(kept.count)
            total[:there] = kept.values[:there]

    def _of(self, total: torch.Tensor) -> KeptTotal:
        numel = total.numel()
        if numel not in self._made:
            values = self._slab.tensor(self._offset + KEPT_BYTES, numel, torch.float32)
            self._made[numel] = KeptTotal(values, self._slab.tensor(self._offset + KEPT_COUNT, 1, torch.int64))
        return self._made[numel]


class TotalLines:
    """The lines of one owner. It writes; ranks of its host read."""

    def __init__(self, slab: Slab, plan: SharedPlan, owner: int) -> None:
        """``plan``: of the slab's epoch."""
        found, self._slab, self._layout = region(slab, "totals"), slab, plan.spec.layout
        address, self._keeper = slab.address(found.offset), slab.keeper
        self._line = {shard.index: address + i * LINE_BYTES for i, shard in enumerate(plan.shards_of(owner))}
        self._slices, self._kept = plan.first_slices(owner), _KeptTotals(slab, address)

    def line(self, shard: int) -> SlabTotalLine:
        """That of a trained shard."""
        slices = len(self._layout.slices(self._layout.shards[shard]))
        offset = region(self._slab, "present").offset + 2 * self._slices[shard]
        present = self._slab.tensor(offset, 2 * slices, torch.uint8).view(2, slices)
        return SlabTotalLine(self._line[shard], present, self._kept, self._keeper)

    def note_write(self, shard: int, *, begins: bool) -> None:
        """A user's write to a shard begins, or has ended. The owner that makes a killed one anew goes on counting."""
        word = self._line[shard] + WRITES
        store_release_64(word, (load_acquire_64(word) | 1) + (not begins))

    def has(self, shard: int, pushed: Pushed) -> bool:
        """Whether what a rank has pushed is in a shard's total, and nowhere else needed; False for a shard of another
        owner, as while owners change."""
        if shard not in self._line:
            return False
        whole = load_acquire_64(self._line[shard] + WHOLE)
        return not whole & 1 and has_pushed(whole, pushed)
