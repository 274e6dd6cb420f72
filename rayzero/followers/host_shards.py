"""A run's published shards on this host, read in the memory of its owners.

[Note: a reader that nobody waits for] An owner overwrites a shard in place, and knows no follower. So a follower copies
a shard and looks at what its line says before and after: the published version, the decision that is about to change
it, users' writes. All of them only grow; if they are the same both times, and nothing was about to change, the copy is
whole. A version is whole in memory from its last shard's publication to the next decision, which is at least as long
as the ranks' forward and backward; a copy reads a fraction of what the owners' update reads and writes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rayzero.codecs.record import kept_bytes, read_record
from rayzero.errors import HandshakeError, RayZeroError, UnsupportedError
from rayzero.followers.held_version import Content, FollowerStats, Shards, Tally
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.quantities import count
from rayzero.slabs.arena import SlabPlace
from rayzero.slabs.header import SlabFacts
from rayzero.slabs.slab import Slab
from rayzero.slabs.sweep import FoundSlab, list_slabs
from rayzero.store.shm.recovery import opened, standing
from rayzero.store.shm.shard_lines import CONTENT, DECIDED, INDEX, PUBLISHED, START, STOP, TILES, WRITES
from rayzero.store.shm.shared_plan import LINE_BYTES, ON_DEVICE, RANK
from rayzero.store.shm.signals import fence_acquire, load_acquire_64
from rayzero.store.shm.words import PARAMS, Places, SlabId, read_layout, region

_TICK_NS = 50_000_000  # more than a tick of the clock of files


class _State(NamedTuple):
    """What a shard's lines say at one moment."""

    writes: int  # odd during a write
    decided: int  # the version that the newest decision makes; -1: none, or the shard is frozen
    version: int  # that is published; -1: the shard has no values yet
    content: int


class _Followed(NamedTuple):
    """A shard in its owner's memory."""

    unit: UnitLayout
    shard: Shard
    line: int  # address
    total: int  # address
    memory: Tensor  # 1D, as the owner keeps it: the unit's dtype, or a record

    def state(self) -> _State:
        decided, published, content = (load_acquire_64(self.line + at) - 1 for at in (DECIDED, PUBLISHED, CONTENT))
        return _State(load_acquire_64(self.total + WRITES), decided, published, content)


class HostShards:
    """All shards of one epoch of a run's owners, mapped for reading.

    Knows lines and bytes; not what copies are for. What it maps stays readable when the owners go."""

    def __init__(self, controls: Sequence[Slab], params: Mapping[SlabId, Path]) -> None:
        """controls: of every owner. params: the files with published parameters. Raises HandshakeError if something is
        not there (yet, or any more), UnsupportedError for shards that followers cannot read."""
        facts = controls[0].header.facts
        self.layout, self.lineage = read_layout(controls[0]), facts.lineage
        self._keepers = [control.keeper for control in controls]  # of the lines' addresses
        with ExitStack() as opened:
            slabs: dict[SlabId, Slab] = {}

            def attached(slab: SlabId) -> Slab:
                if slab not in slabs:
                    if slab not in params:
                        raise HandshakeError(f"slab {slab} of run {facts.run!r} is not there")
                    slabs[slab] = Slab.attach(
                        params[slab], writable=False, run=facts.run, layout_digest=facts.layout_digest
                    )
                    opened.callback(slabs[slab].close)
                return slabs[slab]

            found = [each for control in controls for each in self._shards_of(control, attached)]
        self._followed = sorted(found, key=lambda each: each.shard.index)
        if [each.shard for each in self._followed] != list(self.layout.shards):
            raise HandshakeError(f"the optimizers of run {facts.run!r} on this host have not described all shards")

    def _shards_of(self, control: Slab, attached: Callable[[SlabId], Slab]) -> Iterator[_Followed]:
        lines, totals = region(control, "versions"), region(control, "totals")
        first, first_total = control.address(lines.offset), control.address(totals.offset)
        addresses = range(first, first + lines.bytes, LINE_BYTES)
        shards = [self._described(control, line) for line in addresses]
        places = Places(control, shards)
        for number, (line, shard) in enumerate(zip(addresses, shards, strict=True)):
            unit = self.layout.units[shard.unit]
            if load_acquire_64(line + TILES) - 1 == ON_DEVICE:
                raise UnsupportedError(
                    f"shard {shard.index} of {unit.name!r} is updated on a device (offload_fraction below 1), where "
                    "nobody notes when that begins: followers need offload_fraction=1"
                )
            dtype = torch.uint8 if unit.is_coded else unit.dtype
            numel = kept_bytes(unit, shard) if unit.is_coded else shard.numel
            slab, offset = places.read(shard.index, PARAMS, SlabPlace(slab=0, offset=0, numel=numel, dtype=dtype))
            memory = attached(slab).tensor(offset, numel, dtype)
            yield _Followed(unit, shard, line, first_total + number * LINE_BYTES, memory)

    def _described(self, control: Slab, line: int) -> Shard:
        index, start, stop = (load_acquire_64(line + at) for at in (INDEX, START, STOP))
        if index < len(self.layout.shards):
            shard = self.layout.shards[index]
            if (shard.start, shard.stop) == (start, stop):
                return shard
        raise HandshakeError(f"{control.path} has not described its shards")

    @property
    def version(self) -> int:
        """See ``Shards``."""
        return min((load_acquire_64(each.line + PUBLISHED) for each in self._followed), default=0) - 1

    def has(self, shard: int, version: int, content: Content | None) -> bool:
        """See ``Shards``. The version of a content is that at which an update last changed it."""
        now = self._followed[shard].state()
        return now.version == version and (self.lineage, now.content, now.writes) == content

    def fill(self, version: int, values: Sequence[Tensor], contents: list[Content | None], tally: Tally) -> bool:
        """See ``Shards``. The first shard of another version ends it."""
        for shard, out in enumerate(values):
            had, contents[shard] = contents[shard], None
            contents[shard] = found = self._copy(shard, version, out, had)
            if found is None:
                return False
            if found != had:
                tally.add(FollowerStats(whole_bytes=out.nbytes))
        return True

    def _copy(self, shard: int, version: int, out: Tensor, content: Content | None) -> Content | None:
        """Copy a shard of exactly ``version`` into ``out`` (1D, the shard's elements, the unit's dtype), unless that
        has ``content`` and this is the version's. Returns what ``out`` has; None: another version is there, or comes,
        and ``out`` has anything."""
        followed = self._followed[shard]
        before = followed.state()
        found = self.lineage, before.content, before.writes
        if before.version != version or before.writes % 2:
            return None
        if found == content:
            return found
        if before.decided > version:
            return None
        if not followed.unit.is_coded:
            out.copy_(followed.memory)
        else:
            try:
                read_record(followed.memory, followed.unit, followed.shard, out)
            except RayZeroError:  # perhaps only because it changes
                if followed.state() == before:
                    raise
                return None
        fence_acquire()
        return found if followed.state() == before else None


class HostRun:
    """A ``FollowedRun`` as this host's shared memory has it: its present owners.

    Knows files by what they are for. Used by one thread at a time."""

    def __init__(self, run: str, directory: Path) -> None:
        """run: as in the slabs' headers. directory: of the slabs."""
        self.run, self._directory = run, directory
        self._changed_ns, self._changes = -1, True  # of the directory, when it was last read; whether owners change
        self._shards: HostShards | None = None
        self._paths: tuple[Path, ...] = ()  # of the control slabs behind it
        self.missing = ""  # why there are no shards, in words
        self.gone = False  # whether no owner has left anything here, at the last look

    def shards(self) -> HostShards | None:
        """Those of the epoch that stands; None: the owners are not there (yet, or any more), or not all of them. Raises
        UnsupportedError for shards that followers cannot read."""
        now_ns = time.time_ns()
        try:
            changed_ns = self._directory.stat().st_mtime_ns  # read before the names
        except FileNotFoundError:
            changed_ns = 0  # list_slabs finds none in it
        if changed_ns != self._changed_ns or self._changes:
            self._look()
            # a file that comes within the same tick of the kernel's clock gives the directory no later time
            self._changed_ns = changed_ns if changed_ns < now_ns - _TICK_NS else -1
        return self._shards

    def has(self, shards: Shards) -> bool:
        """Whether nobody else publishes, by now, what ``shards`` reads: its owners are those of now, or the run has
        ended."""
        return self.shards() is shards or (self._shards is None and self.gone)

    def close(self) -> None:
        """Nothing is held that others miss."""

    def _look(self) -> None:
        there = [slab for slab in list_slabs(self._directory) if slab.header and slab.header.facts.run == self.run]
        found = [slab for slab in there if slab.user == os.geteuid()]  # root sees what anybody has put there
        controls = [slab for slab in found if _of(slab).role == "control" and _of(slab).kernel != RANK]
        newest = max(controls, key=lambda slab: (slab.alive, slab.changed_ns), default=None)
        lineage = "" if newest is None else _of(newest).lineage  # a run may start again from a checkpoint
        with ExitStack() as stack:  # what is mapped stays mapped
            mapped = [opened(stack, slab) for slab in controls if _of(slab).lineage == lineage]
            made = [slab for slab in mapped if slab is not None]
            now = standing(made)
            self._changes, self.gone = len(now) < len(made), not controls
            paths = tuple(sorted(path for slab in now if (path := slab.path) is not None))
            if paths == self._paths and self._shards is not None:
                return
            self._paths, self._shards = paths, None
            self.missing = self._lacking(made, now)
            if self.missing:
                return
            params = {SlabId.of(_of(s)): s.path for s in found if (_of(s).role, _of(s).lineage) == ("params", lineage)}
            try:
                self._shards = HostShards(now, params)
            except HandshakeError as error:  # they are being made, or removed
                self.missing, self._changes = str(error), True

    def _lacking(self, made: Sequence[Slab], now: Sequence[Slab]) -> str:
        """What keeps a follower from reading the control slabs ``now`` of those that are there; "": nothing."""
        if not made:
            return (
                f"run {self.run!r} has no optimizers in {self._directory}: if it has ended, or is on another host, "
                "follow it by its folder, which says so"
            )
        if not now:
            return f"the first optimizer of run {self.run!r} is on another host, or has not started"
        orders = region(now[0], "orders")
        there, wanted = len(now), orders.bytes // orders.stride
        some = f"only {there} of {count(wanted, 'optimizer')} of run {self.run!r} can be read on this host"
        return "" if there == wanted else some


def _of(slab: FoundSlab) -> SlabFacts:
    assert slab.header is not None
    return slab.header.facts
