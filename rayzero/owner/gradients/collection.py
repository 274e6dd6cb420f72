"""One collect of the lead at an owner: the pushes that ranks counted, and which of them are still missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from rayzero.errors import StepMismatchError, StoreError
from rayzero.owner.gradients.landing import RankGradients
from rayzero.owner.shard import OwnedShard
from rayzero.protocol.messages import Clamp, FinishReport, ModelSpec, NormParts
from rayzero.quantities import count


@dataclass(eq=False)
class Collection:
    """A collect that waits for counted pushes, then for norm parts.

    Knows the counts; not where gradients lie, nor who sums them."""

    step: int
    reports: Mapping[int, FinishReport]  # by rank
    future: Future[NormParts] = field(default_factory=Future)
    shards: set[int] = field(default_factory=set)  # those whose pushes it waits for
    missing: dict[int, set[int]] = field(default_factory=dict)  # shard -> ranks whose counted pushes have not landed
    unsummed: set[int] = field(default_factory=set)  # shards without a valid norm part

    @property
    def attempts(self) -> tuple[int, ...]:
        """Per rank, the attempt that counts."""
        return tuple(self.reports[rank].attempt for rank in sorted(self.reports))

    @property
    def clamp(self) -> Clamp | None:
        """The clamp on the sums before they are squared; None if there is none."""
        return next(iter(self.reports.values())).clamp

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks with counted pushes that have not landed."""
        return sorted({rank for ranks in self.missing.values() for rank in ranks})

    def ranks_of(self, owned: OwnedShard) -> list[int]:
        """The ranks whose pushes of this shard count, ascending."""
        unit = owned.unit.index
        return [rank for rank in sorted(self.reports) if self.reports[rank].counts[unit]]

    def begin(
        self,
        shards: Mapping[int, OwnedShard],
        ranks: Mapping[int, RankGradients],
        is_made: Callable[[OwnedShard, Collection], bool],
    ) -> None:
        """Note what is still missing. ``shards``: all trained ones; those of which a former life of the owner has made
        the step's version need nothing, and ranks may have dropped what they pushed for them. ``ranks``: the attached
        ranks' gradients. ``is_made``: whether a shard's total has exactly what is counted here. Raises
        StepMismatchError if more pushes arrived than were counted."""
        for index, owned in shards.items():
            if max(owned.published, owned.newest) > self.step:
                continue
            self.shards.add(index)
            if is_made(owned, self):
                continue
            missing = {rank for rank in self.reports if not self._is_there(owned, rank, ranks)}
            if missing:
                self.missing[index] = missing
        self.unsummed = set(self.shards)

    def arrived(self, owned: OwnedShard, came: Sequence[int], ranks: Mapping[int, RankGradients]) -> bool:
        """A push of the ranks ``came`` landed; returns whether it was the last one missing for ``owned``. Raises
        StepMismatchError if more pushes arrived than were counted."""
        missing = self.missing.get(owned.shard.index, set())
        here = {rank for rank in missing.intersection(came) if self._is_there(owned, rank, ranks)}
        missing -= here
        if missing or not here:
            return False
        del self.missing[owned.shard.index]
        return True

    def _is_there(self, owned: OwnedShard, rank: int, ranks: Mapping[int, RankGradients]) -> bool:
        gradients = ranks.get(rank)
        if gradients is None:  # its finish came before its attach reached this owner
            return not self.reports[rank].counts[owned.unit.index]
        return gradients.landings[owned.shard.index].is_there(rank, self.reports)


def check_reports(step: int, reports: Sequence[FinishReport], spec: ModelSpec) -> None:
    """Raise StepMismatchError unless there is one report of each rank, for this step, with a count for every unit."""
    ranks = sorted(report.rank for report in reports)
    alike = all(report.step == step and report.clamp == reports[0].clamp for report in reports)
    if ranks != list(range(spec.world_size)) or not alike:
        raise StepMismatchError(
            f"step {step} needs a report of each of {count(spec.world_size, 'rank')}, got "
            f"{[(report.rank, report.step) for report in reports]} as (rank, step)"
        )
    for report in reports:
        if len(report.counts) != len(spec.layout.units):
            raise StoreError(
                f"rank {report.rank} counted {count(len(report.counts), 'unit')}, but the layout has "
                f"{len(spec.layout.units)}"
            )


@dataclass(eq=False)
class OpenStep:
    """Which step is open, and what ranks have pushed for it. Only ``Contributions`` writes it; ``ShardSums`` reads."""

    number: int
    ranks: dict[int, RankGradients] = field(default_factory=dict)  # those that have attached
    collection: Collection | None = None  # once its reports are here
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while anything of the step is read or changed
