"""The lead owner's part: from all ranks' reports and inputs to one decision record.

::

    finish of all ranks -> collect at every owner -> norm to the ranks
    inputs of all ranks -> they agree -> the record is written (the commit point) -> apply at every owner
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rayzero.checkpoint.reader import CheckpointReader
from rayzero.errors import RankLeftError, RayZeroError, StepMismatchError, StoreClosedError, StoreError
from rayzero.messages import (
    CheckpointInfo,
    Decision,
    FileEntry,
    FinishReport,
    Hyper,
    ModelSpec,
    Norm,
    NormParts,
    StepInputs,
    Write,
)
from rayzero.optimizer.decide import agreed, decide, nonfinite_error, total_norm
from rayzero.optimizer.futures import chain, fail, failed, settle, settled, when_all
from rayzero.optimizer.measures import tell_decision
from rayzero.optimizer.peers import OwnerPeer
from rayzero.optimizer.rules import check_hyper
from rayzero.optimizer.saves import SaveRequests, have
from rayzero.optimizer.writes import WriteRequests
from rayzero.telemetry.recorder import NullRecorder, Recorder

T = TypeVar("T")

_RECORDS = 8  # decisions kept for those who ask


@dataclass(eq=False)
class _Pass:
    """One norm that all ranks ask for: first that of the averaged gradients, then of what clipping by value left."""

    reports: dict[int, FinishReport] = field(default_factory=dict)
    norms: dict[int, Future[Norm]] = field(default_factory=dict)  # each rank's finish
    parts: tuple[NormParts, ...] | None = None
    norm: Norm | None = None


@dataclass(eq=False)
class _Round:
    """One try at one step: until it is decided, or every rank has discarded it."""

    step: int
    passes: list[_Pass] = field(default_factory=lambda: [_Pass()])  # at most the last one is not answered yet
    inputs: dict[int, StepInputs] = field(default_factory=dict)
    commits: dict[int, Future[Decision]] = field(default_factory=dict)  # each rank's commit
    discarded: dict[int, int] = field(default_factory=dict)  # rank -> attempt

    @property
    def reports(self) -> dict[int, FinishReport]:
        """What each rank pushed."""
        return self.passes[0].reports

    @property
    def norm(self) -> Norm | None:
        """That of the averaged gradients."""
        return self.passes[0].norm

    @property
    def gone_on(self) -> set[int]:
        """Ranks that committed or discarded while others wait for their part of the last pass."""
        return (
            (set(self.inputs) | set(self.discarded)) - set(self.passes[-1].reports) if len(self.passes) > 1 else set()
        )


class StepLead:
    """Decides each step, once, and remembers what was decided.

    Knows ranks' reports and inputs, and owners as peers; no shard, gradient or transport. Thread-safe: no future is
    settled and no peer is called under its lock."""

    def __init__(
        self,
        peers: Sequence[OwnerPeer],
        record: Callable[[Decision], None] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """``peers``: every owner, by index. ``record`` keeps each decision where it outlives this process."""
        self._record = record
        self._peers = list(peers)
        self._lock = threading.RLock()
        self._todo: deque[Callable[[], Any]] = deque()  # what to do once the lock is free, in order
        self._spec: ModelSpec | None = None
        self._attached: set[int] = set()
        self._left: dict[int, str] = {}
        self._round = _Round(0)
        self._next: _Round | None = None  # reports for the next try, of ranks that discarded before others did
        self._records: dict[int, Decision] = {}
        self._askers: dict[int, list[Future[Decision]]] = {}
        self._early: list[tuple[int, Callable[[], None]]] = []  # (step, call) of ranks that are a step ahead
        self._telling: list[Future[Decision]] | None = None  # commits of the decision that owners are being told:
        # until all of them know it, they cannot collect the next step
        self._recorder = recorder or NullRecorder()
        self._saves = SaveRequests(self._peers, self._recorder)
        self._writes = WriteRequests()
        self._failure: StoreError | None = None

    # ---- membership

    def attach(self, rank: int, spec: ModelSpec, version: int = 0) -> None:
        """A rank has shaken hands with every owner; ``version`` is what they start at."""
        with self._locked():
            if self._spec is None:
                self._spec, self._round = spec, _Round(version)
            self._attached.add(rank)
            self._check_left()

    def leave(self, rank: int, reason: str) -> None:
        """A rank goes. A step it has delivered everything for is still decided; the others' next one fails."""
        with self._locked():
            self._left.setdefault(rank, reason)
            self._check_left()

    def _check_left(self) -> None:
        """Fail the open step if it can never be decided and somebody has finished it, or waits in a write. A rank that
        has not may still be reading the last decided version, and be about to leave too."""
        waited = {r for r in self._left if r not in self._round.inputs and r not in self._round.discarded}
        others = (self._round.reports.keys() | self._writes.ranks) - set(self._left)
        if waited and others and self._failure is None:
            self._fail(self._left_error(min(waited), min(others)))

    def _left_error(self, gone: int, other: int) -> RankLeftError:
        step = self._round.step
        after = f"after step {step - 1}" if step else "before the first step"
        return RankLeftError(
            f"rank {gone} left {after} ({self._left[gone]}), rank {other} is in step {step}; "
            "every rank must take the same number of steps"
        )

    # ---- a step

    def finish(self, report: FinishReport, inputs: StepInputs | None) -> Future[Norm]:
        """A rank has pushed all it counted; with ``inputs`` it commits too. Done when the norm is known."""
        try:
            with self._locked():
                if self._is_ahead(report.rank, report.step):
                    return self._later(report.step, lambda: self.finish(report, inputs))
                current = self._round_of(report)
                asked = self._pass_of(current, report)
                if report.rank in asked.reports:
                    return asked.norms[report.rank]
                self._check_inputs(inputs)
                asked.reports[report.rank] = report
                future = asked.norms[report.rank] = Future[Norm]()
                if inputs is not None:
                    current.inputs[report.rank] = inputs
                self._advance()
                return future
        except RayZeroError as exc:
            return failed(exc)

    def _is_ahead(self, rank: int, step: int) -> bool:
        """True when a rank has committed the open step and is already in a later one: it used no parameters."""
        return self._failure is None and step > self._round.step and rank in self._round.inputs

    def _later(self, step: int, call: Callable[[], Future[T]]) -> Future[T]:
        """Make the call when ``step`` opens."""
        future: Future[T] = Future()
        self._early.append((step, lambda: chain(call(), future)))
        return future

    def _open_round(self, step: int) -> None:
        self._round = _Round(step)
        ready = [call for at, call in self._early if at <= step]
        self._early = [(at, call) for at, call in self._early if at > step]
        self._todo += ready

    def _round_of(self, report: FinishReport) -> _Round:
        """The round a report belongs to. Raises StepMismatchError naming the ranks that are elsewhere."""
        self._check_open(report.step, report.rank)
        if report.rank not in self._round.discarded:
            return self._round
        if report.attempt <= self._round.discarded[report.rank]:
            raise StepMismatchError(
                f"rank {report.rank} finished attempt {report.attempt} of step {report.step}, which it discarded"
            )
        if self._next is None:
            self._next = _Round(report.step)
        return self._next

    def _check_open(self, step: int, rank: int) -> None:
        if self._failure is not None:
            raise self._failure
        if self._spec is None or rank not in range(self._spec.world_size):
            raise StoreError(f"rank {rank} has not attached")
        if step != self._round.step:
            error = StepMismatchError(
                f"rank {rank} is in step {step}, but step {self._round.step} is not decided yet: "
                f"{self._waits_for()}; every rank must take the same steps"
                if step > self._round.step
                else f"rank {rank} is in step {step}, but step {self._round.step - 1} is decided already"
            )
            self._fail(error)
            raise error

    def _pass_of(self, current: _Round, report: FinishReport) -> _Pass:
        """The pass a report belongs to: the one it repeats, or the rank's next. Raises StepMismatchError."""
        mine = [each for each in current.passes if report.rank in each.reports]
        if any(each.reports[report.rank] == report for each in mine):
            return next(each for each in mine if each.reports[report.rank] == report)
        if mine and (report.clamp is None or replace(mine[0].reports[report.rank], clamp=report.clamp) != report):
            raise StepMismatchError(
                f"rank {report.rank} finished step {report.step} twice with different counts; a backward between "
                "clip_grad_norm_() and step() cannot be represented: call zero_grad() first"
            )
        if len(mine) == len(current.passes):
            current.passes.append(_Pass())
        found = current.passes[len(mine)]
        for other in found.reports.values():
            if other.clamp != report.clamp:
                error = StepMismatchError(
                    f"step {report.step} was not decided: ranks {other.rank} and {report.rank} clip different "
                    f"gradients by norm: {other.clamp} against {report.clamp}; every rank must clip alike"
                )
                self._fail(error)
                raise error
        return found

    def commit(self, rank: int, step: int, inputs: StepInputs) -> Future[Decision]:
        """A rank wants the step decided, after a finish without inputs."""
        try:
            with self._locked():
                if step in self._records:
                    return settled(self._records[step])
                if self._is_ahead(rank, step):
                    return self._later(step, lambda: self.commit(rank, step, inputs))
                self._check_open(step, rank)
                current = self._next if rank in self._round.discarded and self._next else self._round
                if rank not in current.reports:
                    raise StepMismatchError(f"rank {rank} committed step {step} before its finish")
                self._check_inputs(inputs)
                current.inputs[rank] = inputs
                future = current.commits.setdefault(rank, Future())
                self._advance()
                return future
        except RayZeroError as exc:
            return failed(exc)

    def _check_inputs(self, inputs: StepInputs | None) -> None:
        assert self._spec is not None
        if inputs is not None:
            check_hyper(self._spec, inputs.hyper)

    def discard(self, rank: int, step: int, attempt: int) -> Future[None]:
        """A rank takes back its finish. Once all ranks have, the step is open again; a rank that commits instead
        fails it for all."""
        try:
            with self._locked():
                self._check_open(step, rank)
                report = self._round.reports.get(rank)
                if report is None or report.attempt != attempt or rank in self._round.inputs:
                    raise StepMismatchError(f"rank {rank} discards attempt {attempt} of step {step}, not finished so")
                if self._round.norm is None:
                    raise StepMismatchError(f"rank {rank} discards step {step} before it has its norm")
                self._round.discarded[rank] = attempt
                self._advance()
                return settled(None)
        except RayZeroError as exc:
            return failed(exc)

    # ---- writes

    def write(self, rank: int, write: Write) -> Future[None]:
        """A rank wants a unit changed, before its commit. Once all ranks have asked for the same, owners do it; ranks
        that differ fail the step for all."""
        try:
            with self._locked():
                if self._is_ahead(rank, write.version):
                    return self._later(write.version, lambda: self.write(rank, write))
                self._check_open(write.version, rank)
                assert self._spec is not None
                try:
                    if rank in self._round.inputs:
                        raise StepMismatchError(f"rank {rank} writes at step {write.version}, which it has committed")
                    future = self._writes.ask(rank, write, self._spec.layout)
                except StepMismatchError as exc:
                    self._fail(exc)
                    raise
                self._advance()
                return future
        except RayZeroError as exc:
            return failed(exc)

    def _begin_write(self) -> None:
        """Have owners make the write that all ranks have asked for; they must know the last decision before."""
        assert self._spec is not None
        begun = self._writes.begin(self._spec.world_size) if self._telling is None else None
        if begun is not None:

            def ask() -> None:
                when_all([peer.write(*begun) for peer in self._peers], lambda _: self._written(), self._peer_failed)

            self._todo.append(ask)

    def _written(self) -> None:
        with self._locked():
            self._todo += [partial(settle, future, None) for future in self._writes.end()]
            self._advance()

    # ---- the state machine

    def _advance(self) -> None:
        """Do what can be done now. Called under the lock, after every event."""
        if self._spec is None or self._failure is not None:
            return
        current, everyone = self._round, self._spec.world_size
        gone_on = self._gone_on_without_saving() or self._gone_on_without_writing()
        self._begin_write()
        if gone_on is not None:
            self._fail(gone_on)
        elif current.discarded and current.inputs:
            self._fail(_torn(current))
        elif current.gone_on:
            self._fail(_left_behind(current))
        elif len(current.discarded) == everyone:
            self._round, self._next = self._next or _Round(current.step), None
            self._advance()
        elif len(current.inputs) > 1 and not self._agree(current):
            return
        elif len(current.passes[-1].reports) == everyone and current.passes[-1].parts is None:
            if self._telling is not None:
                return
            current.passes[-1].parts = ()
            self._collect(current, current.passes[-1])
        elif len(current.inputs) == everyone and current.norm is not None and not self._is_held(current.step):
            self._decide(current)
        else:
            self._check_left()

    def _is_held(self, step: int) -> bool:
        """Whether the version that the step changes is still being saved or written to."""
        return self._saves.holds(step) or bool(self._writes.ranks)

    def _agree(self, current: _Round) -> bool:
        try:
            agreed(current.step, current.inputs)
        except StepMismatchError as exc:
            self._fail(exc)
            return False
        return True

    def _collect(self, current: _Round, asked: _Pass) -> None:
        reports = tuple(asked.reports[rank] for rank in sorted(asked.reports))

        def ask() -> None:
            answers = [peer.collect(current.step, reports) for peer in self._peers]
            when_all(answers, partial(self._take_parts, current, asked), self._peer_failed)

        self._todo.append(ask)

    def _take_parts(self, current: _Round, asked: _Pass, parts: list[NormParts]) -> None:
        with self._locked():
            if current is not self._round or self._failure is not None:
                return
            assert self._spec is not None
            asked.parts = tuple(parts)
            averaged_over = self._spec.world_size if asked is current.passes[0] else 1
            asked.norm = total_norm(current.step, parts, averaged_over)
            error = self._nonfinite(current)
            for future in asked.norms.values():
                self._todo.append(partial(fail, future, error) if error else partial(settle, future, asked.norm))
            self._advance()

    def _nonfinite(self, current: _Round) -> RayZeroError | None:
        assert self._spec is not None
        assert current.norm is not None
        if current.norm.finite or self._spec.nonfinite != "raise":
            return None
        return nonfinite_error(current.step, current.passes[0].parts or (), self._spec.layout)

    def _decide(self, current: _Round) -> None:
        """Write the record, which is the commit point; only then tell owners and ranks."""
        assert self._spec is not None
        assert current.norm is not None
        inputs = agreed(current.step, current.inputs)
        norms = [each.norm for each in current.passes if each.norm is not None]
        decision = decide(norms, current.reports, inputs, self._spec.world_size)
        if self._record is not None:
            self._record(decision)
        tell_decision(self._recorder, decision, inputs.edits, self._spec.world_size)
        self._records[decision.step] = decision
        self._records.pop(decision.step - _RECORDS, None)
        self._telling = list(current.commits.values())
        self._open_round(decision.step + 1)
        error = self._nonfinite(current)

        def tell() -> None:
            acks = [peer.apply(decision) for peer in self._peers]
            when_all(acks, lambda _: self._tell_ranks(decision, error), self._peer_failed)

        self._todo.append(tell)

    def _tell_ranks(self, decision: Decision, error: RayZeroError | None) -> None:
        with self._locked():
            commits, self._telling = self._telling or [], None
            for commit in commits:
                self._todo.append(partial(fail, commit, error) if error else partial(settle, commit, decision))
            for asker in self._askers.pop(decision.step, []):
                self._todo.append(partial(settle, asker, decision))
            self._advance()

    def decision(self, step: int) -> Future[Decision]:
        """What was decided for ``step``, once it is recorded."""
        with self._lock:
            if step in self._records:
                return settled(self._records[step])
            if step < self._round.step:
                return failed(StoreError(f"the decision of step {step} is no longer kept"))
            if self._failure is not None:
                return failed(self._failure)
            future: Future[Decision] = Future()
            self._askers.setdefault(step, []).append(future)
            return future

    # ---- checkpoints

    def save(self, rank: int, step: int, directory: Path, files: tuple[FileEntry, ...]) -> Future[CheckpointInfo]:
        """A rank wants version ``step`` written. When all do, owners write; the next decision waits for them, so
        the content is exactly that version. A checkpoint that cannot be written fails its callers, not the run."""
        try:
            with self._locked():
                if self._failure is not None:
                    raise self._failure
                if step < self._round.step:
                    raise StepMismatchError(f"rank {rank} saves v{step}, but step {self._round.step - 1} is decided")
                assert self._spec is not None
                save, future = self._saves.ask(rank, step, directory, files)
                if len(save.files) == self._spec.world_size:
                    self._todo.append(partial(self._saves.write, save, self._spec, self._hyper_at, self._saved))
                self._advance()
                return future
        except RayZeroError as exc:
            return failed(exc)

    def _gone_on_without_saving(self) -> StepMismatchError | None:
        """The error of a checkpoint that can never be: a rank that has not asked for it has committed its step, or
        waits for the norm that those who ask have yet to finish."""
        asked = self._saves.asked()
        assert self._spec is not None
        if asked is None or asked[0] != self._round.step or len(asked[1]) == self._spec.world_size:
            return None
        step, savers = asked
        gone = self._gone_on_without(savers)
        if not gone:
            return None
        return StepMismatchError(
            f"{have(sorted(savers))} asked to save v{step}, but {have(gone)} finished step {step} without saving it; "
            "every rank must save at the same step"
        )

    def _gone_on_without_writing(self) -> StepMismatchError | None:
        """The error of a write that can never be: a rank has finished the step, or waits for a checkpoint, without."""
        writers = self._writes.ranks
        assert self._spec is not None
        if not writers or len(writers) == self._spec.world_size:
            return None
        saves = self._saves.asked()
        saving = sorted(saves[1] - writers) if saves is not None and saves[0] == self._round.step else []
        gone = self._gone_on_without(writers)
        if not gone and not saving:
            return None
        done = f"{have(gone)} finished the step" if gone else f"{have(saving)} asked to save it"
        return StepMismatchError(
            f"{self._writes.describe(self._spec.layout)}, but {done} without; every rank must write the same values to "
            "the same parameters"
        )

    def _gone_on_without(self, waiting: frozenset[int]) -> list[int]:
        """Ranks that will not do what ``waiting`` ranks wait for all to do: they have committed, or wait for the norm
        that those have yet to finish."""
        tried = set(self._round.reports) - set(self._round.discarded)
        stuck = tried if self._round.norm is None and not waiting <= tried else set()
        return sorted((stuck | set(self._round.inputs)) - waiting)

    def _hyper_at(self, version: int) -> tuple[Hyper, ...]:
        """What version ``version`` was made with; before the first decision, what the run started with."""
        assert self._spec is not None
        last = self._records.get(version - 1)
        if last is not None:
            return last.hyper
        if self._spec.restore_from is None:
            return self._spec.hyper
        with CheckpointReader(self._spec.restore_from) as reader:
            return reader.hyper

    def _saved(self) -> None:
        """Owners have written, or failed to: decisions go on."""
        with self._locked():
            self._advance()

    # ---- failures and the end

    def _peer_failed(self, error: BaseException) -> None:
        with self._locked():
            self._fail(error if isinstance(error, StoreError) else StoreError(f"an owner failed: {error!r}"))

    def _fail(self, error: StoreError) -> None:
        """The open step will never be decided: everyone who waits for it, here and at owners, is told."""
        if self._failure is not None:
            return
        self._failure = error
        for step_round in (self._round, self._next or self._round):
            self._todo += [partial(fail, norm, error) for each in step_round.passes for norm in each.norms.values()]
            self._todo += [partial(fail, commit, error) for commit in step_round.commits.values()]
        self._todo += [partial(fail, commit, error) for commit in self._telling or []]
        self._todo += [partial(fail, write, error) for write in self._writes.end()]
        for askers in self._askers.values():
            self._todo += [partial(fail, asker, error) for asker in askers]
        self._todo += [call for _, call in self._early]  # they find the failure
        self._todo.append(partial(self._saves.abandon, error))
        self._todo += [partial(peer.abort, error) for peer in self._peers]
        self._askers, self._early = {}, []

    def describe(self) -> str:
        """Who is waited for, for messages about waits."""
        with self._lock:
            return self._waits_for()

    def _waits_for(self) -> str:
        if self._spec is None:
            return "no rank has attached"
        current, ranks = self._round, range(self._spec.world_size)
        if self._saves.holds(current.step):  # before it is written, who asked for it does nothing else
            return f"v{current.step} is being saved: {self._saves.waits_for(len(ranks))}"
        if self._writes.ranks:
            return self._writes.waits_for(self._spec.layout, len(ranks))
        for what, seen in (("finished", current.passes[-1].reports), ("committed", current.inputs)):
            missing = [rank for rank in ranks if rank not in seen]
            if missing and not (what == "committed" and current.norm is None):
                return f"{have(missing)} not {what} step {current.step}"
            if what == "finished" and current.passes[-1].norm is None:
                return f"owners have not all answered with the norm of step {current.step}"
        return f"step {current.step} is being decided"

    def close(self) -> None:
        """Fail whoever waits; finish the checkpoint that is being committed. Idempotent."""
        with self._locked():
            self._fail(StoreClosedError("the store was closed"))
        self._saves.close()

    def _locked(self) -> _Locked:
        return _Locked(self._lock, self._todo)


class _Locked:
    """Holds the lead's lock; on leaving the outermost level, does what was put off, outside the lock, in order."""

    def __init__(self, lock: threading.RLock, todo: deque[Callable[[], Any]]) -> None:
        self._lock, self._todo = lock, todo

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        actions = list(self._todo)
        self._todo.clear()
        self._lock.release()
        for action in actions:
            action()


def _torn(current: _Round) -> StepMismatchError:
    return StepMismatchError(
        f"step {current.step} cannot be decided: ranks {sorted(current.discarded)} discarded it (zero_grad) and "
        f"ranks {sorted(current.inputs)} committed it (step); after clip_grad_norm_() all ranks must do the same"
    )


def _left_behind(current: _Round) -> StepMismatchError:
    return StepMismatchError(
        f"step {current.step} cannot be decided: ranks {sorted(current.passes[-1].reports)} clipped by norm after "
        f"clipping by value and wait for ranks {sorted(current.gone_on)}, which went on without; every rank must clip "
        "alike"
    )
