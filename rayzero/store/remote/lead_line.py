"""Sends a rank's calls to a lead in another process: through a mailbox of its host, whose other end is the lead or the
door that asks it (store/host/lead_questions.py); over its link where no memory is shared.

[Note: asked or answered] A rank asks again what it has had no answer to. What it has had an answer to it does not ask
again, but other ranks may still wait for the same answer: so the successor of a lead has to know it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rayzero.concurrency.futures import chain, then
from rayzero.errors import RayZeroError, StoreClosedError
from rayzero.protocol.messages import (
    MEANS_KEPT,
    AttemptHistory,
    BegunSave,
    CheckpointInfo,
    Decision,
    EndedSave,
    FileEntry,
    FinishReport,
    GivenMean,
    LeadHistory,
    MeanInput,
    Norm,
    StepHistory,
    StepInputs,
    Write,
)
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.lead_questions import long_call
from rayzero.store.host.owner_link import OwnerLink
from rayzero.store.host.waits import StallWatch
from rayzero.store.rank.connection import Epochs, LeadLine
from rayzero.store.rank.shared_memory import SharedRank
from rayzero.store.wire import translate
from rayzero.store.wire.rpc import STORE_SERVICE, methods

T = TypeVar("T")


class NotedCalls:
    """Notes a rank's calls to the lead, each before it is sent, and the answers as they come. Thread-safe.

    Knows calls and answers; not how they travel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[int, StepHistory] = {}  # freed by: a later step's norm, or the decision
        self._means: dict[int, GivenMean] = {}  # by number. freed by: later ones
        self._saved: EndedSave | None = None
        self._begun: BegunSave | None = None

    def history(self) -> LeadHistory:
        """All of it."""
        with self._lock:
            steps = tuple(self._steps[step] for step in sorted(self._steps))
            return LeadHistory(steps=steps, means=tuple(self._means.values()), saved=self._saved, begun=self._begun)

    # ---- calls

    def finish(self, report: FinishReport, inputs: StepInputs | None) -> None:
        """The rank asks for a norm."""
        with self._lock:
            step = self._step(report.step)
            kept = AttemptHistory() if report.clamp is None else step.attempt
            attempt = replace(kept, reports=(*kept.reports, report), inputs=inputs)
            self._steps[report.step] = replace(step, attempt=attempt)

    def commit(self, step: int, inputs: StepInputs) -> None:
        """The rank commits a step that it has finished."""
        with self._lock:
            before = self._step(step)
            self._steps[step] = replace(before, attempt=replace(before.attempt, inputs=inputs))

    def mean(self, number: int, given: MeanInput) -> None:
        """The rank asks for a mean."""
        with self._lock:
            self._means[number] = GivenMean(number=number, given=given)
            if len(self._means) > MEANS_KEPT:
                del self._means[min(self._means)]

    def _step(self, step: int) -> StepHistory:
        return self._steps.get(step) or StepHistory(step=step)

    # ---- answers: each is noted before the call that waits for it returns

    def normed(self, norm: Norm) -> Norm:
        """A norm of a step is here, so the steps before are decided."""
        with self._lock:
            before = self._step(norm.step)
            attempt = replace(before.attempt, norms=(*before.attempt.norms, norm))
            self._steps = {step: each for step, each in self._steps.items() if step > norm.step}
            self._steps[norm.step] = replace(before, attempt=attempt)
        return norm

    def decided(self, decision: Decision) -> Decision:
        """A step is decided."""
        with self._lock:
            self._steps = {step: each for step, each in self._steps.items() if step > decision.step}
        return decision

    def discarded(self, step: int) -> None:
        """The present attempt at a step is discarded."""
        with self._lock:
            before = self._step(step)
            self._steps[step] = replace(
                before, discards=before.discards + 1, discarded=before.attempt, attempt=AttemptHistory()
            )

    def written(self, write: Write) -> None:
        """A write is made, so the steps before are decided."""
        with self._lock:
            before = self._step(write.version)
            self._steps = {step: each for step, each in self._steps.items() if step > write.version}
            self._steps[write.version] = replace(before, written=(*before.written, write))

    def begun(self, save: BegunSave) -> None:
        """A save has begun, and the training goes on."""
        with self._lock:
            self._begun = save

    def saved(self, save: EndedSave) -> None:
        """A save has ended."""
        with self._lock:
            self._saved = save


class RemoteLead(LeadLine):
    """To the lead in another process.

    Knows mailbox, links and messages; not what the lead does. A repeated call carries the same number, so that the lead
    counts it once."""

    def __init__(
        self, link: OwnerLink, door: OwnerLink | None, shared: SharedRank | None, watch: StallWatch, epochs: Epochs
    ) -> None:
        """``link``: to the lead. ``door``: the owner of this host that asks the lead; None: this rank does. ``shared``:
        this rank's shared memory, which reaches the lead or the door; None: it has none."""
        self._link, self._door, self._shared, self._watch, self._epochs = link, door, shared, watch, epochs
        self._rank = link.caller.number
        self._writes = 0  # calls so far
        self._noted = NotedCalls()
        self._answers = ThreadPoolExecutor(1, f"rayzero-rank{link.caller.number}-answers")  # freed by: close()

    def enter(self, link: OwnerLink, shared: SharedRank | None, watch: StallWatch) -> None:
        """Ask the lead of the next epoch from now on; see ``__init__``. ``meet_door`` comes later."""
        self._link, self._door, self._shared, self._watch = link, None, shared, watch

    def meet_door(self, door: OwnerLink | None) -> None:
        """See ``__init__``."""
        self._door = door

    def finish(self, awaited: str, report: FinishReport, inputs: StepInputs | None) -> Future[Norm]:
        sent = None if inputs is None else translate.inputs_to_pb(inputs)
        request = pb.FinishRequest(report=translate.report_to_pb(report), inputs=sent)
        self._noted.finish(report, inputs)
        return self._ask(
            awaited, "Finish", request, lambda answer: self._noted.normed(translate.norm_from_pb(answer.norm))
        )

    def commit(self, awaited: str, step: int, inputs: StepInputs) -> Future[Decision]:
        request = pb.CommitRequest(rank=self._rank, step=step, inputs=translate.inputs_to_pb(inputs))
        self._noted.commit(step, inputs)
        return self._ask(awaited, "Commit", request, self._decision_of)

    def decision(self, awaited: str, step: int) -> Future[Decision]:
        request = pb.GetDecisionRequest(step=step)
        return self._ask(awaited, "GetDecision", request, self._decision_of)

    def _decision_of(self, answer: Any) -> Decision:
        return self._noted.decided(translate.decision_from_pb(answer.decision))

    def discard(self, awaited: str, step: int, attempt: int) -> Future[None]:
        request = pb.DiscardRequest(rank=self._rank, step=step, attempt=attempt)
        return self._ask(awaited, "Discard", request, lambda _: self._noted.discarded(step))

    def write(self, awaited: str, write: Write) -> Future[None]:
        return self._ask_write(awaited, write, made=False)

    def made(self, awaited: str, write: Write) -> Future[None]:
        return self._ask_write(awaited, write, made=True)

    def _ask_write(self, awaited: str, write: Write, *, made: bool) -> Future[None]:
        self._writes += 1
        request = pb.WriteRequest(rank=self._rank, write=translate.write_to_pb(write), number=self._writes, made=made)
        return self._ask(awaited, "Write", request, lambda _: self._noted.written(write))

    def begin_save(
        self, awaited: str, number: int, step: int, directory: Path, files: tuple[FileEntry, ...]
    ) -> Future[None]:
        request = self._save_request(number, step, directory, files)
        begun = BegunSave(number=number, step=step, directory=str(directory))
        return self._ask(awaited, "BeginSave", request, lambda _: self._noted.begun(begun))

    def _save_request(
        self, number: int, step: int, directory: Path, files: tuple[FileEntry, ...], *, begun: bool = False
    ) -> pb.SaveRequest:
        entries = [translate.file_to_pb(entry) for entry in files]
        return pb.SaveRequest(
            rank=self._rank, step=step, directory=str(directory), files=entries, number=number, begun=begun
        )

    def save(
        self, awaited: str, number: int, step: int, directory: Path, files: tuple[FileEntry, ...], *, begun: bool
    ) -> Future[CheckpointInfo]:
        saved = Future[CheckpointInfo]()
        request = self._save_request(number, step, directory, files, begun=begun)
        save = partial(EndedSave, number=number, step=step, directory=str(directory))

        def ended(answer: Future[CheckpointInfo]) -> None:
            error = answer.exception()
            if error is None:
                self._noted.saved(save(checkpoint=answer.result()))
            elif isinstance(error, RayZeroError):
                self._noted.saved(save(failure=error))
            chain(answer, saved)

        asked = self._ask(awaited, "Save", request, lambda answer: translate.checkpoint_from_pb(answer.checkpoint))
        asked.add_done_callback(ended)
        return saved

    def mean(self, awaited: str, number: int, given: MeanInput) -> Future[tuple[float, ...]]:
        request = translate.mean_to_pb(self._rank, number, given)
        self._noted.mean(number, given)
        return self._ask(awaited, "Mean", request, lambda answer: tuple(answer.mean.values))

    def give_again(self, awaited: str, number: int, given: MeanInput) -> Future[None]:
        request = translate.mean_to_pb(self._rank, number, given, former=True)
        self._noted.mean(number, given)
        return self._ask(awaited, "Mean", request, lambda _: None)

    def _ask(self, awaited: str, method: str, request: Any, read: Callable[[Any], T]) -> Future[T]:
        """``read``: turns the response into the result."""
        return self._epochs.make(partial(self._ask_once, awaited, method, request, read))

    def _ask_once(self, awaited: str, method: str, request: Any, read: Callable[[Any], T]) -> Future[T]:
        asked = self._shared.ask_lead(method, request.SerializeToString()) if self._shared is not None else None
        if asked is not None:
            response = methods(STORE_SERVICE)[method].response
            answer = then(asked, lambda message: read(response.FromString(message)))
        else:
            answer = long_call(self._link, method, request, read, executor=self._answers, awaited=awaited)
        return self._watch.watch(answer, awaited, self.describe)

    def is_over(self, link: OwnerLink) -> bool:
        """Whether this is the line over ``link``."""
        return link is self._link

    def history(self) -> pb.LeadHistory:
        """What this rank has asked the lead and been answered, for its successor; blocks. Call it once the lead is
        dead and its channel is closed: every answer that has come is noted first."""
        if self._shared is not None:
            self._shared.ask_again()
        try:
            self._answers.submit(lambda: None).result()
        except RuntimeError:  # shut down by close()
            raise StoreClosedError(f"rank {self._rank} closed its store") from None
        return translate.history_to_pb(self._noted.history())

    def describe(self, timeout_s: float) -> Future[str]:
        """Ask the lead what it waits for; does not block. The future ends within ``timeout_s`` seconds."""
        return (self._door or self._link).describe(pb.DescribeRequest(step=True), timeout_s)

    def leave(self) -> None:
        """Ask the lead what the door may not have asked yet, before it hears that this rank leaves; does not block."""
        if self._door is not None and self._shared is not None:
            for method, request in self._shared.questions:
                self._link.ask(method, methods(STORE_SERVICE)[method].request.FromString(request))

    def close(self) -> None:
        """End the thread that completes answers, after the link and the mailbox have been closed. Idempotent."""
        self._answers.shutdown(wait=True)
