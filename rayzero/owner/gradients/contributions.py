"""The ranks' contributions to the open step: memory for them, which of them are there, and which count.

Reservations and arrivals come from any thread. Shards are summed early if they have as many pushes as in the step
before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from torch import Tensor

from rayzero.concurrency.futures import chain, fail, future_raises, settle
from rayzero.errors import HandshakeError, StateLostError, StepMismatchError, StoreError
from rayzero.kernels.rank_sum import summed_with
from rayzero.owner.gradients.collection import Collection, OpenStep, check_reports
from rayzero.owner.gradients.landing import Admission, RankGradients, RoundLanding, check_push, check_summands
from rayzero.owner.gradients.shard_sums import ShardSums, TotalListener
from rayzero.owner.owned_model import OwnedModel
from rayzero.owner.shard import OwnedShard, ShardState, ShardWork, StepWork, Updater
from rayzero.protocol.gradient_sum import FormerRank, GradientMemory, ScatteredUnit
from rayzero.protocol.messages import (
    Action,
    Contribution,
    Decision,
    FinishReport,
    NormParts,
    Pushed,
)
from rayzero.telemetry.recorder import Recorder
from rayzero.telemetry.spans import Over, nothing

EARLY = 1 << 20  # elements: summing fewer takes 0.1 ms and can wait for the finish

_Reservation = tuple[Contribution, OwnedShard, "Future[Tensor | None]"]


class Contributions:
    """All ranks' gradients for one owner's shards, and the only writer of which step is open.

    Knows ranks, shards and counts; not versions, nor how a decision is made. Thread-safe: settles no future and
    computes nothing under its lock."""

    def __init__(self, model: OwnedModel, updater: Updater, recorder: Recorder, on_total: TotalListener) -> None:
        """``on_total``: see ``ShardService.on_total``. Where these are a successor's, what asks for a later step waits
        until the decisions before it are redone."""
        spec, shards = model.spec, model.shards
        self._redoing = bool(model.former) or not shards  # without shards it cannot know whether it is a successor
        self._held: list[tuple[int, tuple[FinishReport, ...], Future[NormParts]]] = []  # collects of later steps
        self._redone: list[Future[None]] = []  # done once the open step is decided here
        self._owner, self._spec, self._every, self._recorder = model.owner, spec, shards, recorder
        self._step = OpenStep(model.version)
        hears = on_total if spec.accumulation_steps > 1 else None  # else no push takes the place of another
        self.sums = ShardSums(model, updater, recorder, self._step, hears)
        self._shards = self.sums.shards
        self._by_unit: dict[int, list[OwnedShard]] = {}
        for shard in self._shards.values():
            self._by_unit.setdefault(shard.unit.index, []).append(shard)
        self._to_be_read = dict.fromkeys(self._shards, 0)  # decisions that have not read a shard's gradients yet
        self._waiting: dict[int, list[_Reservation]] = {}  # by rank
        self._former: set[int] = set()  # dead ranks whose memory is read where they have left it
        self._lost: dict[int, int] = {}  # ranks that have died -> the step before which nothing comes from them again
        self._back: dict[int, tuple[int, RankGradients]] = {}  # ranks that come back -> their step, their new memory
        counts = (spec.accumulation_steps,) * len(spec.layout.units)
        self._expected = dict.fromkeys(range(spec.world_size), counts)  # pushes by rank and unit: only a hint
        self._lacks = dict.fromkeys(self._shards, 0)  # by shard: the first rank that lacked expected pushes at last
        self._asked = dict.fromkeys(self._shards, 0)  # by shard: rounds of the open step that were asked for
        self._ripe: list[OwnedShard] = []  # shards with all expected pushes, whose parts no task computes yet
        self._ripe_numel = 0
        self._deciding: Over = nothing  # span of the open step, from its first collect
        self._error: StoreError | None = None

    @property
    def open_step(self) -> int:
        """The step whose contributions are accepted."""
        return self._step.number

    @property
    def ranks(self) -> Mapping[int, RankGradients]:
        """The gradients of ranks that have attached, or of a former life of them that is read."""
        return self._step.ranks

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
        with self._step.lock:
            if back_at is not None:  # what its former life had in totals, this one keeps
                self.sums.hold_totals()
            self._check_summed(rank, tuple(summed) if own_memory is None else ())
            if rank in self._step.ranks and (back_at is None or own_memory is None):
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
                self._spec,
                own_memory=own_memory,
                summed=summed if own_memory is None else (),
            )
            if gradients.summed:
                self._step.ranks |= dict.fromkeys(gradients.summed, gradients)
                return
            if rank not in self._step.ranks:
                self._step.ranks[rank] = gradients
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
            there = self._step.ranks[other].summed if other in self._step.ranks else summed
            if there != summed and rank not in self._former:
                raise HandshakeError(
                    f"{self._who}: rank {rank} says that its gradients come in the sum of ranks {list(summed)} of its "
                    f"host (none: alone), others say {list(there)}; start every rank of a host with the same "
                    "zero.host_push and slab_dir"
                )

    def knows(self, rank: int) -> bool:
        """Whether the rank has attached, or a former life of it is read."""
        return rank in self._step.ranks

    def add_former(self, rank: int, left: FormerRank) -> None:
        """A rank is dead, and a former life of this owner may not have applied what it has pushed."""
        self.add_rank(rank, left.memory)
        self._former.add(rank)
        for unit, each in left.pushed:
            self.observe(rank, unit, each)

    def lost_before(self, rank: int, step: int) -> StateLostError | None:
        """See ``ShardService.lost_before``. Returns the error that fails the step."""
        with self._step.lock:
            self._lost[rank] = step
            return None if self._step.collection is None else self._never_complete(self._step.collection)

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
            if step <= self._step.number:
                for index, landing in gradients.landings.items():  # parts of the old memory's norm are not of this one
                    landing.generation = self._step.ranks[rank].landings[index].generation + 1
                self._step.ranks[rank] = gradients
                del self._back[rank]

    @future_raises
    def reserve(self, push: Contribution, owned: OwnedShard) -> Future[Tensor | None]:
        """See ``ShardService.reserve_when_free``."""
        future: Future[Tensor | None] = Future()
        self._try_reserve((push, owned, future))
        return future

    def _try_reserve(self, reservation: _Reservation) -> None:
        """Answer a reservation, or queue it."""
        push, owned, future = reservation
        with self._step.lock:
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
        if push.step < self._step.number:
            return True, None
        if push.step > self._step.number or self._to_be_read[owned.shard.index]:
            return False, None
        rank = self._step.ranks[push.rank]
        check_summands(push, rank)
        landing = rank.landings[owned.shard.index]
        if isinstance(landing, RoundLanding):
            landing.covered = self.sums.covers(owned, push)
        admission = landing.admit(push)
        if admission in (Admission.DROP, Admission.WAIT):
            return admission is Admission.DROP, None
        if isinstance(landing, RoundLanding):
            if push.seq == 0:
                self._asked[owned.shard.index] = 0
            return True, landing.open(push, self.sums.spare)
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

    def retry(self, *, rank: int | None = None, shard: int | None = None) -> None:
        """Memory was freed, of one rank or of one shard if that is given: answer the reservations that can be answered
        now. With many ranks many wait, and something is freed all the time."""
        with self._step.lock:
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

    def landed(self, push: Contribution, owned: OwnedShard, came: Tensor | None) -> StepMismatchError | None:
        """See ``ShardService.landed``. Returns the error that fails the step if there are more pushes than were
        counted."""
        rank = self._step.ranks[push.rank]
        landing = rank.landings[owned.shard.index]
        with self._step.lock:
            wanted = push.step == self._step.number and landing.begin(push)
        if not wanted:
            return None
        landing.absorb(push, came)
        with self._step.lock:
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
        with self._step.lock:
            for owned in self._by_unit.get(unit, ()) if pushed.step == self._step.number else ():
                landing = self._step.ranks[rank].landings[owned.shard.index]
                if landing.knows(pushed):
                    continue
                if pushed.count == 1:
                    self._asked[owned.shard.index] = 0
                memory = None if scattered is not None else self._step.ranks[rank].own(owned, pushed.place)
                if landing.observe(pushed, memory, scattered):
                    excess = self._arrived(owned, rank) or excess
        return excess

    def in_totals(self, rank: int, unit: int, pushed: Pushed) -> bool:
        """See ``ShardService.in_totals``."""
        with self._step.lock:
            return all(self.sums.has(owned, rank, pushed) for owned in self._by_unit.get(unit, ()))

    def _arrived(self, owned: OwnedShard, *ranks: int) -> StepMismatchError | None:
        """A push of ``ranks`` is there. Sum the shard if this was the last push that was counted or expected."""
        try:
            if self._step.collection is not None:
                if self._step.collection.arrived(owned, ranks, self._step.ranks):
                    self.sums.sum_later([owned], self._step.number)
            elif self._looks_complete(owned):
                self._ripen(owned)
        except StepMismatchError as exc:
            return exc
        return None

    def _looks_complete(self, owned: OwnedShard) -> bool:
        """Whether every rank has made its pushes of the next round; or, where there are no totals, as many as in the
        last step, so that the norm part may be computed early. Not of scattered gradients: their rank needs the cores
        until its finish."""
        index, everyone = owned.shard.index, range(self._spec.world_size)
        if len(self._step.ranks) < len(everyone):
            return False
        lacks = next((rank for rank in everyone[self._lacks[index] :] if not self._has_expected(owned, rank)), None)
        if lacks is None:  # those before may have begun again since they were looked at
            lacks = next((rank for rank in everyone if not self._has_expected(owned, rank)), None)
        self._lacks[index] = lacks or 0  # where the next look begins: no look but the last one passes all ranks
        if lacks is None:
            self._asked[index] += 1
        return lacks is None

    def _has_expected(self, owned: OwnedShard, rank: int) -> bool:
        landing = self._step.ranks[rank].landings[owned.shard.index]
        counted = landing.counted(rank, self._step.number)
        if isinstance(landing, RoundLanding):
            return not landing.is_scattered and counted > self._asked[owned.shard.index]
        return not landing.is_scattered and counted == self._expected[rank][owned.unit.index]

    def _ripen(self, owned: OwnedShard) -> None:
        """Sum early, several shards at a time, because waking the updater's thread takes as long as summing many
        elements."""
        self._ripe.append(owned)
        self._ripe_numel += owned.shard.numel
        if self._ripe_numel >= EARLY:
            self.sums.sum_later(self._ripe, self._step.number)
            self._ripe, self._ripe_numel = [], 0

    # ---- collect and decide

    def collect(self, step: int, reports: tuple[FinishReport, ...]) -> Future[NormParts]:
        """The norm parts of ``step``, which is open. Different reports replace those of an earlier call.

        Raises StepMismatchError or StoreError if reports contradict each other or what has arrived."""
        with self._step.lock:
            if self._error is not None:
                raise self._error
            if not self._every:  # without shards there is nothing to redo, so a successor begins where it is asked
                self._step.number = max(self._step.number, step)
            if step > self._step.number and self._redoing:
                later: Future[NormParts] = Future()
                self._held.append((step, reports, later))
                return later
            if step != self._step.number:
                raise StepMismatchError(
                    f"{self._who} is in step {self._step.number}, but was asked to collect step {step}"
                )
            check_reports(step, reports, self._spec)
            new, old = Collection(step, {report.rank: report for report in reports}), self._step.collection
            if old is not None and old.reports == new.reports:
                return old.future
            new.begin(self._shards, self._step.ranks, self.sums.is_made)
            if (lost := self._never_complete(new)) is not None:
                raise lost
            self._expected = {rank: report.counts for rank, report in new.reports.items()}
            self._step.collection = new
            if self._deciding is nothing:
                self._deciding = self._recorder.spans.begin("decide", f"step {step}", step)
        if old is not None:
            fail(old.future, StepMismatchError(f"step {old.step} was reopened"))
        self.sums.sum_missing_later(new)
        return new.future

    def decide(self, decision: Decision) -> StepWork | None:
        """Accept a decision: open the next step and return what the decision does to each shard. None: it was accepted
        before. Raises StepMismatchError for a decision that contradicts what was collected."""
        with self._step.lock:
            if decision.step < self._step.number:
                return None
            collection = self._counted(decision)
            shards = {index: self._work_of(owned, decision, collection) for index, owned in self._every.items()}
            for index, work in shards.items():
                if work is not None:
                    self._to_be_read[index] += 1
            self._step.number, self._step.collection = decision.step + 1, None
            self._take_back()
            self._ripe, self._ripe_numel = [], 0
            self._asked = dict.fromkeys(self._shards, 0)
            self._deciding()
            self._deciding = nothing
            held, self._held = self._held, []
            redone, self._redone = self._redone, []
        for waiting in redone:
            settle(waiting, None)
        for step, reports, future in held:
            chain(future_raises(self.collect)(step, reports), future)
        return StepWork(decision=decision, shards=shards, parts=collection.future)

    def when_redone(self, decision: Decision) -> Future[None] | None:
        """Done once a decision is redone whose pushes only a former life has collected; None for any other decision."""
        with self._step.lock:
            here = self._step.collection
            collected = here is not None and here.step == decision.step and here.future.done()
            if not self._redoing or collected or decision.step < self._step.number:
                return None
            future: Future[None] = Future()
            self._redone.append(future)
            return future

    def _counted(self, decision: Decision) -> Collection:
        """The collection whose pushes ``decision`` counts. Raises StepMismatchError if the decision came too early or
        counts other attempts than were collected."""
        collection = self._step.collection
        if decision.step > self._step.number or collection is None:
            raise StepMismatchError(
                f"{self._who} is in step {self._step.number} ({'collected' if collection else 'not collected'}), "
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
        contributors = self.sums.counted_of(owned, collection)
        if not any(contributors):
            return None
        return ShardWork(
            version=decision.step + 1,
            gradients=self.sums.gradients(owned) if owned.total is None else (owned.total,),
            contributors=contributors,
            scale=decision.scale,
            limit=decision.limit,
            hyper=decision.hyper,
        )

    def release(self, owned: OwnedShard) -> None:
        """The decision's update has read the shard's gradients: ranks may write there again."""
        with self._step.lock:
            self._to_be_read[owned.shard.index] -= 1
            for rank in self._step.ranks.values():
                landing = rank.landings[owned.shard.index]
                if isinstance(landing, RoundLanding):  # of ranks that have come back, and pushed again what it had
                    self.sums.give_back(rank, landing, landing.pushes.count)
                else:
                    landing.free()
        self.retry(shard=owned.shard.index)

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks with counted pushes that are not there."""
        with self._step.lock:
            return self._step.collection.missing_ranks if self._step.collection is not None else []

    def fail(self, error: StoreError) -> None:
        """The open step will never be decided: everything that waits for it, now or later, fails with the first
        error."""
        with self._step.lock:
            error = self._error = self._error or error
            collection = self._step.collection
        if collection is not None:
            fail(collection.future, error)
        self.retry()

    @property
    def _who(self) -> str:
        return f"optimizer {self._owner}"
