"""Control slabs in use: stamps, bells and mailboxes, found by their region's kind."""

from __future__ import annotations

import struct
from array import array

from rayzero.errors import HandshakeError
from rayzero.protocol.messages import Pushed
from rayzero.slabs.header import Region
from rayzero.slabs.slab import Slab
from rayzero.store.shm.mailbox import Cells
from rayzero.store.shm.plan import SharedPlan
from rayzero.store.shm.signals import Bell, Cell, changed

_STAMP = struct.Struct("<qQII")  # step, attempt, count, bytes of presence bits, which follow


def region(slab: Slab, kind: str) -> Region:
    """A control slab's region of one kind. Raises HandshakeError where it has none."""
    found = slab.header.regions_of(kind)
    if not found:
        raise HandshakeError(f"{slab.path} has no region {kind!r}: install the same rayzero in every process")
    return found[0]


def bell_of(slab: Slab) -> Bell:
    """The bell of the slab's maker."""
    return Bell(slab.address(region(slab, "bell").offset), slab.keeper)


def cells_of(slab: Slab, kind: str, side: int, capacity: int) -> Cells:
    """A mailbox's cells for ``side``."""
    found = region(slab, kind)
    return Cells(slab.address(found.offset + side * found.stride), slab.keeper, capacity)


class Stamps:
    """One stamp per unit of a rank: what it has pushed. The rank writes; owners read."""

    def __init__(self, slab: Slab, plan: SharedPlan) -> None:
        found = region(slab, "stamps")
        self._address, self._stride, self._keeper = slab.address(found.offset), found.stride, slab.keeper
        count = len(plan.spec.layout.units)
        self._cells = [Cell(self._address + i * self._stride, self._keeper, plan.stamp_bytes) for i in range(count)]
        self._seen = array("Q", [0] * count)

    def write(self, unit: int, pushed: Pushed) -> None:
        """Tell of a push whose bytes are all there; ring bells after it."""
        head = _STAMP.pack(pushed.step, pushed.attempt, pushed.count, len(pushed.presence))
        self._cells[unit].write(head + pushed.presence)

    def news(self) -> list[tuple[int, Pushed]]:
        """(unit, what is there) of every unit that changed since the last look; one that is being written rings when
        it is done."""
        found = []
        for unit in changed(self._address, self._stride, self._seen, len(self._cells)):
            read = self._cells[unit].read()
            if read is not None:
                found.append((unit, _decode(read[1])))
        return found


def _decode(stamp: bytes) -> Pushed:
    step, attempt, count, size = _STAMP.unpack_from(stamp)
    return Pushed(step=step, attempt=attempt, count=count, presence=stamp[_STAMP.size : _STAMP.size + size])
