"""Reads what runs left in shared memory, from the files alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from rayzero.errors import HandshakeError
from rayzero.protocol.messages import Decision
from rayzero.slabs.slab import FoundSlab, Slab
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.shm.recovery import RunRemains
from rayzero.store.shm.shard_lines import read_lines
from rayzero.store.shm.signals import Cell
from rayzero.store.shm.words import region
from rayzero.store.wire import translate


def dead_runs(slabs: Sequence[FoundSlab]) -> list[RunRemains]:
    """Every run that has lost an owner, by name. What its other processes write meanwhile may or may not be seen."""
    by_run: dict[str, list[FoundSlab]] = defaultdict(list)
    for slab in slabs:
        if slab.header is not None and slab.header.facts.role == "control":
            by_run[slab.header.facts.run].append(slab)
    lost = {run for run, found in by_run.items() if any(not s.alive and _is_owner(s) for s in found)}
    return [read for run in sorted(lost) if (read := read_run(run, by_run[run])) is not None]


def _is_owner(slab: FoundSlab) -> bool:
    return slab.header is not None and bool(slab.header.regions_of("versions"))


def read_run(run: str, found: Sequence[FoundSlab]) -> RunRemains | None:
    """What the control slabs of one run say; None where no owner's is there."""
    with ExitStack() as stack:
        slabs = [slab for entry in found if (slab := _opened(stack, entry)) is not None]
        owners = [slab for slab in slabs if slab.header.regions_of("versions")]
        if not owners:
            return None
        orders = region(owners[0], "orders")
        return RunRemains(
            run=run,
            num_owners=orders.bytes // orders.stride,
            shards=tuple(sorted((s for slab in owners for s in read_lines(slab)), key=lambda s: s.shard)),
            records=tuple(record for slab in owners for record in read_records(slab)),
            ranks=frozenset(slab.header.facts.index for slab in slabs if slab.header.regions_of("stamps")),
            lives=tuple(slab.header.facts.index for slab in owners),
        )


def _opened(stack: ExitStack, found: FoundSlab) -> Slab | None:
    assert found.header is not None
    facts = found.header.facts
    try:
        slab = Slab.attach(found.path, writable=False, run=facts.run, layout_digest=facts.layout_digest)
    except HandshakeError:  # gone since it was listed
        return None
    stack.callback(slab.close)
    return slab


def record_cells(slab: Slab) -> list[Cell]:
    """The two slots of the decision record, in the lead's control slab; none in another's."""
    return [
        Cell(slab.address(r.offset + at), slab.keeper, Cell.capacity_in(r.stride))
        for r in slab.header.regions_of("record")
        for at in range(0, r.bytes, r.stride)
    ]


def write_record(slab: Slab, decision: Decision) -> None:
    """Record a decision in the slot that holds the one before the last: a write that is cut off loses no other."""
    cells = record_cells(slab)
    cells[decision.step % len(cells)].write(translate.decision_to_pb(decision).SerializeToString())


def read_records(slab: Slab) -> Iterator[Decision]:
    """The decisions that are recorded whole."""
    for cell in record_cells(slab):
        if (read := cell.read()) is not None:
            yield translate.decision_from_pb(pb.Decision.FromString(read[1]))
