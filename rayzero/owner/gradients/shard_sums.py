"""The norm parts of an owner's shards, and their totals: computed in the updater's thread.

A part is kept with what it was computed from, so that an outdated one is never used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from rayzero.concurrency.futures import fail, settle
from rayzero.errors import StepMismatchError
from rayzero.owner.gradients.collection import Collection
from rayzero.owner.gradients.landing import RankGradients, SpareMemory
from rayzero.owner.gradients.open_step import OpenStep
from rayzero.owner.gradients.squares import Squares
from rayzero.owner.shard import Contributors, OwnedShard
from rayzero.owner.updater import Updater
from rayzero.protocol.lives import ATTEMPTS
from rayzero.protocol.messages import Clamp, NormParts
from rayzero.protocol.scattered import Gradient
from rayzero.protocol.totals import Summands, Total
from rayzero.telemetry.recorder import Recorder

_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")
# What a norm part was computed from: the clamp of the sum, and (rank, generation of its landing) of each summand; where
# there are totals, the step, and (rank, attempt).
_PartKey = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass over a shard whose gradients have a total."""

    key: _PartKey  # of the norm parts that it computes
    gradients: Sequence[Gradient]
    contributors: Contributors
    ranks: Sequence[int]  # whose gradients they are
    seen: _PartKey  # what of them had landed as it began
    early: bool  # nobody waits for it, and the cores receive gradients, or compute them
    fills: bool  # the total


class ShardSums:
    """Adds up and squares the gradients of the open step, shard by shard.

    Knows what is in totals and parts; not when a step is collected or decided. Only the updater's thread sums."""

    def __init__(
        self,
        owner: int,
        world_size: int,
        shards: Mapping[int, OwnedShard],
        squares: Squares,
        updater: Updater,
        recorder: Recorder,
        step: OpenStep,
    ) -> None:
        """``shards``: the trained ones. ``squares``: used only in the thread of ``updater``."""
        self._owner, self._world_size, self._shards, self._step = owner, world_size, shards, step
        self._squares, self._updater, self._recorder = squares, updater, recorder
        self._totals: dict[int, Total] = {}  # by shard, what is in its total; empty: there are none
        for index, shard in shards.items():
            if (left := shard.left_total()) is not None:
                self._totals[index] = left
        self._parts: dict[int, tuple[_PartKey, tuple[float, ...]]] = {}  # by shard
        self._stands = False  # no total is filled
        self.spare = SpareMemory()  # for what is pushed until it is in a total

    # ---- totals

    def hold_totals(self) -> None:
        """A rank comes back: ranks give back nothing more of what is in totals. Call it under the step's lock."""
        for index in self._totals:
            self._shards[index].hold_total()

    def stand_still(self) -> None:
        """Fill no total from now on. Call it in the updater's thread."""
        with self._step.lock:
            self._stands = True

    def go_on(self) -> None:
        """Fill totals again."""
        with self._step.lock:
            stood, self._stands, collection = self._stands, False, self._step.collection
        if stood and collection is not None:
            self.sum_missing_later(collection)

    # ---- norm parts: computed in the updater's thread

    def sum_later(self, shards: Sequence[OwnedShard], step: int) -> None:
        """Sum shards of which all pushes are there, as far as is known."""

        def sum_all() -> None:
            over = self._recorder.spans.begin("norm", "sums of squares", step)
            for owned in shards:
                self._sum(owned, step)
            over()

        self._updater.submit(sum_all)

    def sum_missing_later(self, collection: Collection) -> None:
        """Compute the parts that were not computed early. Completes a collection that has no shards."""
        self._updater.submit(lambda: self._sum_missing(collection))

    def _sum_missing(self, collection: Collection) -> None:
        over = self._recorder.spans.begin("norm", "sums of squares", collection.step)
        with self._step.lock:
            for index in tuple(collection.unsummed):
                self._check_off(self._shards[index], collection)
            missing = [self._shards[index] for index in sorted(collection.unsummed - collection.missing.keys())]
        for owned in missing:
            self._sum(owned, collection.step)
        self._hand_out()
        over()

    def _sum(self, owned: OwnedShard, step: int) -> None:
        """Compute a shard's part, unless the one that is kept is still valid."""
        if owned.total is not None:
            self._add_up(owned, owned.total, step)
            return
        with self._step.lock:
            collection = self._step.collection
            known = collection is not None and self._has_part(owned, collection)
            ranks = self._landed_ranks(owned, step) if collection is None else collection.ranks_of(owned)
            clamp = None if collection is None else collection.clamp
            key, contributors = self._key(owned, ranks, clamp), self._contributors(owned, ranks)
            gradients = self.gradients(owned)
        early = collection is None  # nobody waits for it, and the cores receive gradients, or compute them
        squares = None if known else self._squares_of(owned, gradients, contributors, clamp, alone=early)
        with self._step.lock:
            if squares is not None and key == self._key(owned, ranks, clamp):  # else a push came in the meantime
                self._parts[owned.shard.index] = (key, squares)
            if self._step.collection is not None:
                self._check_off(owned, self._step.collection)
        self._hand_out()

    def _add_up(self, owned: OwnedShard, total: Tensor, step: int) -> None:
        """As ``_sum``, where there is a total: the pass that squares the gradients also adds them up there. A clamp of
        the finishes takes another pass, over the total."""
        while (next_pass := self._next_pass(owned, total, step)) is not None:
            squares = self._squares_of(
                owned,
                next_pass.gradients,
                next_pass.contributors,
                next_pass.key[0],
                alone=next_pass.early,
                sums=total if next_pass.fills else None,
            )
            self._passed(owned, next_pass, squares)
        self._hand_out()

    def _next_pass(self, owned: OwnedShard, total: Tensor, step: int) -> _Pass | None:
        """The next pass over a shard; None: there is none, or not yet. Before finishes say who pushes, every rank has
        to be there: what one pushes later would come too late."""
        index = owned.shard.index
        with self._step.lock:
            collection = self._step.collection
            early = collection is None
            ranks = self._landed_ranks(owned, step) if collection is None else collection.ranks_of(owned)
            if step != self._step.number or (early and len(ranks) < self._world_size):
                return None
            clamp = None if collection is None else collection.clamp
            summands = self._summands(owned, ranks, collection)
            seen = self._seen(owned, ranks)
            kept, made = self._parts.get(index), self._totals.get(index)
            if kept is not None and kept[0] == (clamp, step, summands):
                if collection is not None:
                    self._check_off(owned, collection)
                return None
            if made is not None and made.is_of(step, summands):
                contributors: Contributors = tuple((0,) if there else () for there in made.present)
                return _Pass((clamp, step, summands), (total,), contributors, ranks, seen, early=early, fills=False)
            if self._stands:
                return None
            if all(rank in self._step.ranks and self._step.ranks[rank].landings[index].is_here for rank in ranks):
                if self._totals.pop(index, None) is not None:
                    owned.forget_total()  # before its bytes change
                contributors, gradients = self._contributors(owned, ranks), self.gradients(owned)
                return _Pass((None, step, summands), gradients, contributors, ranks, seen, early=early, fills=True)
        if collection is not None:
            fail(collection.future, self._taken_back(owned, step))
        return None

    def _passed(self, owned: OwnedShard, done: _Pass, squares: tuple[float, ...]) -> None:
        """Keep what a pass has computed, unless a push came in the meantime."""
        with self._step.lock:
            if done.seen != self._seen(owned, done.ranks):
                return
            index = owned.shard.index
            if done.fills:
                _, step, summands = done.key
                made = Total(step, summands, tuple(map(bool, done.contributors)))
                self._totals[index] = made
                owned.keep_total(made)
                self.give_back(owned, [self._step.ranks[rank] for rank in done.ranks])
            self._parts[index] = done.key, squares
            if self._step.collection is not None:
                self._check_off(owned, self._step.collection)

    def give_back(self, owned: OwnedShard, holders: Iterable[RankGradients]) -> None:
        """What they have of a shard is in its total. Call it under the step's lock."""
        for holder in holders:
            memory = holder.landings[owned.shard.index].leave()
            if memory is not None and holder.keeps:
                self.spare.give_back(memory)

    def _summands(self, owned: OwnedShard, ranks: Sequence[int], collection: Collection | None) -> Summands:
        """(rank, attempt) of what is added up for a shard, as any life of the rank counts attempts."""
        if collection is not None:
            return tuple((rank, collection.reports[rank].attempt % ATTEMPTS) for rank in ranks)
        index = owned.shard.index
        return tuple((rank, self._step.ranks[rank].landings[index].attempt_of(rank) % ATTEMPTS) for rank in ranks)

    def _taken_back(self, owned: OwnedShard, step: int) -> StepMismatchError:
        return StepMismatchError(
            f"optimizer {self._owner}: of step {step}, some ranks dropped gradients of {owned.unit.name!r} that were "
            "added to those of the others already, and others did not: after a backward, call zero_grad() on every "
            "rank or on none"
        )

    def _squares_of(
        self,
        owned: OwnedShard,
        gradients: Sequence[Gradient],
        contributors: Contributors,
        clamp: Clamp | None,
        *,
        alone: bool,
        sums: Tensor | None = None,
    ) -> tuple[float, ...]:
        """One sum of squares per slice. Neighbours with the same contributors share a call, because models have many
        parameters. ``alone``, ``sums``: see ``Squares.parts``."""
        squares: list[float] = []
        for members, group in groupby(zip(contributors, owned.slices, strict=True), key=itemgetter(0)):
            ranges = tuple((part.start, part.stop) for _, part in group)
            if members:
                squares += self._squares.parts(gradients, members, ranges, clamp, alone=alone, sums=sums)
            else:
                squares += [0.0] * len(ranges)
        return tuple(squares)

    def _hand_out(self) -> None:
        with self._step.lock:
            collection = self._step.collection
            if collection is None or collection.unsummed:
                return
            parts = self._norm_parts(collection)
        settle(collection.future, parts)

    def _norm_parts(self, collection: Collection) -> NormParts:
        found = []
        for index in sorted(collection.shards):
            owned = self._shards[index]
            contributors = self.counted_of(owned, collection)
            squares = self._parts[index][1]
            found += [(index, part.slot, squares[i]) for i, part in enumerate(owned.slices) if contributors[i]]
        return NormParts(step=collection.step, parts=tuple(found))

    def _check_off(self, owned: OwnedShard, collection: Collection) -> None:
        """Remove a shard from the collection's waits if its counted pushes are there and its part is valid."""
        if owned.shard.index not in collection.missing and self._has_part(owned, collection):
            collection.unsummed.discard(owned.shard.index)

    def is_made(self, owned: OwnedShard, collection: Collection) -> bool:
        """Whether a shard's total has exactly what a collection counts."""
        made = self._totals.get(owned.shard.index)
        summands = self._summands(owned, collection.ranks_of(owned), collection)
        return made is not None and made.is_of(collection.step, summands)

    def _has_part(self, owned: OwnedShard, collection: Collection) -> bool:
        kept, ranks = self._parts.get(owned.shard.index), collection.ranks_of(owned)
        if owned.total is not None:
            key: _PartKey = collection.clamp, collection.step, self._summands(owned, ranks, collection)
        else:
            key = self._key(owned, ranks, collection.clamp)
        return kept is not None and kept[0] == key

    def _landed_ranks(self, owned: OwnedShard, step: int) -> list[int]:
        """The ranks that have landed gradients for this shard so far, counted or not."""
        found = {rank: self._step.ranks[rank].landings[owned.shard.index] for rank in sorted(self._step.ranks)}
        return [rank for rank, here in found.items() if here.counted(rank, step)]

    def _holders(self, ranks: Sequence[int]) -> list[int]:
        """The ranks under which the gradients of ``ranks`` lie here: for those that come as one sum, the first."""
        return list(dict.fromkeys(self._step.ranks[rank].rank for rank in ranks))

    def _key(self, owned: OwnedShard, ranks: Sequence[int], clamp: Clamp | None) -> _PartKey:
        index, gradients = owned.shard.index, self._step.ranks
        return clamp, tuple([(rank, gradients[rank].landings[index].generation) for rank in self._holders(ranks)])

    def _seen(self, owned: OwnedShard, ranks: Sequence[int]) -> _PartKey:
        """What of ``ranks`` has landed for this shard, of those that have attached."""
        return self._key(owned, [rank for rank in ranks if rank in self._step.ranks], None)

    def _contributors(self, owned: OwnedShard, ranks: Sequence[int]) -> Contributors:
        """Per slice, those of ``ranks`` with a gradient for it."""
        index, gradients, ranks = owned.shard.index, self._step.ranks, self._holders(ranks)
        present = [gradients[rank].landings[index].present for rank in ranks]
        if all(map(all, present)):
            return (tuple(ranks),) * len(owned.slices)
        return tuple(tuple(compress(ranks, slots)) for slots in zip(*present, strict=True))

    def counted_of(self, owned: OwnedShard, collection: Collection) -> Contributors:
        """Per slice, the ranks with a counted gradient for it; where there is a total, that stands for one rank."""
        if owned.total is None:
            return self._contributors(owned, collection.ranks_of(owned))
        return tuple((0,) if there else () for there in self._totals[owned.shard.index].present)

    def gradients(self, owned: OwnedShard) -> list[Gradient]:
        """Per rank, its gradients of this shard; an empty tensor for a rank that has none here."""
        index, ranks = owned.shard.index, range(self._world_size)
        landings = [self._step.ranks[rank].landings[index] if rank in self._step.ranks else None for rank in ranks]
        return [_NOTHING if each is None or not each.is_here else each.gradient for each in landings]
