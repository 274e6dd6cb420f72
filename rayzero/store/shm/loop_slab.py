"""A slab with the states of a rank's loop at its latest three steps. The rank writes; an owner maps it, so that it
outlives the rank, and reads it when the rank is gone."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from rayzero.errors import HandshakeError
from rayzero.protocol.messages import LOOP_PARTS, LOOP_STEPS, LoopState
from rayzero.slabs.header import lay_out_slab
from rayzero.slabs.slab import Slab
from rayzero.store.shm.shared_plan import RANK, SharedPlan, of_lineage
from rayzero.store.shm.signals import Cell
from rayzero.store.shm.words import cells_in

_HEAD = struct.Struct("<qI")  # step, part
_LEAST = 32 << 10  # bytes of a state that the first slab has room for


class LoopSlab:
    """One slab: a cell for each part of each of ``LOOP_STEPS`` steps."""

    def __init__(self, slab: Slab) -> None:
        self.slab, self._cells = slab, cells_in(slab, "states")

    @classmethod
    def create(cls, plan: SharedPlan, rank: int, incarnation: int, room: int, directory: Path) -> LoopSlab:
        """Make a slab for states of at most ``room`` bytes. ``incarnation``: of the rank's slabs.

        Raises MemoryPlanError if there is no room."""
        capacity = _HEAD.size + max(_LEAST, 1 << (room - 1).bit_length())
        stride = Cell.bytes_for(capacity)
        facts = plan.facts("loop", rank, RANK, incarnation)
        return cls(Slab.create(lay_out_slab(facts, [("states", stride * LOOP_STEPS * LOOP_PARTS, stride)]), directory))

    def takes(self, state: LoopState) -> bool:
        """Whether the state fits."""
        return _HEAD.size + len(state.content) <= self._cells[0].capacity

    def write(self, state: LoopState) -> None:
        """Keep a state over the one of ``LOOP_STEPS`` steps before."""
        cell = self._cells[state.step % LOOP_STEPS * LOOP_PARTS + state.part]
        cell.write(_HEAD.pack(state.step, state.part) + state.content)

    def states(self) -> Iterator[LoopState]:
        """The states that are whole."""
        for cell in self._cells:
            if (found := cell.read()) is not None:
                step, part = _HEAD.unpack_from(found[1])
                yield LoopState(step=step, part=part, content=found[1][_HEAD.size :])

    def close(self) -> None:
        """Unmap the slab; its maker removes it."""
        self.slab.close()


def loop_slabs(plan: SharedPlan, who: str, directory: Path, of: Callable[[int], bool]) -> dict[int, list[LoopSlab]]:
    """The loop slabs on this host of the ranks that ``of`` chooses, by rank, those of earlier lives first. ``who``: the
    process that maps them, for messages. The caller closes them. Raises HandshakeError if one cannot be read."""
    found = defaultdict[int, list[LoopSlab]](list)
    with ExitStack() as mapped:
        for slab, facts in of_lineage(plan.spec, directory):
            if facts.role == "loop" and of(facts.index):
                there = _attached(plan, who, slab.path)
                if there is not None:
                    mapped.callback(there.close)
                    found[facts.index].append(LoopSlab(there))
        mapped.pop_all()
    return {rank: sorted(slabs, key=lambda each: each.slab.header.facts.incarnation) for rank, slabs in found.items()}


def _attached(plan: SharedPlan, who: str, path: Path) -> Slab | None:
    """None: its rank's present life has removed it meanwhile, because its own states are newer."""
    try:
        return plan.attach(str(path), who, writable=False)
    except HandshakeError:
        if path.exists():
            raise
        return None
