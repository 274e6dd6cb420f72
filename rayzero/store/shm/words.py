"""Finds stamps, bells, mailboxes, places and the decision record in a control slab, by the kind of their region;
and decides from what they say when the gradients that a host's ranks have pushed of a unit are added.

Every rank announces what its memory holds (``Stamps``) and, with its finish, how often it has pushed each unit. Its
part of a unit's round (protocol/gradient_sum.py) is *settled* once it has made that push, or its finish says that it
makes none. Once all parts are, the host's door adds them up and sends the sum of the round.

[Note: sums replace sums] A part may change after it was sent: a rank discards what it has pushed, or dies and comes
back. Its attempt grows then, so the owner knows the newer sums, and a decision is made only from those whose attempts
and counts all ranks have reported.

[Note: bytes that change] Nobody keeps a rank from changing its gradients while they are added. It only does so for an
attempt or a push that it has not counted yet, and for a later step once every owner has published what the sum is for.
So a sum of bytes that have changed is one that no decision is made from.
"""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rayzero.errors import HandshakeError
from rayzero.layout.model_layout import ModelLayout, Shard, UnitLayout
from rayzero.protocol.messages import IN_TOTAL, FinishReport, Pushed, Record, Summand, canonical_json
from rayzero.protocol.ownership import Ownership
from rayzero.records import parse_record
from rayzero.slabs.arena import SlabPlace
from rayzero.slabs.header import Region, SlabFacts
from rayzero.slabs.slab import Slab
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.shm.mailbox import Cells
from rayzero.store.shm.shared_plan import PLACE_BYTES, PLACES, SharedPlan, Wanted
from rayzero.store.shm.signals import Bell, Cell, changed, load_acquire_64, store_release_64
from rayzero.store.wire import translate

_STAMP = struct.Struct("<qQII")  # step, attempt, pushes that follow, bytes of the presence bits of each
_PUSH = struct.Struct("<qII")  # place, count, nothing; the presence bits follow
FP32 = 4  # bytes of an element
_MOST_THREADS = 4  # for each rank; one reads about 10 GB/s, so 8 ranks' take half of a host's memory bandwidth


def region(slab: Slab, kind: str) -> Region:
    """A control slab's region of one kind. Raises HandshakeError if it has none."""
    found = slab.header.regions_of(kind)
    if not found:
        raise HandshakeError(f"{slab.path} has no region {kind!r}: install the same rayzero in every process")
    return found[0]


def check_regions(slab: Slab, wanted: Sequence[Wanted], *, but: str) -> None:
    """Raise HandshakeError unless a slab's regions are those of this process's plan, ``but`` apart."""
    there = {region.kind: (region.bytes, region.stride) for region in slab.header.regions}
    here = {kind: (size, stride) for kind, size, stride in wanted}
    differing = sorted(kind for kind in there.keys() | here.keys() if there.get(kind) != here.get(kind) and kind != but)
    if differing:
        raise HandshakeError(
            f"{slab.path} cannot be taken over: {', '.join(differing)} has another size; continue with the same model, "
            "number of ranks and number of optimizers"
        )


def write_terms(slab: Slab, plan: SharedPlan) -> None:
    """Record in an owner's control slab who owns what in its epoch, and what the model's parameters are."""
    for kind, value in (("ownership", plan.ownership.to_json()), ("layout", plan.spec.layout.to_json())):
        found, text = region(slab, kind), canonical_json(value).encode()
        slab.tensor(found.offset, len(text), torch.uint8).copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))


def read_ownership(slab: Slab) -> Ownership:
    """Who owns what, as ``write_terms`` recorded it. Raises HandshakeError if that cannot be read."""
    text = _text(slab, "ownership")
    try:
        return Ownership.from_json(json.loads(text))
    except (ValueError, TypeError) as error:
        raise HandshakeError(f"{slab.path} does not say who owns what: {text[:80]!r}") from error


def read_layout(slab: Slab) -> ModelLayout:
    """What the parameters are, as ``write_terms`` recorded it. Raises HandshakeError if that cannot be read."""
    try:
        return parse_record(_text(slab, "layout"), ModelLayout)
    except ValueError as error:
        raise HandshakeError(f"{slab.path} does not say what parameters there are: {error}") from error


def _text(slab: Slab, kind: str) -> bytes:
    found = region(slab, kind)
    return slab.tensor(found.offset, found.bytes, torch.uint8).numpy().tobytes()


def leads(slab: Slab) -> bool:
    """Whether the owner of a control slab leads."""
    return bool(slab.header.regions_of("record"))


def let_stand(slab: Slab) -> None:
    """Let the epoch of a control slab stand: in that of the lead, this is the moment from which it does."""
    store_release_64(slab.address(region(slab, "stands").offset), 1)


def stands(slab: Slab) -> bool:
    """Whether the epoch of a lead's control slab stands; else the one before does."""
    return load_acquire_64(slab.address(region(slab, "stands").offset)) == 1


def bell_of(slab: Slab) -> Bell:
    """The bell of the process that made the slab."""
    return Bell(slab.address(region(slab, "bell").offset), slab.keeper)


def cell_of(slab: Slab, kind: str) -> Cell:
    """The cell that is a whole region."""
    found = region(slab, kind)
    return Cell(slab.address(found.offset), slab.keeper, Cell.capacity_in(found.bytes))


def cells_in(slab: Slab, kind: str) -> list[Cell]:
    """The cells of a region, one after the other; none of a region that the slab does not have."""
    return [
        Cell(slab.address(found.offset + at), slab.keeper, Cell.capacity_in(found.stride))
        for found in slab.header.regions_of(kind)
        for at in range(0, found.bytes, found.stride)
    ]


class Finishes:
    """How often a rank has pushed each unit, as it says with its last finishes. The rank writes; the door of its host
    reads."""

    def __init__(self, slab: Slab) -> None:
        self._cells = cells_in(slab, "finished")
        self._read: dict[int, tuple[int, FinishReport]] = {}  # by cell, the number of its message, and that

    def write(self, report: FinishReport) -> None:
        """Announce a finish over the one of ``FINISHES`` steps before. The caller rings bells afterwards."""
        self._cells[report.step % len(self._cells)].write(translate.report_to_pb(report).SerializeToString())

    def read(self) -> dict[int, FinishReport]:
        """The last finishes, by step. An unchanged one is the same object as before."""
        for index, cell in enumerate(self._cells):
            read = cell.read()
            if read is not None and (index not in self._read or self._read[index][0] != read[0]):
                self._read[index] = read[0], translate.report_from_pb(pb.FinishReport.FromString(read[1]))
        return {report.step: report for _, report in self._read.values()}


def key_digest(key: str) -> bytes:
    """What shows that a process knows a key of the run: ``KEY_BYTES``."""
    return hashlib.sha256(key.encode()).digest()


def key_name(key: str) -> str:
    """The same in the facts of a slab, by which ranks find those of their own start of the run."""
    return f"key {key_digest(key).hex()[:32]}"


def cells_of(slab: Slab, kind: str, side: int, capacity: int) -> Cells:
    """A mailbox's cells for ``side``. They get their pages now if they have none (``plan.LATER``), from whichever of
    the two processes opens the mailbox first. Raises MemoryPlanError if there is no room."""
    found = region(slab, kind)
    slab.allocate(found.offset + side * found.stride, Cells.bytes_for(capacity))
    return Cells(slab.address(found.offset + side * found.stride), slab.keeper, capacity)


class Stamps:
    """One stamp per unit of a rank: what it has pushed, in the order of the pushes. The rank writes; owners read."""

    def __init__(self, slab: Slab, plan: SharedPlan) -> None:
        found = region(slab, "stamps")
        self._address, self._stride, self._keeper = slab.address(found.offset), found.stride, slab.keeper
        count = len(plan.spec.layout.units)
        self._cells = [Cell(self._address + i * self._stride, self._keeper, plan.stamp_bytes) for i in range(count)]
        self._seen = array("Q", [0] * count)

    def write(self, unit: int, pushed: Sequence[Pushed]) -> None:
        """Announce what the rank has of a unit, of one attempt, after the bytes are all there. Of the first pushes that
        are in totals alone, only the last one's count is told. The caller rings bells afterwards."""
        begin = next((number for number, each in enumerate(pushed) if each.place != IN_TOTAL), len(pushed) - 1)
        first = pushed[begin]
        parts = [_STAMP.pack(first.step, first.attempt, len(pushed) - begin, len(first.presence))]
        for each in pushed[begin:]:
            parts += [_PUSH.pack(each.place, each.count, 0), each.presence]
        self._cells[unit].write(b"".join(parts))

    def read(self, unit: int) -> Sequence[Pushed]:
        """What is announced of a unit; empty: nothing, or it is being written."""
        read = self._cells[unit].read()
        return () if read is None else _decode(read[1])

    def news(self) -> list[tuple[int, Sequence[Pushed]]]:
        """(unit, its pushes) of every unit that changed since the last look. A stamp being written rings when it is
        done."""
        found = []
        for unit in changed(self._address, self._stride, self._seen, len(self._cells)):
            read = self._cells[unit].read()
            if read is not None:
                found.append((unit, _decode(read[1])))
        return found


def _decode(stamp: bytes) -> Sequence[Pushed]:
    step, attempt, pushes, size = _STAMP.unpack_from(stamp)
    found, at = [], _STAMP.size
    for _ in range(pushes):
        place, count, _ = _PUSH.unpack_from(stamp, at)
        presence = stamp[at + _PUSH.size : at + _PUSH.size + size]
        found.append(Pushed(step=step, attempt=attempt, count=count, presence=presence, place=place))
        at += _PUSH.size + size
    return found


def write_record(slab: Slab, record: Record) -> None:
    """Record a decision over the oldest, so that an interrupted write loses no other decision."""
    cells = cells_in(slab, "record")
    cells[record.decision.step % len(cells)].write(translate.record_to_pb(record).SerializeToString())


def read_records(slab: Slab) -> list[Record]:
    """The records that are whole, by step; none outside the lead's control slab."""
    read = [cell.read() for cell in cells_in(slab, "record")]
    records = [translate.record_from_pb(pb.Record.FromString(each[1])) for each in read if each is not None]
    return sorted(records, key=lambda record: record.decision.step)


PARAMS = 0  # the number of the published parameters; states follow, in the order in which they are allocated
_WORDS = PLACE_BYTES // 8  # index and number of the slab, its incarnation, the tensor's offset, its bytes + 1


@dataclass(frozen=True, slots=True, order=True)
class SlabId:
    """Which slab of a run and role: whose, of which life, and which of them."""

    index: int
    incarnation: int
    number: int

    @classmethod
    def of(cls, facts: SlabFacts) -> SlabId:
        """That of a slab with these facts."""
        return cls(facts.index, facts.incarnation, facts.number)


class Places:
    """Where each tensor of one owner's shards lies. The owner writes it before a shard has values; its successor reads
    it, because tensors stay where they are when shards get another owner. Ranks are told where the parameters lie when
    they shake hands (``SharedPaths``)."""

    def __init__(self, control: Slab, shards: Sequence[Shard]) -> None:
        """``shards``: the owner's, in the order of its version lines."""
        found = region(control, "places")
        words = control.tensor(found.offset, len(shards) * PLACES * _WORDS, torch.int64)
        self._words = words.view(len(shards), PLACES, _WORDS)
        self._line = {shard.index: i for i, shard in enumerate(shards)}
        self._who = str(control.path)

    def write(self, shard: int, tensor: int, slab: SlabId, place: SlabPlace) -> None:
        """Record where a shard's tensor lies in a slab."""
        words = slab.index << 32 | slab.number, slab.incarnation, place.offset, place.bytes + 1
        self._words[self._line[shard], tensor] = torch.tensor(words, dtype=torch.int64, device="cpu")

    def read(self, shard: int, tensor: int, shape: SlabPlace) -> tuple[SlabId, int]:
        """The slab of a shard's tensor, and the offset there. Raises HandshakeError if a tensor of this ``shape`` was
        not recorded."""
        owner, incarnation, offset, end = self._words[self._line[shard], tensor].tolist()
        if end != shape.bytes + 1:
            raise HandshakeError(
                f"{self._who} has {f'{end - 1} bytes' if end else 'nothing'} as tensor {tensor} of shard {shard}, "
                f"expected {shape.bytes} bytes of {shape.dtype}: continue with the same model and config"
            )
        return SlabId(owner >> 32, incarnation, owner & 0xFFFFFFFF), offset


def all_places(control: Slab) -> Iterator[tuple[str, SlabId, int, int]]:
    """Every tensor whose place is recorded in an owner's control slab: its slab's role and id, its offset there and its
    bytes."""
    found = region(control, "places")
    words = control.tensor(found.offset, found.bytes // 8, torch.int64).view(-1, PLACES, _WORDS)
    for places in words.tolist():
        for tensor, (owner, incarnation, offset, end) in enumerate(places):
            if end:
                role = "params" if tensor == PARAMS else "state"
                yield role, SlabId(owner >> 32, incarnation, owner & 0xFFFFFFFF), offset, end - 1


class Part(NamedTuple):
    """What one rank adds to the sum of a unit's round."""

    summand: Summand
    pushed: Pushed | None  # None: nothing


def settled(
    rank: int, unit: int, step: int, number: int, pushed: Sequence[Pushed], report: FinishReport | None
) -> Part | None:
    """The part of a rank in a round of ``step``; None: it may still come, or change.

    number: of the round. pushed: what it has announced of the unit, of whatever step. report: its last finish of
    ``step``, if it has announced one."""
    here = pushed if pushed and pushed[0].step == step else ()
    attempt = here[0].attempt if here else -1
    if report is not None and report.attempt >= attempt:
        counted = report.counts[unit]
        if counted <= number:
            return Part(Summand(rank, report.attempt, counted), None)
        if report.attempt != attempt:
            return None
    if not here or here[-1].count <= number:
        return None
    before = Pushed(step=step, attempt=attempt, count=number + 1, presence=b"", place=IN_TOTAL)
    found = next((each for each in here if each.count == number + 1), before)
    return Part(Summand(rank, attempt, number + 1), found)


class GradientBytes(NamedTuple):
    """What the gradients of a step take on their way to other hosts."""

    pushed: int  # all pushes of one rank
    summed: int  # the fp32 sums of any number of ranks, one for each round

    @classmethod
    def of(cls, units: Sequence[UnitLayout], pushes: int) -> GradientBytes:
        """``pushes``: of each trained unit by each rank, a step."""
        trained = [unit for unit in units if unit.trainable]
        one = sum(unit.size_bytes for unit in trained), FP32 * sum(unit.numel for unit in trained)
        return cls(pushes * one[0], pushes * one[1])

    def sums_gain(self, ranks: int) -> bool:
        """Whether sums of that many ranks take fewer bytes than their pushes."""
        return ranks * self.pushed > self.summed


def adding_threads(cores: int, ranks: int, *, on_gpu: bool) -> int:
    """Threads of a host's door that add, for each of its ``ranks``. Ranks on CPUs compute with their cores meanwhile;
    those on GPUs leave half of the host's to loaders and to all else."""
    return max(1, min(_MOST_THREADS, cores // (2 * ranks))) if on_gpu else 1
