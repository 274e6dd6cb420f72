"""What the ranks have contributed to the open step, and when that is everything they counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor

from rayzero.errors import StepMismatchError, StoreError
from rayzero.owner.gradients.landing import Admission, Landing, RankGradients, check_push
from rayzero.owner.shard import OwnedShard
from rayzero.protocol.messages import Clamp, Contribution, FinishReport, NormParts, Pushed
from rayzero.quantities import count

Contributors = tuple[tuple[int, ...], ...]  # per slice: ranks with a gradient for it, ascending
_NOTHING = torch.empty(0)
# What a norm part was computed from: how the sum was clamped, and (rank, generation of its landing) of each summed.
PartKey = tuple[Clamp | None, tuple[tuple[int, int], ...]]
Reservation = tuple[Contribution, OwnedShard, "Future[Tensor | None]"]


@dataclass(eq=False)
class Collection:
    """A collect that waits: for counted pushes, then for norm parts."""

    step: int
    reports: Mapping[int, FinishReport]
    future: Future[NormParts] = field(default_factory=Future)
    missing: dict[int, set[int]] = field(default_factory=dict)  # shard -> ranks with a counted push not there yet
    unsummed: set[int] = field(default_factory=set)  # shards without a valid norm part

    @property
    def attempts(self) -> tuple[int, ...]:
        """Per rank, the attempt that counts."""
        return tuple(self.reports[rank].attempt for rank in sorted(self.reports))

    @property
    def clamp(self) -> Clamp | None:
        """What is done to the sums before they are squared."""
        return next(iter(self.reports.values())).clamp


class Contributions:
    """All ranks' gradient memory and what is in it.

    Knows ranks, shards and counts; not who adds them up, or decisions. Called under the service's lock."""

    def __init__(self, shards: Mapping[int, OwnedShard], world_size: int, accumulation_steps: int) -> None:
        self.ranks: dict[int, RankGradients] = {}  # those that have attached
        self._world_size, self._accumulate = world_size, accumulation_steps > 1
        self._shards = {index: shard for index, shard in shards.items() if shard.trainable}
        self._by_unit: dict[int, list[OwnedShard]] = {}
        for shard in self._shards.values():
            self._by_unit.setdefault(shard.unit.index, []).append(shard)
        self._waiting: list[Reservation] = []
        self._parts: dict[int, tuple[PartKey, tuple[float, ...]]] = {}
        units = max((shard.unit.index for shard in shards.values()), default=-1) + 1
        self._expected = {rank: (accumulation_steps,) * units for rank in range(world_size)}  # a hint, never a rule

    # ---- memory for pushes

    def add_rank(self, rank: int, own_memory: Mapping[int, Tensor] | None) -> None:
        """A rank attached; ``own_memory``: see ``RankGradients``."""
        self.ranks[rank] = RankGradients(
            rank, list(self._shards.values()), accumulate=self._accumulate, own_memory=own_memory
        )

    def shards_of(self, unit: int) -> Sequence[OwnedShard]:
        """The trained shards here of one unit."""
        return self._by_unit.get(unit, ())

    def observe(self, rank: int, owned: OwnedShard, pushed: Pushed) -> bool:
        """Take note of what a rank has in its own memory; False where that is no news."""
        return self.ranks[rank].landings[owned.shard.index].observe(pushed)

    def reserve(self, push: Contribution, owned: OwnedShard, open_step: int) -> tuple[bool, Tensor | None]:
        """(answered, memory): not answered means that the push has to wait for its own rank's memory."""
        check_push(push, owned)
        if push.step < open_step:
            return True, None
        if push.step > open_step or owned.pending_reads:
            return False, None
        rank = self.ranks[push.rank]
        landing = rank.landings[owned.shard.index]
        admission = landing.admit(push)
        if admission in (Admission.DROP, Admission.WAIT):
            return admission is Admission.DROP, None
        return self._open(push, owned, rank, landing, admission)

    def _open(
        self, push: Contribution, owned: OwnedShard, rank: RankGradients, landing: Landing, admission: Admission
    ) -> tuple[bool, Tensor | None]:
        if admission is Admission.LAND:
            rank.release(landing.staged)
            landing.staged, memory = None, landing.sum.memory
        else:
            landing.staged = landing.staged if landing.staged is not None else rank.lease(owned)
            if landing.staged is None:
                return False, None
            memory = landing.staged
        landing.open(push)
        return True, memory

    def wait(self, reservation: Reservation) -> None:
        """Keep a reservation that could not be answered."""
        self._waiting.append(reservation)

    def take_waiting(self) -> list[Reservation]:
        """Take out all reservations that wait, to try them again."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def landing(self, push: Contribution) -> dict[int, Landing]:
        """The landings of the pushing rank, by shard."""
        return self.ranks[push.rank].landings

    # ---- counts

    def collect(self, collection: Collection) -> None:
        """Note what is still missing. Raises StepMismatchError where more arrived than was counted."""
        for index, owned in self._shards.items():
            missing = {rank for rank in collection.reports if not self._is_there(collection, owned, rank)}
            if missing:
                collection.missing[index] = missing
        collection.unsummed = set(self._shards)

    def arrived(self, collection: Collection, owned: OwnedShard, rank: int) -> bool:
        """A push landed: True when it was the last that ``owned`` missed."""
        missing = collection.missing.get(owned.shard.index)
        if missing is None or rank not in missing or not self._is_there(collection, owned, rank):
            return False
        missing.discard(rank)
        if missing:
            return False
        del collection.missing[owned.shard.index]
        return True

    def _is_there(self, collection: Collection, owned: OwnedShard, rank: int) -> bool:
        report = collection.reports[rank]
        counted = report.counts[owned.unit.index]
        gradients = self.ranks.get(rank)  # None: its finish came before its attach reached this owner
        landing = gradients.landings[owned.shard.index] if gradients is not None else None
        landed = landing.sum.count_of(report.step, report.attempt) if landing is not None else 0
        if landed > counted:
            raise StepMismatchError(
                f"rank {rank} finished step {report.step} with {counted} pushes of {owned.unit.name!r}, "
                f"but {landed} arrived; every push must be issued before finish"
            )
        return landed == counted

    def looks_complete(self, owned: OwnedShard, step: int) -> bool:
        """True when every rank has pushed as often as in the last step: its norm part may be computed early."""
        if len(self.ranks) < self._world_size:
            return False
        for rank, gradients in self.ranks.items():
            landing = gradients.landings[owned.shard.index]
            if landing.sum.count_of(step, landing.sum.attempt) != self._expected[rank][owned.unit.index]:
                return False
        return True

    def remember(self, reports: Mapping[int, FinishReport]) -> None:
        """Expect the next step's counts to be like these."""
        self._expected = {rank: report.counts for rank, report in reports.items()}

    # ---- norm parts

    def counted_ranks(self, owned: OwnedShard, collection: Collection) -> list[int]:
        """The ranks whose pushes of this shard count."""
        unit = owned.unit.index
        return [rank for rank in sorted(collection.reports) if collection.reports[rank].counts[unit]]

    def landed_ranks(self, owned: OwnedShard, step: int) -> list[int]:
        """The ranks that have something of this shard now, whatever will be counted."""
        landings = [(rank, self.ranks[rank].landings[owned.shard.index]) for rank in sorted(self.ranks)]
        return [rank for rank, landing in landings if landing.sum.count_of(step, landing.sum.attempt)]

    def key(self, owned: OwnedShard, ranks: Sequence[int], clamp: Clamp | None) -> PartKey:
        """What a norm part over ``ranks`` would be computed from now."""
        return clamp, tuple((rank, self.ranks[rank].landings[owned.shard.index].generation) for rank in ranks)

    def contributors(self, owned: OwnedShard, ranks: Sequence[int]) -> Contributors:
        """Per slice, those of ``ranks`` with a gradient for it."""
        present = [self.ranks[rank].landings[owned.shard.index].present for rank in ranks]
        if all(map(all, present)):
            return (tuple(ranks),) * len(owned.slices)
        return tuple(tuple(compress(ranks, slots)) for slots in zip(*present, strict=True))

    def gradients(self, owned: OwnedShard) -> list[Tensor]:
        """Per rank, its memory for this shard; empty for one that has not attached and so has no gradient."""
        landings = [
            r.landings[owned.shard.index] if (r := self.ranks.get(i)) else None for i in range(self._world_size)
        ]
        return [landing.sum.memory if landing is not None else _NOTHING for landing in landings]

    def keep_part(self, owned: OwnedShard, key: PartKey, squares: tuple[float, ...]) -> bool:
        """Keep a norm part unless what it was computed from has changed since."""
        clamp, landings = key
        if key != self.key(owned, [rank for rank, _ in landings], clamp):
            return False
        self._parts[owned.shard.index] = (key, squares)
        return True

    def has_part(self, owned: OwnedShard, collection: Collection) -> bool:
        """True when the kept part is the one the collection asks for."""
        kept = self._parts.get(owned.shard.index)
        wanted = self.key(owned, self.counted_ranks(owned, collection), collection.clamp)
        return kept is not None and kept[0] == wanted

    def check_off(self, owned: OwnedShard, collection: Collection) -> None:
        """Where all counted pushes of a shard are there and its part is valid, the collection waits for it no more."""
        if owned.shard.index not in collection.missing and self.has_part(owned, collection):
            collection.unsummed.discard(owned.shard.index)

    def unsummed(self, collection: Collection) -> list[OwnedShard]:
        """The shards whose counted pushes are all there, and whose parts nobody computed early."""
        for index in tuple(collection.unsummed):
            self.check_off(self._shards[index], collection)
        return [self._shards[index] for index in sorted(collection.unsummed - collection.missing.keys())]

    def norm_parts(self, collection: Collection) -> NormParts:
        """All parts of this owner, once ``collection.unsummed`` is empty."""
        found = []
        for index in sorted(self._shards):
            owned = self._shards[index]
            contributors = self.contributors(owned, self.counted_ranks(owned, collection))
            squares = self._parts[index][1]
            found += [(index, part.slot, squares[i]) for i, part in enumerate(owned.slices) if contributors[i]]
        return NormParts(step=collection.step, parts=tuple(found))


def check_reports(step: int, reports: Sequence[FinishReport], world_size: int, num_units: int) -> None:
    """Raise unless there is one report of each rank, of this step, with a count for every unit."""
    ranks = sorted(report.rank for report in reports)
    alike = all(report.step == step and report.clamp == reports[0].clamp for report in reports)
    if ranks != list(range(world_size)) or not alike:
        raise StepMismatchError(
            f"step {step} needs a report of each of {count(world_size, 'rank')}, got "
            f"{[(report.rank, report.step) for report in reports]} as (rank, step)"
        )
    for report in reports:
        if len(report.counts) != num_units:
            raise StoreError(
                f"rank {report.rank} counted {count(len(report.counts), 'unit')}, the layout has {num_units}"
            )
