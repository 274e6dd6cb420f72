"""The ranks' contributions to the open step, and the norm parts of the counted ones.

Reservations and arrivals come from any thread. The updater's thread sums squares; it does so early if a shard has as
many pushes as in the step before. A part is kept with what it was computed from, so that an outdated one is never used.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import compress, groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from rayzero.concurrency.futures import chain, fail, failed, settle
from rayzero.errors import HandshakeError, StateLostError, StepMismatchError, StoreError
from rayzero.kernels.rank_sum import summed_with
from rayzero.owner.gradients.collection import Collection, check_reports
from rayzero.owner.gradients.landing import Admission, RankGradients, SpareMemory, check_push, check_summands
from rayzero.owner.gradients.squares import Squares
from rayzero.owner.shard import Contributors, OwnedShard, ShardState, ShardWork, StepWork
from rayzero.owner.updater import Updater
from rayzero.protocol.gradient_sum import GradientMemory
from rayzero.protocol.lives import ATTEMPTS
from rayzero.protocol.messages import (
    Action,
    Clamp,
    Contribution,
    Decision,
    FinishReport,
    ModelSpec,
    NormParts,
    Pushed,
)
from rayzero.protocol.scattered import Gradient, ScatteredUnit
from rayzero.protocol.totals import Summands, Total
from rayzero.telemetry.recorder import Recorder
from rayzero.telemetry.spans import Over, nothing

EARLY = 1 << 20  # elements: summing fewer takes 0.1 ms and can wait for the finish

_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")
# What a norm part was computed from: the clamp of the sum, and (rank, generation of its landing) of each summand; where
# there are totals, the step, and (rank, attempt).
_PartKey = tuple[Any, ...]
_Reservation = tuple[Contribution, OwnedShard, "Future[Tensor | None]"]


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


class Contributions:
    """All ranks' gradients for one owner's shards, and the only writer of which step is open.

    Knows ranks, shards and counts; not versions, nor how a decision is made. Thread-safe: settles no future and
    computes nothing under its lock."""

    def __init__(
        self,
        owner: int,
        spec: ModelSpec,
        shards: Mapping[int, OwnedShard],
        squares: Squares,
        updater: Updater,
        recorder: Recorder,
        *,
        step: int,
        redoing: bool = False,
    ) -> None:
        """``squares``: used only in the thread of ``updater``. ``step``: the first open step. ``redoing``: these are a
        successor's: what asks for a later step waits until the decisions before it are redone."""
        self._redoing = redoing
        self._held: list[tuple[int, tuple[FinishReport, ...], Future[NormParts]]] = []  # collects of later steps
        self._redone: list[Future[None]] = []  # done once the open step is decided here
        self.open_step = step  # the step whose contributions are accepted
        self.ranks: dict[int, RankGradients] = {}  # ranks that have attached
        self._totals: dict[int, Total] = {}  # by shard, what is in its total; empty: there are none
        self._spare = SpareMemory()
        self._stands = False  # no total is filled
        self._owner, self._spec, self._every = owner, spec, shards
        self._squares, self._updater, self._recorder = squares, updater, recorder
        self._lock = threading.Lock()
        self._shards = {index: shard for index, shard in shards.items() if shard.trainable}
        self._by_unit: dict[int, list[OwnedShard]] = {}
        for shard in self._shards.values():
            self._by_unit.setdefault(shard.unit.index, []).append(shard)
            if (left := shard.left_total()) is not None:
                self._totals[shard.shard.index] = left
        self._to_be_read = dict.fromkeys(self._shards, 0)  # decisions that have not read a shard's gradients yet
        self._waiting: dict[int, list[_Reservation]] = {}  # by rank
        self._former: set[int] = set()  # dead ranks whose memory is read where they have left it
        self._lost: dict[int, int] = {}  # ranks that have died -> the step before which nothing comes from them again
        self._back: dict[int, tuple[int, RankGradients]] = {}  # ranks that come back -> their step, their new memory
        counts = (spec.accumulation_steps,) * len(spec.layout.units)
        self._expected = dict.fromkeys(range(spec.world_size), counts)  # pushes by rank and unit: only a hint
        self._collection: Collection | None = None  # of the open step, once its reports are here
        self._parts: dict[int, tuple[_PartKey, tuple[float, ...]]] = {}  # by shard
        self._lacks = dict.fromkeys(self._shards, 0)  # by shard: the first rank that lacked expected pushes at last
        self._ripe: list[OwnedShard] = []  # shards with all expected pushes, whose parts no task computes yet
        self._ripe_numel = 0
        self._deciding: Over = nothing  # span of the open step, from its first collect
        self._error: StoreError | None = None

    # ---- memory for pushes

    def add_rank(
        self,
        rank: int,
        own_memory: GradientMemory | None,
        back_at: int | None = None,
        summed: Sequence[int] = (),
    ) -> None:
        """A rank attached; ``own_memory``, ``summed``: see ``RankGradients``. A repeat changes nothing.

        back_at: the step with which a rank begins that has died and come back; its new memory counts from there on.
            (Memory that this owner keeps stays: pushes of the rank's later attempts replace what is there.)

        Raises HandshakeError if ranks do not agree about which of them come as one sum."""
        with self._lock:
            for index in self._totals if back_at is not None else ():
                self._shards[index].hold_total()  # what its former life had there, this one keeps
            self._check_summed(rank, tuple(summed) if own_memory is None else ())
            if rank in self.ranks and (back_at is None or own_memory is None):
                if own_memory is None and rank in self._former:
                    raise StateLostError(
                        f"{self._who} reads gradients of rank {rank} in the memory of its former life, but the rank "
                        "comes back without shared memory: start it on the same host with the same transport, or "
                        "resume from a checkpoint by name (run.resume=CHECKPOINT)"
                    )
                return
            gradients = RankGradients(
                summed[0] if own_memory is None and summed else rank,
                list(self._shards.values()),
                accumulate=self._spec.accumulation_steps > 1,
                own_memory=own_memory,
                summed=summed if own_memory is None else (),
            )
            if gradients.summed:
                self.ranks |= dict.fromkeys(gradients.summed, gradients)
                return
            if rank not in self.ranks:
                self.ranks[rank] = gradients
                return
            assert back_at is not None
            self._back[rank] = back_at, gradients
            self._take_back()

    def _check_summed(self, rank: int, summed: tuple[int, ...]) -> None:
        if summed and summed_with(rank, summed) != summed:
            raise HandshakeError(
                f"{self._who}: the gradients of rank {rank} cannot come in a sum of ranks {list(summed)}: only the "
                "first ranks of a group of 8 can be added before they travel; install the same rayzero in every process"
            )
        for other in (rank, *summed):
            there = self.ranks[other].summed if other in self.ranks else summed
            if there != summed and rank not in self._former:
                raise HandshakeError(
                    f"{self._who}: rank {rank} says that its gradients come in the sum of ranks {list(summed)} of its "
                    f"host (none: alone), others say {list(there)}; start every rank of a host with the same "
                    "zero.host_push and slab_dir"
                )

    def knows(self, rank: int) -> bool:
        """Whether the rank has attached, or a former life of it is read."""
        return rank in self.ranks

    def add_former(self, rank: int, memory: Mapping[int, Tensor], pushed: Sequence[tuple[int, Pushed]]) -> None:
        """A rank is dead, and a former life of this owner may not have applied what it ``pushed`` into ``memory``."""
        self.add_rank(rank, GradientMemory(memory))
        self._former.add(rank)
        for unit, each in pushed:
            self.observe(rank, unit, each)

    def lost_before(self, rank: int, step: int) -> StateLostError | None:
        """See ``ShardService.lost_before``. Returns the error that fails the step."""
        with self._lock:
            self._lost[rank] = step
            return None if self._collection is None else self._never_complete(self._collection)

    def _never_complete(self, collection: Collection) -> StateLostError | None:
        """Why counted pushes will never be there; None: they may be."""
        gone = [rank for rank in collection.missing_ranks if collection.step < self._lost.get(rank, 0)]
        if not gone:
            return None
        return StateLostError(
            f"{self._who} has died before it had applied step {collection.step}, and so have ranks {gone}, which had "
            "pushed to it over gRPC and kept that in no memory that outlives them: resume from the newest checkpoint"
        )

    def _take_back(self) -> None:
        """Read the new memory of ranks that have come back, once the decisions that count their old memory are here."""
        for rank, (step, gradients) in list(self._back.items()):
            if step <= self.open_step:
                for index, landing in gradients.landings.items():  # parts of the old memory's norm are not of this one
                    landing.generation = self.ranks[rank].landings[index].generation + 1
                self.ranks[rank] = gradients
                del self._back[rank]

    def reserve(self, push: Contribution, owned: OwnedShard) -> Future[Tensor | None]:
        """See ``ShardService.reserve_when_free``."""
        future: Future[Tensor | None] = Future()
        try:
            self._try_reserve((push, owned, future))
        except StoreError as exc:
            return failed(exc)
        return future

    def _try_reserve(self, reservation: _Reservation) -> None:
        """Answer a reservation, or queue it."""
        push, owned, future = reservation
        with self._lock:
            if self._error is not None:
                raise self._error
            answered, memory = self._memory_for(push, owned)
            if not answered:
                self._waiting.setdefault(push.rank, []).append(reservation)
        if answered:
            settle(future, memory)

    def _memory_for(self, push: Contribution, owned: OwnedShard) -> tuple[bool, Tensor | None]:
        """(answered, memory). If it is not answered, the push has to wait for its own rank's memory."""
        check_push(push, owned)
        if push.step < self.open_step:
            return True, None
        if push.step > self.open_step or self._to_be_read[owned.shard.index]:
            return False, None
        rank = self.ranks[push.rank]
        check_summands(push, rank)
        landing = rank.landings[owned.shard.index]
        admission = landing.admit(push)
        if admission in (Admission.DROP, Admission.WAIT):
            return admission is Admission.DROP, None
        if admission is Admission.LAND:
            rank.release(landing.staged)
            if not landing.sum.has_memory:
                landing.sum.move(self._spare.take(owned, landing.sum.dtype))
            landing.staged, memory = None, landing.sum.memory
        else:
            landing.staged = landing.staged if landing.staged is not None else rank.lease(owned)
            if landing.staged is None:
                return False, None
            memory = landing.staged
        landing.open(push)
        return True, memory

    def retry(self, *, rank: int | None = None, shard: int | None = None) -> None:
        """Memory was freed, of one rank or of one shard if that is given: answer the reservations that can be answered
        now. With many ranks many wait, and something is freed all the time."""
        with self._lock:
            waiting = list(self._waiting.pop(rank, ())) if rank is not None else self._take_waiting(shard)
        for reservation in waiting:
            try:
                self._try_reserve(reservation)
            except StoreError as exc:
                fail(reservation[2], exc)

    def _take_waiting(self, shard: int | None) -> list[_Reservation]:
        everything = [each for waiting in self._waiting.values() for each in waiting]
        self._waiting = {}
        taken = []
        for each in everything:
            if shard in (None, each[1].shard.index):
                taken.append(each)
            else:
                self._waiting.setdefault(each[0].rank, []).append(each)
        return taken

    def is_added(self, push: Contribution, owned: OwnedShard) -> bool:
        """See ``ShardService.is_added``."""
        return self.ranks[push.rank].landings[owned.shard.index].staged is not None

    def landed(self, push: Contribution, owned: OwnedShard, came: Tensor | None) -> StepMismatchError | None:
        """See ``ShardService.landed``. Returns the error that fails the step if there are more pushes than were
        counted."""
        rank = self.ranks[push.rank]
        landing = rank.landings[owned.shard.index]
        with self._lock:
            wanted = push.step == self.open_step and landing.begin(push)
        if not wanted:
            return None
        landing.absorb(push, came)
        with self._lock:
            rank.release(landing.complete(push))
            excess = self._arrived(owned, *(rank.summed or (push.rank,)))
        self.retry(rank=push.rank)
        return excess

    def observe(
        self, rank: int, unit: int, pushed: Pushed, scattered: ScatteredUnit | None = None
    ) -> StepMismatchError | None:
        """See ``ShardService.observe``. Returns the error that fails the step if there are more pushes than were
        counted."""
        excess = None
        with self._lock:
            for owned in self._by_unit.get(unit, ()) if pushed.step == self.open_step else ():
                memory = None if scattered is not None else self.ranks[rank].own(owned, pushed.place)
                if self.ranks[rank].landings[owned.shard.index].observe(pushed, memory, scattered):
                    excess = self._arrived(owned, rank) or excess
        return excess

    def _arrived(self, owned: OwnedShard, *ranks: int) -> StepMismatchError | None:
        """A push of ``ranks`` is there. Sum the shard if this was the last push that was counted or expected."""
        try:
            if self._collection is not None:
                if self._collection.arrived(owned, ranks, self.ranks):
                    self._sum_later([owned], self.open_step)
            elif self._looks_complete(owned):
                self._ripen(owned)
        except StepMismatchError as exc:
            return exc
        return None

    def _looks_complete(self, owned: OwnedShard) -> bool:
        """Whether every rank has pushed as often as in the last step, so that the norm part may be computed early. Not
        of scattered gradients: their rank needs the cores until its finish."""
        index, everyone = owned.shard.index, range(self._spec.world_size)
        if len(self.ranks) < len(everyone):
            return False
        lacks = next((rank for rank in everyone[self._lacks[index] :] if not self._has_expected(owned, rank)), None)
        if lacks is None:  # those before may have begun again since they were looked at
            lacks = next((rank for rank in everyone if not self._has_expected(owned, rank)), None)
        self._lacks[index] = lacks or 0  # where the next look begins: no look but the last one passes all ranks
        return lacks is None

    def _has_expected(self, owned: OwnedShard, rank: int) -> bool:
        landing = self.ranks[rank].landings[owned.shard.index]
        counted = landing.counted(rank, self.open_step)
        return not landing.is_scattered and counted == self._expected[rank][owned.unit.index]

    def _ripen(self, owned: OwnedShard) -> None:
        """Sum early, several shards at a time, because waking the updater's thread takes as long as summing many
        elements."""
        self._ripe.append(owned)
        self._ripe_numel += owned.shard.numel
        if self._ripe_numel >= EARLY:
            self._sum_later(self._ripe, self.open_step)
            self._ripe, self._ripe_numel = [], 0

    # ---- collect and decide

    def collect(self, step: int, reports: tuple[FinishReport, ...]) -> Future[NormParts]:
        """The norm parts of ``step``, which is open. Different reports replace those of an earlier call.

        Raises StepMismatchError or StoreError if reports contradict each other or what has arrived."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._every:  # without shards there is nothing to redo, so a successor begins where it is asked
                self.open_step = max(self.open_step, step)
            if step > self.open_step and self._redoing:
                return self._hold(step, reports)
            if step != self.open_step:
                raise StepMismatchError(
                    f"{self._who} is in step {self.open_step}, but was asked to collect step {step}"
                )
            check_reports(step, reports, self._spec)
            new, old = Collection(step, {report.rank: report for report in reports}), self._collection
            if old is not None and old.reports == new.reports:
                return old.future
            new.begin(self._shards, self.ranks, self._is_made)
            if (lost := self._never_complete(new)) is not None:
                raise lost
            self._expected = {rank: report.counts for rank, report in new.reports.items()}
            self._collection = new
            if self._deciding is nothing:
                self._deciding = self._recorder.spans.begin("decide", f"step {step}", step)
        if old is not None:
            fail(old.future, StepMismatchError(f"step {old.step} was reopened"))
        self._updater.submit(lambda: self._sum_missing(new))
        return new.future

    def decide(self, decision: Decision) -> StepWork | None:
        """Accept a decision: open the next step and return what the decision does to each shard. None: it was accepted
        before. Raises StepMismatchError for a decision that contradicts what was collected."""
        with self._lock:
            if decision.step < self.open_step:
                return None
            collection = self._counted(decision)
            shards = {index: self._work_of(owned, decision, collection) for index, owned in self._every.items()}
            for index, work in shards.items():
                if work is not None:
                    self._to_be_read[index] += 1
            self.open_step, self._collection = decision.step + 1, None
            self._take_back()
            self._ripe, self._ripe_numel = [], 0
            self._deciding()
            self._deciding = nothing
            held, self._held = self._held, []
            redone, self._redone = self._redone, []
        for waiting in redone:
            settle(waiting, None)
        for step, reports, future in held:
            chain(self._collect_again(step, reports), future)
        return StepWork(decision=decision, shards=shards, parts=collection.future)

    def when_redone(self, decision: Decision) -> Future[None] | None:
        """Done once a decision is redone whose pushes only a former life has collected; None for any other decision."""
        with self._lock:
            here = self._collection
            collected = here is not None and here.step == decision.step and here.future.done()
            if not self._redoing or collected or decision.step < self.open_step:
                return None
            future: Future[None] = Future()
            self._redone.append(future)
            return future

    def _hold(self, step: int, reports: tuple[FinishReport, ...]) -> Future[NormParts]:
        future: Future[NormParts] = Future()
        self._held.append((step, reports, future))
        return future

    def _collect_again(self, step: int, reports: tuple[FinishReport, ...]) -> Future[NormParts]:
        try:
            return self.collect(step, reports)
        except StoreError as exc:
            return failed(exc)

    def _counted(self, decision: Decision) -> Collection:
        """The collection whose pushes ``decision`` counts. Raises StepMismatchError if the decision came too early or
        counts other attempts than were collected."""
        collection = self._collection
        if decision.step > self.open_step or collection is None:
            raise StepMismatchError(
                f"{self._who} is in step {self.open_step} ({'collected' if collection else 'not collected'}), "
                f"but got the decision of step {decision.step}"
            )
        if decision.attempts != collection.attempts:
            raise StepMismatchError(
                f"the decision of step {decision.step} counts attempts {decision.attempts}, but {self._who} "
                f"collected {collection.attempts}"
            )
        if any(owned.state is ShardState.EMPTY for owned in self._every.values()):
            raise StepMismatchError(f"step {decision.step} was decided before {self._who} was loaded")
        return collection

    def _work_of(self, owned: OwnedShard, decision: Decision, collection: Collection) -> ShardWork | None:
        if decision.action is not Action.APPLY or owned.shard.index not in collection.shards:
            return None
        contributors = self._counted_of(owned, collection)
        if not any(contributors):
            return None
        return ShardWork(
            version=decision.step + 1,
            gradients=self._gradients(owned) if owned.total is None else (owned.total,),
            contributors=contributors,
            scale=decision.scale,
            limit=decision.limit,
            hyper=decision.hyper,
        )

    def release(self, owned: OwnedShard) -> None:
        """The decision's update has read the shard's gradients: ranks may write there again."""
        with self._lock:
            self._to_be_read[owned.shard.index] -= 1
            for rank in self.ranks.values():
                rank.landings[owned.shard.index].free()
            if owned.total is not None:  # of ranks that have come back, and pushed again what the total had
                self._give_back(owned, self.ranks.values())
        self.retry(shard=owned.shard.index)

    @property
    def spare_bytes(self) -> int:
        """Bytes of memory for pushes of ranks on other hosts, in use or not, where there are totals."""
        return self._spare.bytes

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks with counted pushes that are not there."""
        with self._lock:
            return self._collection.missing_ranks if self._collection is not None else []

    def fail(self, error: StoreError) -> None:
        """The open step will never be decided: everything that waits for it, now or later, fails with the first
        error."""
        with self._lock:
            error = self._error = self._error or error
            collection = self._collection
        if collection is not None:
            fail(collection.future, error)
        self.retry()

    @property
    def _who(self) -> str:
        return f"optimizer {self._owner}"

    # ---- between two epochs

    def stand_still(self) -> None:
        """Fill no total from now on. Call it in the updater's thread."""
        with self._lock:
            self._stands = True

    def go_on(self) -> None:
        """Fill totals again."""
        with self._lock:
            stood, self._stands, collection = self._stands, False, self._collection
        if stood and collection is not None:
            self._updater.submit(lambda: self._sum_missing(collection))

    # ---- norm parts: computed in the updater's thread

    def _sum_later(self, shards: Sequence[OwnedShard], step: int) -> None:
        def sum_all() -> None:
            over = self._recorder.spans.begin("norm", "sums of squares", step)
            for owned in shards:
                self._sum(owned, step)
            over()

        self._updater.submit(sum_all)

    def _sum_missing(self, collection: Collection) -> None:
        """Compute the parts that were not computed early. Completes a collection that has no shards."""
        over = self._recorder.spans.begin("norm", "sums of squares", collection.step)
        with self._lock:
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
        with self._lock:
            collection = self._collection
            known = collection is not None and self._has_part(owned, collection)
            ranks = self._landed_ranks(owned, step) if collection is None else collection.ranks_of(owned)
            clamp = None if collection is None else collection.clamp
            key, contributors = self._key(owned, ranks, clamp), self._contributors(owned, ranks)
            gradients = self._gradients(owned)
        early = collection is None  # nobody waits for it, and the cores receive gradients, or compute them
        squares = None if known else self._squares_of(owned, gradients, contributors, clamp, alone=early)
        with self._lock:
            if squares is not None and key == self._key(owned, ranks, clamp):  # else a push came in the meantime
                self._parts[owned.shard.index] = (key, squares)
            if self._collection is not None:
                self._check_off(owned, self._collection)
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
        with self._lock:
            collection = self._collection
            early = collection is None
            ranks = self._landed_ranks(owned, step) if collection is None else collection.ranks_of(owned)
            if step != self.open_step or (early and len(ranks) < self._spec.world_size):
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
            if all(rank in self.ranks and self.ranks[rank].landings[index].is_here for rank in ranks):
                if self._totals.pop(index, None) is not None:
                    owned.forget_total()  # before its bytes change
                contributors, gradients = self._contributors(owned, ranks), self._gradients(owned)
                return _Pass((None, step, summands), gradients, contributors, ranks, seen, early=early, fills=True)
        if collection is not None:
            fail(collection.future, self._taken_back(owned, step))
        return None

    def _passed(self, owned: OwnedShard, done: _Pass, squares: tuple[float, ...]) -> None:
        """Keep what a pass has computed, unless a push came in the meantime."""
        with self._lock:
            if done.seen != self._seen(owned, done.ranks):
                return
            index = owned.shard.index
            if done.fills:
                _, step, summands = done.key
                made = Total(step, summands, tuple(map(bool, done.contributors)))
                self._totals[index] = made
                owned.keep_total(made)
                self._give_back(owned, [self.ranks[rank] for rank in done.ranks])
            self._parts[index] = done.key, squares
            if self._collection is not None:
                self._check_off(owned, self._collection)

    def _give_back(self, owned: OwnedShard, holders: Iterable[RankGradients]) -> None:
        for holder in holders:
            memory = holder.landings[owned.shard.index].leave()
            if memory is not None and holder.keeps:
                self._spare.give_back(memory)

    def _summands(self, owned: OwnedShard, ranks: Sequence[int], collection: Collection | None) -> Summands:
        """(rank, attempt) of what is added up for a shard, as any life of the rank counts attempts."""
        if collection is not None:
            return tuple((rank, collection.reports[rank].attempt % ATTEMPTS) for rank in ranks)
        index = owned.shard.index
        return tuple((rank, self.ranks[rank].landings[index].attempt_of(rank) % ATTEMPTS) for rank in ranks)

    def _taken_back(self, owned: OwnedShard, step: int) -> StepMismatchError:
        return StepMismatchError(
            f"{self._who}: of step {step}, some ranks dropped gradients of {owned.unit.name!r} that were added to "
            "those of the others already, and others did not: after a backward, call zero_grad() on every rank or on "
            "none"
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
        with self._lock:
            collection = self._collection
            if collection is None or collection.unsummed:
                return
            parts = self._norm_parts(collection)
        settle(collection.future, parts)

    def _norm_parts(self, collection: Collection) -> NormParts:
        found = []
        for index in sorted(collection.shards):
            owned = self._shards[index]
            contributors = self._counted_of(owned, collection)
            squares = self._parts[index][1]
            found += [(index, part.slot, squares[i]) for i, part in enumerate(owned.slices) if contributors[i]]
        return NormParts(step=collection.step, parts=tuple(found))

    def _check_off(self, owned: OwnedShard, collection: Collection) -> None:
        """Remove a shard from the collection's waits if its counted pushes are there and its part is valid."""
        if owned.shard.index not in collection.missing and self._has_part(owned, collection):
            collection.unsummed.discard(owned.shard.index)

    def _is_made(self, owned: OwnedShard, collection: Collection) -> bool:
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
        found = {rank: self.ranks[rank].landings[owned.shard.index] for rank in sorted(self.ranks)}
        return [rank for rank, here in found.items() if here.counted(rank, step)]

    def _holders(self, ranks: Sequence[int]) -> list[int]:
        """The ranks under which the gradients of ``ranks`` lie here: for those that come as one sum, the first."""
        return list(dict.fromkeys(self.ranks[rank].rank for rank in ranks))

    def _key(self, owned: OwnedShard, ranks: Sequence[int], clamp: Clamp | None) -> _PartKey:
        index, gradients = owned.shard.index, self.ranks
        return clamp, tuple([(rank, gradients[rank].landings[index].generation) for rank in self._holders(ranks)])

    def _seen(self, owned: OwnedShard, ranks: Sequence[int]) -> _PartKey:
        """What of ``ranks`` has landed for this shard, of those that have attached."""
        return self._key(owned, [rank for rank in ranks if rank in self.ranks], None)

    def _contributors(self, owned: OwnedShard, ranks: Sequence[int]) -> Contributors:
        """Per slice, those of ``ranks`` with a gradient for it."""
        index, gradients, ranks = owned.shard.index, self.ranks, self._holders(ranks)
        present = [gradients[rank].landings[index].present for rank in ranks]
        if all(map(all, present)):
            return (tuple(ranks),) * len(owned.slices)
        return tuple(tuple(compress(ranks, slots)) for slots in zip(*present, strict=True))

    def _counted_of(self, owned: OwnedShard, collection: Collection) -> Contributors:
        """Per slice, the ranks with a counted gradient for it; where there is a total, that stands for one rank."""
        if owned.total is None:
            return self._contributors(owned, collection.ranks_of(owned))
        return tuple((0,) if there else () for there in self._totals[owned.shard.index].present)

    def _gradients(self, owned: OwnedShard) -> list[Gradient]:
        """Per rank, its gradients of this shard; an empty tensor for a rank that has none here."""
        index, ranks = owned.shard.index, range(self._spec.world_size)
        landings = [self.ranks[rank].landings[index] if rank in self.ranks else None for rank in ranks]
        return [_NOTHING if each is None or not each.is_here else each.gradient for each in landings]
