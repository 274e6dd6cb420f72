"""Frees what shards took on this host that have moved to another one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rayzero.errors import HandshakeError
from rayzero.protocol.messages import ModelSpec
from rayzero.slabs.arena import REGION
from rayzero.slabs.slab import Slab
from rayzero.store.owner.memory.slabs import TENSORS, is_control
from rayzero.store.shm.places import SlabId, all_places
from rayzero.store.shm.shared_plan import of_lineage


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
    for region in slab.header.regions_of(REGION):
        at = region.offset
        for start, stop in sorted(ranges):
            if at < start:
                yield at, start
            at = max(at, stop)
        if at < region.offset + region.bytes:
            yield at, region.offset + region.bytes
