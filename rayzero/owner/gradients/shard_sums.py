"""The norm parts of an owner's shards, and their totals: computed in the updater's thread.

A part is kept with what it was computed from, so that an outdated one is never used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from rayzero.concurrency.futures import fail, settle
from rayzero.errors import StepMismatchError
from rayzero.kernels import choose_adder
from rayzero.kernels.rank_sum import GROUP, Range
from rayzero.owner.gradients.collection import Collection, OpenStep
from rayzero.owner.gradients.landing import Landing, RankGradients, RoundLanding, SpareMemory
from rayzero.owner.owned_model import OwnedModel
from rayzero.owner.shard import Contributors, OwnedShard, Updater
from rayzero.protocol.gradient_sum import Gradient, KeptTotal, Summands, Total, summands_of
from rayzero.protocol.messages import ATTEMPTS, Clamp, Contribution, NormParts, Pushed
from rayzero.telemetry.recorder import Recorder

IDLE_S = 2.0  # without a task; shorter pauses are those of a step
_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")
# What a norm part was computed from: the clamp of the sum, and (rank, generation of its landing) of each summand; where
# there are totals, the step and summands.
_PartKey = tuple[Any, ...]
TotalListener = Callable[[int, int], None]  # of a shard, and the ``total_word`` (protocol/gradient_sum.py) of its total
_Pushes = Mapping[int, tuple[int, int]]  # by rank: attempt, as any life of the rank counts them, and how many


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass over a shard whose gradients have a total."""

    key: _PartKey  # of the norm parts that it computes
    gradients: Sequence[Gradient]
    contributors: Contributors
    early: bool  # nobody waits for it, and the cores receive gradients, or compute them
    round: _Round | None = None  # that it adds; None: it squares the total


@dataclass(frozen=True, slots=True)
class _Round:
    """A round that is added to a total."""

    number: int
    holders: Sequence[tuple[RankGradients, RoundLanding, int]]  # with the generation of the landing that is read
    present: tuple[bool, ...]  # per slice: whether the total has a gradient afterwards


class ShardSums:
    """Adds up and squares the gradients of the open step, shard by shard.

    Knows what is in totals and parts; not when a step is collected or decided. Only the updater's thread sums."""

    def __init__(
        self,
        model: OwnedModel,
        updater: Updater,
        recorder: Recorder,
        step: OpenStep,
        on_total: TotalListener | None,
    ) -> None:
        """``on_total``: called after each round with the shard and its total's word, under the step's lock."""
        self.shards = {index: shard for index, shard in model.shards.items() if shard.trainable}
        self._world_size, self._planned = model.spec.world_size, model.spec.accumulation_steps
        self._squares, self._adder = model.square_sum, choose_adder()
        self._owner, self._step, self._on_total = model.owner, step, on_total
        self._updater, self._recorder = updater, recorder
        self._totals: dict[int, Total] = {}  # by shard, what is in its total; empty: there are none
        for index, shard in self.shards.items():
            if shard.total is not None and (left := shard.total_line.read(shard.total)) is not None:
                self._totals[index] = left
        self._parts: dict[int, tuple[_PartKey, tuple[float, ...]]] = {}  # by shard
        # In place of a rank, for what is in a total before a round: a group behind those of the ranks, so that the
        # round is added up first.
        self._before = -(-self._world_size // GROUP) * GROUP
        self._stands = False  # no total is filled
        self.spare = SpareMemory()  # for what is pushed until it is in a total
        self._restoring_s = 0.0  # spent since totals were given back
        if any(shard.total_room is not None for shard in self.shards.values()):
            updater.when_idle(IDLE_S, self.give_back_totals)

    # ---- totals

    def hold_totals(self) -> None:
        """A rank comes back: ranks give back nothing more of what is in totals. Call it under the step's lock."""
        for index in self._totals:
            self.shards[index].total_line.hold()

    def stand_still(self) -> None:
        """Fill no total from now on. Call it in the updater's thread."""
        for owned in self.shards.values():
            self._restore_total(owned)  # the next owner on another host reads it
        with self._step.lock:
            self._stands = True

    def go_on(self) -> None:
        """Fill totals again."""
        with self._step.lock:
            stood, self._stands, collection = self._stands, False, self._step.collection
        if stood and collection is not None:
            self.sum_missing_later(collection)

    def give_back_totals(self) -> None:
        """Give the memory of totals back that no decision will read: of steps that are published. Call it in the
        updater's thread, while there is nothing to do.

        [Note: totals at rest] A run that stands still (an evaluation, a generation, a long forward) needs no totals;
        the next pushes have their memory made again. The wait before the next time is a hundred times as long as that
        took the last time, so it takes about a hundredth of a run at most."""
        with self._step.lock:
            if self._stands:  # its memory may be another owner's from now on
                return
            shards = [shard for index, shard in self.shards.items() if self._is_spent(index, shard)]
        for owned in shards:
            if owned.total_room is not None and owned.total_there:
                owned.total_there = False  # before its bytes change
                owned.total_room.give_back(0)
        self._updater.when_idle(max(IDLE_S, 100 * self._restoring_s), self.give_back_totals)
        self._restoring_s = 0.0

    def _is_spent(self, index: int, owned: OwnedShard) -> bool:
        made = self._totals.get(index)
        return made is None or made.step < owned.published

    def _restore_total(self, owned: OwnedShard) -> None:
        """A total is about to be filled, or read by another owner."""
        if owned.total_room is not None and not owned.total_there:
            began = time.perf_counter()
            owned.total_room.restore()
            owned.total_there = True
            self._restoring_s += time.perf_counter() - began

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
                self._check_off(self.shards[index], collection)
            missing = [self.shards[index] for index in sorted(collection.unsummed - collection.missing.keys())]
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
        """As ``_sum``, where there is a total. The pass that adds up the last round which is planned squares the total
        as well, so that its parts are those of the step. Where ranks push less, or the finishes name a clamp, another
        pass over the total squares it."""
        while (next_pass := self._next_pass(owned, total, step)) is not None:
            adds = next_pass.round
            if adds is not None:
                self._restore_total(owned)
            kept = owned.total_line.keeps(total) if adds is not None and adds.number else None
            if adds is not None and adds.number + 1 < self._planned and next_pass.early:
                self._add_round(owned, total, next_pass, kept)
                squares = None
            else:
                if kept is not None:
                    kept.keep(total, total.numel())
                squares = self._squares_of(
                    owned,
                    next_pass.gradients,
                    next_pass.contributors,
                    next_pass.key[0],
                    alone=next_pass.early,
                    sums=total if adds is not None else None,
                )
            self._passed(owned, next_pass, squares)
        self._hand_out()

    def _add_round(self, owned: OwnedShard, total: Tensor, adds: _Pass, kept: KeptTotal | None) -> None:
        """Add up a round without squares: others follow."""
        for members, ranges in _alike(owned, adds.contributors):
            there = members[-1:] == (self._before,)
            if ranks := members[:-1] if there else members:
                self._adder.add_round(total, adds.gradients, ranks, ranges, kept, fresh=not there)

    def _next_pass(self, owned: OwnedShard, total: Tensor, step: int) -> _Pass | None:
        """The next pass over a shard; None: there is none, or not yet. Before finishes say who pushes, every rank has
        to be there: what one pushes later would come too late."""
        index = owned.shard.index
        with self._step.lock:
            collection = self._step.collection
            if step != self._step.number:
                return None
            pushes = self._pushes(owned, collection)
            if collection is None and len(pushes) < self._world_size:
                return None
            counts = [count for _, count in pushes.values()]
            wanted = max(counts, default=0) if collection is not None else min(counts)
            there = self._rounds_of(owned, step, pushes, early=collection is None)
            if there < wanted:
                added = None if self._stands else self._round_of(owned, step, pushes, there, wanted)
                if added is not None or self._stands:
                    return added
            else:
                return self._square(owned, total, step, pushes, collection)
        if collection is not None and index not in collection.missing:
            fail(collection.future, self._taken_back(owned, step))
        return None

    def _pushes(self, owned: OwnedShard, collection: Collection | None) -> _Pushes:
        """By rank that has pushed a shard: its attempt, as any life of the rank counts them, and how often."""
        index, ranks = owned.shard.index, self._step.ranks
        if collection is not None:
            unit, reports = owned.unit.index, collection.reports
            return {
                rank: (reports[rank].attempt % ATTEMPTS, reports[rank].counts[unit])
                for rank in collection.ranks_of(owned)
            }
        found = {}
        for rank in sorted(ranks):
            landing = ranks[rank].landings[index]
            assert isinstance(landing, RoundLanding)
            if count := landing.counted(rank, self._step.number):
                found[rank] = landing.attempt_of(rank) % ATTEMPTS, count
        return found

    def _rounds_of(self, owned: OwnedShard, step: int, pushes: _Pushes, *, early: bool) -> int:
        """How many rounds of exactly these pushes are in the total. ``early``: they are not all, but of every rank as
        many as there are rounds."""
        made = self._totals.get(owned.shard.index)
        if made is None:
            return 0
        all_of_it = {rank: (attempt, made.rounds) for rank, (attempt, _) in pushes.items()} if early else pushes
        return made.rounds if made.is_of(step, summands_of(all_of_it, made.rounds)) else 0

    def _square(
        self, owned: OwnedShard, total: Tensor, step: int, pushes: _Pushes, collection: Collection | None
    ) -> _Pass | None:
        """The pass that squares a total which has all rounds; None: its parts are known, or will be asked for."""
        if collection is None:
            return None
        key = collection.clamp, step, _all_of(pushes)
        kept = self._parts.get(owned.shard.index)
        if kept is not None and kept[0] == key:
            self._check_off(owned, collection)
            return None
        return _Pass(key, (total,), self.counted_of(owned, collection), early=False)

    def _round_of(self, owned: OwnedShard, step: int, pushes: _Pushes, number: int, wanted: int) -> _Pass | None:
        """The pass that adds a round to the total; None: not everything that it needs is here. ``wanted``: how many
        rounds there will be."""
        index, ranks = owned.shard.index, self._step.ranks
        needed = range(number, number + 1) if number else range(wanted)  # round 0 overwrites the total
        for rank, (_, count) in pushes.items():
            landing = ranks[rank].landings[index] if rank in ranks else None
            assert landing is None or isinstance(landing, RoundLanding)
            if not all(landing is not None and landing.has(each) for each in needed if each < count):
                return None
        made = self._totals.get(index)
        if not number and made is not None:
            del self._totals[index]
            owned.total_line.clear()  # before its bytes change
        here = [rank for rank, (_, count) in pushes.items() if count > number]
        holders: dict[int, tuple[RankGradients, RoundLanding, int]] = {}
        gradients: list[Gradient] = [_NOTHING] * (self._before + 1)
        for rank in here:
            holder = ranks[rank]
            landing = holder.landings[index]
            assert isinstance(landing, RoundLanding)
            holders[holder.rank] = holder, landing, landing.generation
            gradient = landing.pushes.each[number].gradient
            assert gradient is not None
            gradients[holder.rank] = gradient
        present = [landing.pushes.each[number].present for _, landing, _ in holders.values()]
        contributors = _members(owned, tuple(holders), present)
        if number:
            assert owned.total is not None
            gradients[self._before] = owned.total
            had = self._totals[index].present
            contributors = tuple(
                (*members, self._before) if there else members for members, there in zip(contributors, had, strict=True)
            )
        return _Pass(
            (None, step, summands_of(pushes, number + 1)),
            gradients,
            contributors,
            early=self._step.collection is None,
            round=_Round(number, tuple(holders.values()), tuple(map(bool, contributors))),
        )

    def _passed(self, owned: OwnedShard, done: _Pass, squares: tuple[float, ...] | None) -> None:
        """Keep what a pass has computed. ``squares``: None if it computed none. If a rank has begun another attempt
        meanwhile, the pass may have read a mix of both; what it made is kept under the earlier attempt, to which ranks
        never return, so it is never used."""
        with self._step.lock:
            index, added = owned.shard.index, done.round
            if added is not None:
                _, step, summands = done.key
                self._totals[index] = made = Total(step, added.number + 1, summands, added.present)
                owned.total_line.write(made)
                if self._on_total is not None:
                    self._on_total(index, made.word)
                for holder, landing, generation in added.holders:
                    if landing.generation == generation:
                        self.give_back(holder, landing, added.number + 1)
            if squares is not None:
                self._parts[index] = done.key, squares
            if self._step.collection is not None:
                self._check_off(owned, self._step.collection)

    def give_back(self, holder: RankGradients, landing: RoundLanding, rounds: int) -> None:
        """The first ``rounds`` of a shard are in its total. Call it under the step's lock."""
        for memory in landing.leave(rounds):
            if holder.keeps:
                self.spare.give_back(memory)

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
        """One sum of squares per slice. ``alone``, ``sums``: see ``SquareSum.parts``."""
        squares: list[float] = []
        for members, ranges in _alike(owned, contributors):
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
            owned = self.shards[index]
            contributors = self.counted_of(owned, collection)
            squares = self._parts[index][1]
            found += [(index, part.slot, squares[i]) for i, part in enumerate(owned.slices) if contributors[i]]
        return NormParts(step=collection.step, parts=tuple(found))

    def _check_off(self, owned: OwnedShard, collection: Collection) -> None:
        """Remove a shard from the collection's waits if its counted pushes are there and its part is valid."""
        if owned.shard.index not in collection.missing and self._has_part(owned, collection):
            collection.unsummed.discard(owned.shard.index)

    def has(self, owned: OwnedShard, rank: int, pushed: Pushed) -> bool:
        """Whether what a rank has pushed of a shard is in its total."""
        made = self._totals.get(owned.shard.index)
        if made is None or isinstance(made.summands, int) or made.step < pushed.step:
            return False
        there = next((each for each in made.summands if each[0] == rank), (rank, 0, 0))
        return made.step > pushed.step or there[1:] >= (pushed.attempt % ATTEMPTS, pushed.count)

    def covers(self, owned: OwnedShard, push: Contribution) -> int:
        """How many pushes before ``push`` need not come, because a shard's total has them."""
        made = self._totals.get(owned.shard.index)
        tried = {each.rank: each.attempt for each in push.summands if each.pushes} or {push.rank: push.attempt}
        return 0 if made is None else made.covers(push.step, tried)

    def is_made(self, owned: OwnedShard, collection: Collection) -> bool:
        """Whether a shard's total has exactly what a collection counts."""
        pushes, made = self._pushes(owned, collection), self._totals.get(owned.shard.index)
        return made is not None and made.is_of(collection.step, _all_of(pushes))

    def _has_part(self, owned: OwnedShard, collection: Collection) -> bool:
        kept = self._parts.get(owned.shard.index)
        if owned.total is not None:
            key: _PartKey = collection.clamp, collection.step, _all_of(self._pushes(owned, collection))
        else:
            key = self._key(owned, collection.ranks_of(owned), collection.clamp)
        return kept is not None and kept[0] == key

    def _landed_ranks(self, owned: OwnedShard, step: int) -> list[int]:
        """The ranks that have landed gradients for this shard so far, counted or not."""
        found = {rank: self._step.ranks[rank].landings[owned.shard.index] for rank in sorted(self._step.ranks)}
        return [rank for rank, here in found.items() if here.counted(rank, step)]

    def _key(self, owned: OwnedShard, ranks: Sequence[int], clamp: Clamp | None) -> _PartKey:
        index, gradients = owned.shard.index, self._step.ranks
        return clamp, tuple([(rank, gradients[rank].landings[index].generation) for rank in ranks])

    def _contributors(self, owned: OwnedShard, ranks: Sequence[int]) -> Contributors:
        """Per slice, those of ``ranks`` with a gradient for it, where there is no total."""
        found = [self._step.ranks[rank].landings[owned.shard.index] for rank in ranks]
        return _members(owned, ranks, [each.present for each in found if isinstance(each, Landing)])

    def counted_of(self, owned: OwnedShard, collection: Collection) -> Contributors:
        """Per slice, the ranks with a counted gradient for it; where there is a total, that stands for one rank."""
        if owned.total is None:
            return self._contributors(owned, collection.ranks_of(owned))
        if not self.is_made(owned, collection):
            return ((),) * len(owned.slices)
        return tuple((0,) if there else () for there in self._totals[owned.shard.index].present)

    def gradients(self, owned: OwnedShard) -> list[Gradient]:
        """Per rank, its gradients of this shard, where there is no total; an empty tensor for a rank that has none."""
        index, ranks = owned.shard.index, range(self._world_size)
        landings = [self._step.ranks[rank].landings[index] if rank in self._step.ranks else None for rank in ranks]
        return [each.gradient if isinstance(each, Landing) else _NOTHING for each in landings]


def _all_of(pushes: _Pushes) -> Summands:
    """What a total of all of them has."""
    return summands_of(pushes, max((count for _, count in pushes.values()), default=0))


def _alike(owned: OwnedShard, contributors: Contributors) -> Iterator[tuple[tuple[int, ...], tuple[Range, ...]]]:
    """Neighbouring slices with the same contributors, which share a call, because models have many parameters:
    (contributors, their ranges)."""
    for members, group in groupby(zip(contributors, owned.slices, strict=True), key=itemgetter(0)):
        yield members, tuple((part.start, part.stop) for _, part in group)


def _members(owned: OwnedShard, ranks: Sequence[int], present: Sequence[Sequence[bool]]) -> Contributors:
    """Per slice of a shard, those of ``ranks`` that have it. ``present``: of each of them, per slice."""
    if all(map(all, present)):
        return (tuple(ranks),) * len(owned.slices)
    return tuple(tuple(compress(ranks, slots)) for slots in zip(*present, strict=True))
