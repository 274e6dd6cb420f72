"""One cache line per shard in its owner's control slab: what is in its total. Ranks read there which gradients they may
give back; a successor, what it need not add up again.

Two 64-bit words: 2 x ((step + 1) x ATTEMPTS + the lowest attempt that is in it), 0 while there is no whole total, + 1
if ranks keep their gradients all the same; the digest of its summands. Which slices have a gradient is in another
region, a byte each.
"""

from __future__ import annotations

import torch

from rayzero.protocol.lives import ATTEMPTS
from rayzero.protocol.totals import Total
from rayzero.slabs.slab import Slab
from rayzero.store.shm.plan import LINE_BYTES, SharedPlan
from rayzero.store.shm.signals import load_acquire_64, store_release_64
from rayzero.store.shm.words import region

WHOLE, DIGEST = range(0, 16, 8)  # bytes from a line's start


class SlabTotalLine:
    """A ``TotalLine`` (protocol/totals.py) in a control slab."""

    def __init__(self, line: int, present: torch.Tensor, keeper: object) -> None:
        """``line``: its address. ``present``: 1D uint8, one for each slice of the shard."""
        self._line, self._present, self._keeper = line, present, keeper

    def write(self, step: int, oldest: int, digest: int, present: tuple[bool, ...]) -> None:
        """See ``TotalLine.write``."""
        self._present.copy_(torch.tensor(present, dtype=torch.uint8, device="cpu"))
        store_release_64(self._line + DIGEST, digest)
        store_release_64(self._line + WHOLE, 2 * ((step + 1) * ATTEMPTS + oldest))

    def hold(self) -> None:
        """See ``TotalLine.hold``."""
        store_release_64(self._line + WHOLE, load_acquire_64(self._line + WHOLE) | 1)

    def clear(self) -> None:
        """See ``TotalLine.clear``."""
        store_release_64(self._line + WHOLE, 0)

    def read(self) -> Total | None:
        """See ``TotalLine.read``."""
        whole = load_acquire_64(self._line + WHOLE) // 2
        if not whole:
            return None
        present = tuple(map(bool, self._present.tolist()))
        return Total(whole // ATTEMPTS - 1, load_acquire_64(self._line + DIGEST), present)


class TotalLines:
    """The lines of one owner. It writes; ranks of its host read."""

    def __init__(self, slab: Slab, plan: SharedPlan, owner: int) -> None:
        """``plan``: of the slab's epoch."""
        found, self._slab, self._layout = region(slab, "totals"), slab, plan.spec.layout
        address, self._keeper = slab.address(found.offset), slab.keeper
        self._line = {shard.index: address + i * LINE_BYTES for i, shard in enumerate(plan.shards_of(owner))}
        self._slices = plan.first_slices(owner)

    def line(self, shard: int) -> SlabTotalLine:
        """That of a trained shard."""
        slices = len(self._layout.slices(self._layout.shards[shard]))
        offset = region(self._slab, "present").offset + self._slices[shard]
        return SlabTotalLine(self._line[shard], self._slab.tensor(offset, slices, torch.uint8), self._keeper)

    def has(self, shard: int, step: int, attempt: int) -> bool:
        """Whether gradients of a rank's ``attempt`` at a step are in a shard's total, and nowhere else needed."""
        whole = load_acquire_64(self._line[shard] + WHOLE)
        return not whole % 2 and whole // 2 >= (step + 1) * ATTEMPTS + attempt % ATTEMPTS
