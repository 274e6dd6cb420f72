"""Sends a rank's calls to a lead in another process: by mailbox on the same host, by long polls to another host."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rayzero.concurrency.futures import then
from rayzero.protocol.messages import (
    CheckpointInfo,
    Decision,
    FileEntry,
    FinishReport,
    MeanInput,
    Norm,
    StepInputs,
    Write,
)
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.rank.long_poll import LongPoll
from rayzero.store.rank.memory.shared_memory import SharedRank
from rayzero.store.rank.owner_link import OwnerLink
from rayzero.store.rank.stall import StallWatch
from rayzero.store.wire import translate
from rayzero.store.wire.rpc import STORE_SERVICE, methods

T = TypeVar("T")


class RemoteLead:
    """A ``LeadLine`` (store/rank/connection.py) to another process.

    Knows mailbox, link and messages; not what the lead does. A repeated call carries the same number, so that the lead
    counts it once."""

    def __init__(self, link: OwnerLink, shared: SharedRank | None, watch: StallWatch) -> None:
        """``shared``: this rank's shared memory, which may reach the lead; None: it has none."""
        self._link, self._shared, self._watch = link, shared, watch
        self._rank = link.rank
        self._writes = self._saves = 0  # calls so far
        self._reports: list[pb.FinishReport] = []  # of the open step's attempt: one for each norm
        self._last: Callable[[], Future[Any]] | None = None  # the last finish or commit, as a call
        self._answers = ThreadPoolExecutor(1, f"rayzero-rank{link.rank}-answers")  # freed by: close()

    def finish(self, awaited: str, report: FinishReport, inputs: StepInputs | None) -> Future[Norm]:
        """See ``LeadLine.finish``."""
        sent = None if inputs is None else translate.inputs_to_pb(inputs)
        request = pb.FinishRequest(report=translate.report_to_pb(report), inputs=sent)
        if report.clamp is None:
            self._reports.clear()
        self._reports.append(request.report)
        ask = partial(self._ask, awaited, "Finish", request, lambda answer: translate.norm_from_pb(answer.norm))
        self._last = ask
        return ask()

    def commit(self, awaited: str, step: int, inputs: StepInputs) -> Future[Decision]:
        """See ``LeadLine.commit``."""
        sent = translate.inputs_to_pb(inputs)
        request = pb.CommitRequest(rank=self._rank, step=step, inputs=sent, reports=self._reports)
        ask = partial(self._ask, awaited, "Commit", request, _decision_of)
        self._last = ask
        return ask()

    def decision(self, awaited: str, step: int) -> Future[Decision]:
        """See ``LeadLine.decision``."""
        request = pb.GetDecisionRequest(step=step)
        return self._ask(awaited, "GetDecision", request, _decision_of)

    def discard(self, awaited: str, step: int, attempt: int) -> Future[None]:
        """See ``LeadLine.discard``."""
        request = pb.DiscardRequest(rank=self._rank, step=step, attempt=attempt)
        return self._ask(awaited, "Discard", request, lambda _: None)

    def write(self, awaited: str, write: Write) -> Future[None]:
        """See ``LeadLine.write``."""
        self._writes += 1
        request = pb.WriteRequest(rank=self._rank, write=translate.write_to_pb(write), number=self._writes)
        return self._ask(awaited, "Write", request, lambda _: None)

    def save(self, awaited: str, step: int, directory: Path, files: tuple[FileEntry, ...]) -> Future[CheckpointInfo]:
        """See ``LeadLine.save``."""
        self._saves += 1
        entries = [translate.file_to_pb(entry) for entry in files]
        request = pb.SaveRequest(
            rank=self._rank, step=step, directory=str(directory), files=entries, number=self._saves
        )
        return self._ask(awaited, "Save", request, lambda answer: translate.checkpoint_from_pb(answer.checkpoint))

    def mean(self, awaited: str, number: int, given: MeanInput) -> Future[tuple[float, ...]]:
        """See ``LeadLine.mean``."""
        request = translate.mean_to_pb(self._rank, number, given)
        return self._ask(awaited, "Mean", request, lambda answer: tuple(answer.mean.values))

    def _ask(self, awaited: str, method: str, request: Any, read: Callable[[Any], T]) -> Future[T]:
        """``read``: turns the response into the result."""
        asked = self._shared.ask_lead(method, request.SerializeToString()) if self._shared is not None else None
        if asked is not None:
            response = methods(STORE_SERVICE)[method].response
            answer = then(asked, lambda message: read(response.FromString(message)))
        else:
            answer = LongPoll(self._link, method, request, read, executor=self._answers, awaited=awaited).future
        return self._watch.watch(answer, awaited, self.describe)

    def is_over(self, link: OwnerLink) -> bool:
        """Whether this is the line over ``link``."""
        return link is self._link

    def repeat(self) -> None:
        """The lead has a successor, which knows what is recorded and nothing else: tell it again how far this rank is
        in the open step, even if the former lead had answered. What has no answer is repeated anyway."""
        if self._last is not None:
            self._last()

    def describe(self, timeout_s: float) -> Future[str]:
        """Ask the lead what it waits for; does not block. The future ends within ``timeout_s`` seconds."""
        return self._link.describe(pb.DescribeRequest(step=True), timeout_s)

    def close(self) -> None:
        """End the thread that completes answers, after the link and the mailbox have been closed. Idempotent."""
        self._answers.shutdown(wait=True)


def _decision_of(answer: Any) -> Decision:
    return translate.decision_from_pb(answer.decision)
