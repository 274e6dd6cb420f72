"""The lead: turns all ranks' reports and inputs into one decision record per step.

::

    finish of all ranks -> collect at every owner -> norm to the ranks
    inputs of all ranks -> they agree -> the record is written (the commit point) -> apply at every owner
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial, wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from rayzero.checkpoint.reader import CheckpointReader
from rayzero.checkpoint.writer import discard_staging
from rayzero.concurrency.futures import DONE, DeferringLock, fail, failed, future_raises, settle, settled, when_all
from rayzero.errors import RayZeroError, StepMismatchError, StoreClosedError, StoreError
from rayzero.lead.attempt import (
    Attempt,
    CallsAhead,
    Hearing,
    OwnerPeer,
    Pass,
    attempts_of,
    have,
    open_steps,
    owing,
    writes_made,
)
from rayzero.lead.checkpoints import CheckpointRequest, CheckpointRequests
from rayzero.lead.decide import (
    DecisionJournal,
    RecordKeeper,
    agreed,
    check_hyper,
    clipped_unlike,
    decide,
    impasse,
    nonfinite_error,
    rank_left,
    tell_decision,
    total_norm,
)
from rayzero.lead.requests import Means, WriteRequests
from rayzero.protocol.messages import (
    CheckpointInfo,
    Decision,
    FileEntry,
    FinishReport,
    Hyper,
    LeadHistory,
    MeanInput,
    ModelSpec,
    Norm,
    NormParts,
    Record,
    StepInputs,
    Write,
)
from rayzero.telemetry.recorder import NullRecorder, Recorder

T = TypeVar("T")
P = ParamSpec("P")


def _answering(call: Callable[Concatenate[StepLead, P], Future[T]]) -> Callable[Concatenate[StepLead, P], Future[T]]:
    """A call of a rank, made under the lock: what it raises is its answer."""

    @future_raises
    @wraps(call)
    def answered(lead: StepLead, /, *args: P.args, **named: P.kwargs) -> Future[T]:
        with lead._lock:
            return call(lead, *args, **named)

    return answered


class StepLead:
    """Decides each step exactly once, and keeps the latest decisions.

    Knows when a step can advance, and owners as peers; no shard, gradient or transport, nor which steps can never be
    decided (``impasse``). Thread-safe: settles no future and calls no peer under its lock."""

    def __init__(
        self,
        peers: Sequence[OwnerPeer],
        keeper: RecordKeeper | None = None,
        recorder: Recorder | None = None,
        *,
        doors: Collection[int] = (),
    ) -> None:
        """``peers``: every owner, by index. ``keeper``: see ``DecisionJournal``. ``doors``: owners without shards,
        which have no part in a step, and only hear of its failure."""
        self._peers = list(peers)
        self._owners = [peer for owner, peer in enumerate(peers) if owner not in doors]
        self._lock = DeferringLock()
        self._spec: ModelSpec | None = None
        self._left: dict[int, str] = {}  # rank -> reason
        self._dead: set[int] = set()  # ranks that are being replaced
        self._catching_up: set[int] = set()  # owners whose successors redo what is recorded
        self._attempt = Attempt(0)
        self._next: Attempt | None = None  # reports for the next attempt, from ranks that discarded before others did
        self._journal = DecisionJournal(keeper)
        self._ahead = CallsAhead()
        self._hearing = Hearing()
        self._telling: list[Future[Decision]] | None = None  # commits of the decision that is being sent to owners:
        # they cannot collect the next step until all of them have it
        self._acks: tuple[Future[None], ...] = ()  # owners, by index, that the last decision was sent to
        self._recorder = recorder or NullRecorder()
        self._checkpoints = CheckpointRequests(self._owners, self._recorder)
        self._writes = WriteRequests()
        self._means = Means()
        self._failure: StoreError | None = None
        self._held: Future[int] | None = None  # see hold(); None: the lead goes on

    # ---- membership

    def attach(
        self,
        rank: int,
        spec: ModelSpec,
        version: int = 0,
        history: LeadHistory | None = None,
        *,
        succeeds: bool = False,
    ) -> int:
        """A rank has shaken hands with every owner. ``version``: the version that they start at. The first one makes
        owners act again on what a former life of the lead recorded, before a step is collected. ``history``: of the
        rank with that life; ``succeeds``: there was one. Calls then wait for every rank's. Returns the step
        that is open, with which a rank that comes back begins."""
        with self._lock:
            if self._spec is None:
                records = self._journal.restore()
                self._spec = spec
                self._attempt = Attempt(max([version, *(record.decision.step + 1 for record in records)]))
                if records:
                    self._telling = []
                    self._lock.defer(self._redo, records)
            self._dead.discard(rank)
            self._hearing.meet(rank, history, succeeds=succeeds)
            self._end_hearing()
            self._check_left()
            return self._attempt.step

    def _end_hearing(self) -> None:
        """Once every rank has been heard, go on from what a former life of the lead knew, and take their calls."""
        assert self._spec is not None
        histories = self._hearing.end(self._spec.world_size, self._left)
        if histories is None:
            return
        steps = open_steps(self._attempt.step, histories)
        self._attempt, self._next = attempts_of(self._attempt.step, steps)
        for asked in self._attempt.passes:
            if asked.norm is not None:
                for future in asked.norms.values():
                    self._answer(future, asked.norm, self._nonfinite(self._attempt))
        self._writes.go_on(self._attempt.step, *writes_made(steps))
        self._means.go_on({rank: each.means for rank, each in histories.items()})
        self._end_means()
        everyone = range(self._spec.world_size)
        self._checkpoints.go_on(
            {rank: histories[rank].saved if rank in histories else None for rank in everyone},
            {rank: histories[rank].begun if rank in histories else None for rank in everyone},
        )
        for call in self._ahead.take_all():
            self._lock.defer(call)
        self._advance()

    def lose(self, rank: int) -> None:
        """A rank has died and will come back: the others wait for it. What it asked for and is not decided or made yet
        counts no more, because it will ask again."""
        with self._lock:
            self._dead.add(rank)
            self._hearing.forget(rank)
            for each in (self._attempt, *([self._next] if self._next is not None else ())):
                each.forget(rank)
            self._ahead.forget(rank)
            self._writes.forget(rank)
            self._means.forget(rank)
            self._checkpoints.forget(rank)

    def _redo(self, records: Sequence[Record]) -> None:
        """Let every owner act on recorded decisions, in their order."""
        first, *rest = records
        acks = self._acks = tuple(peer.redo(first) for peer in self._owners)
        then = partial(self._redo, rest) if rest else partial(self._tell_ranks, first.decision, None)
        when_all(acks, lambda _: then(), self._peer_failed)

    def succeeded(self, owner: int) -> list[Record]:
        """An owner has a successor, which redoes what this returns, by step, before ``caught_up``. No step is decided
        until then: the successor does not know what its predecessor has collected."""
        with self._lock:
            self._catching_up.add(owner)
            return self._journal.records

    def caught_up(self, owner: int) -> None:
        """A successor has redone the recorded decisions: collect the open step there, if it was collected."""
        with self._lock:
            current = self._attempt
            asked = [each for each in current.passes if each.asked]
            if not asked:
                self._lock.defer(self._collected_again, owner)
                return
            reports = tuple(asked[-1].reports[rank] for rank in sorted(asked[-1].reports))

            def ask() -> None:
                again = self._peers[owner].collect(current.step, reports)
                when_all([again], lambda _: self._collected_again(owner), self._peer_failed)

            self._lock.defer(ask)

    def _collected_again(self, owner: int) -> None:
        with self._lock:
            self._catching_up.discard(owner)
            self._advance()

    def leave(self, rank: int, reason: str) -> None:
        """A rank has left. A step for which it has delivered everything is still decided; the others' next one
        fails."""
        with self._lock:
            self._left.setdefault(rank, reason)
            if self._spec is not None:
                self._end_hearing()
            self._check_left()
            self._end_means()

    def _check_left(self) -> None:
        """Fail the open step if it waits for a rank that has left."""
        error = rank_left(self._attempt, self._left, self._writes.ranks) if self._failure is None else None
        if error is not None:
            self._fail(error)

    # ---- a step

    @_answering
    def finish(self, report: FinishReport, inputs: StepInputs | None) -> Future[Norm]:
        """A rank has pushed all that its report counts; with ``inputs`` it also commits. Done when the norm is
        known."""
        if (known := self._journal.find(report.step)) is not None and known.counts(report):
            return settled(known.norm)  # asked again, after the lead's former life had decided
        if self._must_wait(report.rank, report.step):
            return self._ahead.wait(report.rank, report.step, lambda: self.finish(report, inputs))
        current = self._attempt_of(report)
        asked = self._pass_of(current, report)
        if report.rank in asked.reports:
            return asked.norms[report.rank]
        self._check_inputs(current, inputs)
        asked.reports[report.rank] = report
        future = asked.norms[report.rank] = Future[Norm]()
        if inputs is not None:
            current.commit(report.rank, inputs)
        if asked.norm is not None:  # a rank that has come back: the others have had this norm
            self._answer(future, asked.norm, self._nonfinite(current))
        self._advance()
        return future

    def _must_wait(self, rank: int, step: int) -> bool:
        """True if a call has to wait: all do until every rank has been heard, and so does that of a rank that has
        committed the open step and is already in a later one, because it used no parameters."""
        if self._failure is not None:
            return False
        return self._pauses or (step > self._attempt.step and rank in self._attempt.inputs)

    @property
    def _pauses(self) -> bool:
        """Whether all calls of ranks wait."""
        return self._hearing.lasts or self._held is not None

    def _open_attempt(self, step: int) -> None:
        self._attempt = Attempt(step)
        for call in self._ahead.take(step):
            self._lock.defer(call)

    def _attempt_of(self, report: FinishReport) -> Attempt:
        """The attempt that a report belongs to. Raises StepMismatchError, naming the ranks, if it belongs to another
        step."""
        self._check_open(report.step, report.rank)
        if report.rank not in self._attempt.discarded:
            return self._attempt
        if report.attempt <= self._attempt.discarded[report.rank]:
            raise StepMismatchError(
                f"rank {report.rank} finished attempt {report.attempt} of step {report.step}, which it discarded"
            )
        if self._next is None:
            self._next = Attempt(report.step)
        return self._next

    def _check_attached(self, rank: int) -> None:
        """Raise what the run has failed with, or StoreError for a rank that has not attached."""
        if self._failure is not None:
            raise self._failure
        if self._spec is None or rank not in range(self._spec.world_size):
            raise StoreError(f"rank {rank} has not attached")

    def _check_open(self, step: int, rank: int) -> None:
        self._check_attached(rank)
        if step != self._attempt.step:
            error = StepMismatchError(
                f"rank {rank} is in step {step}, but step {self._attempt.step} is not decided yet: "
                f"{self._waits_for()}; every rank must take the same steps"
                if step > self._attempt.step
                else f"rank {rank} is in step {step}, but step {self._attempt.step - 1} is decided already"
            )
            self._fail(error)
            raise error

    def _pass_of(self, current: Attempt, report: FinishReport) -> Pass:
        """The pass that a report belongs to. Raises StepMismatchError; ranks that clip differently fail the step for
        all."""
        asked = current.pass_of(report)
        error = clipped_unlike(asked, report)
        if error is not None:
            self._fail(error)
            raise error
        return asked

    @_answering
    def commit(self, rank: int, step: int, inputs: StepInputs) -> Future[Decision]:
        """A rank commits the step after a finish without inputs."""
        if (known := self._journal.decision(step)) is not None:
            return settled(known)
        if self._must_wait(rank, step):
            return self._ahead.wait(rank, step, lambda: self.commit(rank, step, inputs))
        self._check_open(step, rank)
        current = self._next if rank in self._attempt.discarded and self._next else self._attempt
        if rank not in current.reports:
            raise StepMismatchError(f"rank {rank} committed step {step} before its finish")
        self._check_inputs(current, inputs)
        current.commit(rank, inputs)
        future = current.commits.setdefault(rank, Future())
        self._advance()
        return future

    def _check_inputs(self, current: Attempt, inputs: StepInputs | None) -> None:
        assert self._spec is not None
        if inputs is not None and inputs.digest not in current.digests:  # else another rank's were checked
            check_hyper(self._spec, inputs.hyper)

    @_answering
    def discard(self, rank: int, step: int, attempt: int) -> Future[None]:
        """A rank discards its finish. Once all ranks have, the step is open again; if a rank commits instead, it fails
        for all."""
        if self._must_wait(rank, step):
            return self._ahead.wait(rank, step, lambda: self.discard(rank, step, attempt))
        self._check_open(step, rank)
        report = self._attempt.reports.get(rank)
        if report is None or report.attempt != attempt or rank in self._attempt.inputs:
            raise StepMismatchError(f"rank {rank} discards attempt {attempt} of step {step}, not finished so")
        if self._attempt.norm is None:
            raise StepMismatchError(f"rank {rank} discards step {step} before it has its norm")
        self._attempt.discarded[rank] = attempt
        self._advance()
        return settled(None)

    # ---- writes

    @_answering
    def write(self, rank: int, write: Write) -> Future[None]:
        """A rank requests a write to a unit, before its commit. Once all ranks have requested the same write, owners
        make it; different requests fail the step for all."""
        if self._must_wait(rank, write.version):
            return self._ahead.wait(rank, write.version, lambda: self.write(rank, write))
        self._check_open(write.version, rank)
        assert self._spec is not None
        try:
            if rank in self._attempt.inputs:
                raise StepMismatchError(f"rank {rank} writes at step {write.version}, which it has committed")
            future = self._writes.ask(rank, write, self._spec.layout)
        except StepMismatchError as exc:
            self._fail(exc)
            raise
        self._advance()
        return future

    @_answering
    def know_write(self, rank: int, write: Write) -> Future[None]:
        """A rank that has come back has found a write published that it would have asked for: it is made. If the lead
        that made it has died, others may still wait for its answer. Done when it is known."""
        if self._must_wait(rank, write.version):
            return self._ahead.wait(rank, write.version, lambda: self.know_write(rank, write))
        self._check_open(write.version, rank)
        for future in self._writes.know(rank, write):
            self._lock.defer(settle, future, None)
        self._advance()
        return DONE

    def _begin_write(self) -> None:
        """Make the owners do the write that all ranks have requested; they must have the last decision first."""
        assert self._spec is not None
        begun = self._writes.begin(self._spec.world_size) if self._telling is None else None
        if begun is not None:

            def ask() -> None:
                answers = tuple(peer.write(*begun) for peer in self._owners)
                self._writes.sent(answers)
                when_all(answers, lambda _: self._write_made(), self._peer_failed)

            self._lock.defer(ask)

    def _write_made(self) -> None:
        with self._lock:
            for future in self._writes.end():
                self._lock.defer(settle, future, None)
            self._advance()

    # ---- the state machine

    def _advance(self) -> None:
        """Do everything that has become possible; called after every event."""
        if self._spec is None or self._failure is not None or self._hearing.lasts:
            return
        if self._held is not None:
            self._look_held(self._held)
            return
        current, everyone = self._attempt, self._spec.world_size
        never = impasse(current, self._checkpoints.asked(), self._writes, self._means, self._spec)
        self._begin_write()
        if never is not None:
            self._fail(never)
        elif len(current.discarded) == everyone:
            self._attempt, self._next = self._next or Attempt(current.step), None
            self._advance()
        elif len(current.digests) > 1 and not self._agree(current):
            return
        elif len(current.to_collect.reports) == everyone and current.to_collect.parts is None:
            if self._telling is not None or (current.discarded and current.norm is not None):
                return  # what a rank has discarded may be gone from its memory, and its norm is known
            asked = current.to_collect
            asked.parts = ()
            self._collect(current, asked)
        elif len(current.inputs) == everyone and current.is_collected and not self._is_held(current.step):
            self._decide(current)
        else:
            self._check_left()

    def _is_held(self, step: int) -> bool:
        """Whether the step must wait because its version is still being saved or written to."""
        return self._checkpoints.holds(step) or bool(self._writes.ranks) or bool(self._catching_up)

    def _agree(self, current: Attempt) -> bool:
        try:
            agreed(current.step, current.inputs)
        except StepMismatchError as exc:
            self._fail(exc)
            return False
        return True

    def _collect(self, current: Attempt, asked: Pass) -> None:
        reports = tuple(asked.reports[rank] for rank in sorted(asked.reports))

        def ask() -> None:
            answers = tuple(peer.collect(current.step, reports) for peer in self._owners)
            with self._lock:
                if tuple(asked.reports[rank] for rank in sorted(asked.reports)) != reports:
                    return  # a rank has died since: it is asked again with what the rank reports then
                asked.asked = answers
            mine = partial(self._awaits, current, asked, answers)
            when_all(answers, partial(self._take_parts, current, asked, mine), partial(self._no_parts, mine))

        self._lock.defer(ask)

    def _awaits(self, current: Attempt, asked: Pass, answers: tuple[Future[NormParts], ...]) -> bool:
        """Whether the open attempt still waits for these answers: no rank has died, not all have discarded since."""
        return current is self._attempt and asked.asked is answers

    def _no_parts(self, wanted: Callable[[], bool], error: BaseException) -> None:
        with self._lock:
            if wanted():
                self._peer_failed(error)

    def _take_parts(self, current: Attempt, asked: Pass, wanted: Callable[[], bool], parts: list[NormParts]) -> None:
        with self._lock:
            if self._failure is not None or not wanted():
                return
            assert self._spec is not None
            asked.parts = tuple(parts)
            averaged_over = self._spec.world_size if asked is current.passes[0] else 1
            asked.norm = total_norm(current.step, parts, averaged_over)
            error = self._nonfinite(current)
            for future in asked.norms.values():
                self._answer(future, asked.norm, error)
            self._advance()

    def _answer(self, future: Future[T], value: T, error: RayZeroError | None) -> None:
        """Settle a future once the lock is free."""
        if error is None:
            self._lock.defer(settle, future, value)
        else:
            self._lock.defer(fail, future, error)

    def _nonfinite(self, current: Attempt) -> RayZeroError | None:
        assert self._spec is not None
        assert current.norm is not None
        if current.norm.finite or self._spec.nonfinite != "raise":
            return None
        return nonfinite_error(current.step, current.passes[0].parts or (), self._spec.layout)

    def _decide(self, current: Attempt) -> None:
        """Write the record, which is the commit point; only then send the decision to owners and ranks."""
        assert self._spec is not None
        assert current.norm is not None
        inputs = agreed(current.step, current.inputs)
        norms = [each.norm for each in current.passes if each.norm is not None]
        decision = decide(norms, current.reports, inputs, self._spec.world_size)
        self._journal.write(
            Record(
                decision=decision,
                reports=tuple(current.reports[rank] for rank in sorted(current.reports)),
                norm=norms[-1],
            )
        )
        tell_decision(self._recorder, decision, inputs.edits, self._spec.world_size)
        self._telling = list(current.commits.values())
        self._open_attempt(decision.step + 1)
        error = self._nonfinite(current)

        def tell() -> None:
            acks = self._acks = tuple(peer.apply(decision) for peer in self._owners)
            when_all(acks, lambda _: self._tell_ranks(decision, error), self._peer_failed)

        self._lock.defer(tell)
        self._begin_checkpoint()  # ranks may have asked for this version before

    def _tell_ranks(self, decision: Decision, error: RayZeroError | None) -> None:
        with self._lock:
            commits, self._telling = self._telling or [], None
            for commit in commits:
                self._answer(commit, decision, error)
            for waiting in self._journal.take_waiting(decision.step):
                self._answer(waiting, decision, None)
            self._advance()

    def decision(self, step: int) -> Future[Decision]:
        """A future of the decision of ``step``, done once it is recorded."""
        with self._lock:
            if (known := self._journal.decision(step)) is not None:
                return settled(known)
            if step < self._attempt.step:
                return failed(StoreError(f"the decision of step {step} is no longer kept"))
            if self._failure is not None:
                return failed(self._failure)
            return self._journal.wait(step)

    # ---- checkpoints

    @_answering
    def begin_save(self, rank: int, step: int, directory: Path, files: tuple[FileEntry, ...]) -> Future[None]:
        """A rank requests a checkpoint of version ``step`` and waits only until it has begun: all ranks have asked, and
        owners keep the version whatever is decided later. ``save(..., begun=True)`` then has its end."""
        if self._failure is not None:
            raise self._failure
        if self._pauses:
            return self._ahead.wait(rank, step, lambda: self.begin_save(rank, step, directory, files))
        if self._checkpoints.has_begun(rank, step, directory) or self._made_again(rank, step, directory):
            return settled(None)
        request, _ = self._request_save(rank, step, directory, files)
        begun = request.begins.setdefault(rank, Future())
        self._begin_checkpoint()
        self._advance()
        return begun

    @_answering
    def save(
        self, rank: int, step: int, directory: Path, files: tuple[FileEntry, ...], *, begun: bool = False
    ) -> Future[CheckpointInfo]:
        """A rank requests a checkpoint of version ``step``, or the end of one that it has ``begun``. Once all ranks
        have, owners write, and the next decision waits for them. A checkpoint that cannot be written fails its callers,
        not the run."""
        if self._failure is not None:
            raise self._failure
        if self._hearing.lasts or (self._held is not None and not begun):  # else the change waits for its end
            again = partial(self.save, rank, step, directory, files, begun=begun)
            return self._ahead.wait(rank, step, again)
        if (ended := self._checkpoints.owed(rank, step, directory)) is not None:
            return settled(ended) if isinstance(ended, CheckpointInfo) else failed(ended)
        if begun:
            return self._checkpoints.end_of(rank, step, directory, files)
        if (made := self._made_again(rank, step, directory)) is not None:
            return settled(made)
        _, future = self._request_save(rank, step, directory, files)
        self._begin_checkpoint()
        self._advance()
        return future

    def _made_again(self, rank: int, step: int, directory: Path) -> CheckpointInfo | None:
        """The checkpoint that a rank which has come back asks for, if it was made meanwhile."""
        made = self._checkpoints.made_again(rank, step, directory)
        if made is not None:
            self._lock.defer(discard_staging, directory)
        return made

    def _request_save(
        self, rank: int, step: int, directory: Path, files: tuple[FileEntry, ...]
    ) -> tuple[CheckpointRequest, Future[CheckpointInfo]]:
        if step < self._attempt.step:
            raise StepMismatchError(f"rank {rank} saves v{step}, but step {self._attempt.step - 1} is decided")
        return self._checkpoints.ask(rank, step, directory, files)

    def _begin_checkpoint(self) -> None:
        """Let owners write the checkpoint that all ranks have requested, one at a time."""
        assert self._spec is not None
        request = self._checkpoints.complete(self._spec.world_size, self._attempt.step)
        if request is not None:
            self._lock.defer(self._checkpoints.write, request, self._spec, self._hyper_at, self._checkpoint_over)

    def _hyper_at(self, version: int) -> tuple[Hyper, ...]:
        """The hyper-parameters that made ``version``; before the first decision, those that the run started with."""
        assert self._spec is not None
        last = self._journal.decision(version - 1)
        if last is not None:
            return last.hyper
        if self._spec.restore_from is None:
            return self._spec.hyper
        with CheckpointReader(self._spec.restore_from) as reader:
            return reader.hyper

    def _checkpoint_over(self) -> None:
        """Owners have written, or keep the version, or have failed: decisions may continue, and so may the next
        checkpoint."""
        with self._lock:
            if self._failure is None and self._held is None:
                self._begin_checkpoint()
            self._advance()

    # ---- means over ranks

    @_answering
    def mean(self, rank: int, number: int, given: MeanInput) -> Future[tuple[float, ...]]:
        """A rank's ``number``th mean, counted from 1. Done when all ranks have requested it; waits for no step. An
        error in a mean fails the ranks that request it, not the run."""
        self._check_attached(rank)
        if self._pauses:
            return self._ahead.wait(rank, 0, lambda: self.mean(rank, number, given))
        future = self._means.ask(rank, number, given)
        self._end_means()
        self._advance()
        return future

    @_answering
    def know_mean(self, rank: int, number: int, given: MeanInput) -> Future[None]:
        """What a rank's former life gave to its ``number``th mean: if the lead that made the mean has died, too, others
        may still wait for it. Done when it is known; the rank does not wait for the mean."""
        self._check_attached(rank)
        if self._pauses:
            return self._ahead.wait(rank, 0, lambda: self.know_mean(rank, number, given))
        self._means.know(rank, number, given)
        self._end_means()
        return DONE

    def _end_means(self) -> None:
        if self._spec is not None:
            for future, outcome in self._means.end(self._spec.world_size, self._left):
                self._lock.defer(fail if isinstance(outcome, RayZeroError) else settle, future, outcome)

    # ---- between two epochs

    def hold(self) -> Future[int]:
        """Decide nothing more, make no write and begin no checkpoint: the owners are to change. The future has the step
        that stays open, once nothing that was begun is under way. Calls of ranks wait for ``release``, or for
        ``retire`` and their repetition at another lead. Idempotent."""
        with self._lock:
            if self._failure is not None:
                return failed(self._failure)
            if self._spec is None:
                return failed(StoreError("no rank has attached yet, so there is nothing to hold"))
            held = self._held = self._held or Future()
            self._advance()
            return held

    def _look_held(self, held: Future[int]) -> None:
        begun = self._telling is not None or self._writes.making or self._checkpoints.writing
        if not begun and not self._catching_up:
            self._lock.defer(settle, held, self._attempt.step)

    def release(self) -> None:
        """Go on after ``hold``: the owners stay as they are. Idempotent."""
        with self._lock:
            if self._held is not None:
                self._lock.defer(fail, self._held, StoreError("the optimizers stay as they are"))
            self._held = None
            for call in self._ahead.take_all():
                self._lock.defer(call)
            if self._spec is not None:
                self._begin_checkpoint()
            self._advance()

    def retire(self, error: StoreError) -> None:
        """Another lead goes on from here, after ``hold``: everything that waits fails with ``error`` and is asked
        there. The owners do not hear of it. Returns once a checkpoint that was written is committed."""
        with self._lock:
            self._end(error)
            self._lock.defer(self._checkpoints.retire, error)
        self._checkpoints.close()

    # ---- failures and the end

    def owner_failed(self, error: StoreError) -> None:
        """An owner has failed, or its process has died: nothing that it was to do will be done."""
        self._peer_failed(error)

    def _peer_failed(self, error: BaseException) -> None:
        with self._lock:
            self._fail(error if isinstance(error, StoreError) else StoreError(f"an owner failed: {error!r}"))

    def _fail(self, error: StoreError) -> None:
        """The open step will never be decided: fail everything that waits for it, here and at the owners."""
        if self._failure is not None:
            return
        self._end(error)
        self._lock.defer(self._checkpoints.abandon, error)
        for peer in self._peers:
            self._lock.defer(peer.abort, error)

    def _end(self, error: StoreError) -> None:
        """Fail everything that waits here, now and later, but for checkpoints."""
        self._failure = error
        if self._held is not None:
            self._lock.defer(fail, self._held, error)
        waiting = [*self._attempt.futures, *(self._next.futures if self._next else []), *(self._telling or [])]
        for future in (*waiting, *self._writes.end(), *self._means.end_all(), *self._journal.take_all()):
            self._lock.defer(fail, future, error)
        for call in self._ahead.take_all():  # they will see the failure
            self._lock.defer(call)

    def describe(self) -> str:
        """The ranks or owners that the lead waits for, for errors about waits."""
        with self._lock:
            said = self._waits_for()
        return "; ".join([said, *filter(None, (peer.trouble() for peer in self._peers))])

    def _waits_for(self) -> str:
        if not self._dead:
            return self._waits_for_living()
        who = " and ".join(f"rank {rank}" for rank in sorted(self._dead))
        return f"{who} died and {'is' if len(self._dead) == 1 else 'are'} being replaced; {self._waits_for_living()}"

    def _waits_for_living(self) -> str:
        if self._spec is None:
            return "no rank has attached"
        if self._hearing.lasts:
            missing = self._hearing.missing(self._spec.world_size, self._left)
            return f"{have(missing)} not said how far it was with the lead that died"
        if self._held is not None:
            return f"the optimizers change before step {self._attempt.step} is decided"
        if self._telling is not None:
            return f"{owing(self._acks)} not accepted the decision of step {self._attempt.step - 1}"
        if (ranks := self._means.waits_for(self._spec.world_size)) is not None:  # ranks that wait there do nothing else
            return ranks
        if self._checkpoints.holds(self._attempt.step):  # until it is written, the ranks that asked do nothing else
            return f"v{self._attempt.step} is being saved: {self._checkpoints.waits_for(self._spec.world_size)}"
        if self._writes.ranks:
            return self._writes.waits_for(self._spec.layout, self._spec.world_size)
        return self._attempt.waits_for(self._spec.world_size)

    def close(self) -> None:
        """Fail everything that waits, and finish the checkpoint that is being committed. Idempotent."""
        with self._lock:
            self._fail(StoreClosedError("the store was closed"))
        self._checkpoints.close()
