"""What ranks of a host ask the lead on another host, in one call of their door for all that ask the same.

With a thousand ranks, what each asks of the lead in a step would cost it seconds of one core, and most of that is the
call, not the question.

[Note: when a door asks] Finishes, commits and means are answered once all ranks have asked, so the door waits for the
last rank of its host. But the lead names whom a step waits for and finds steps that can never be decided, so what was
asked leaves after ``_PATIENCE_S`` at the latest, and what comes then in another call. Other questions leave at once.

[Note: a question outlives both ends] A question and its answer stand in shared memory (store/shm/mailbox.py). The
successor of a door finds the questions that have no answer there, and asks them again: they are the same bytes, and the
lead answers a repeat as it answered the first. Before a rank says to the successor of a lead what it has heard of that,
it asks anew what had no answer: an answer that was on its way is heard no more.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from rayzero.concurrency.futures import fail, failed, settle
from rayzero.errors import RayZeroError, StoreClosedError
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.owner_link import OwnerLink
from rayzero.store.wire.translate import from_failure

T = TypeVar("T")

_AGAIN_S = 60.0  # after which a call without an answer is made again: its answer may be lost on the way


def long_call(
    link: OwnerLink, method: str, request: Any, read: Callable[[Any], T], *, executor: Executor, awaited: str
) -> Future[T]:
    """Make a call that waits for other ranks; repeated until it has an answer or an error, or until the future ends.

    It holds no thread while it waits, and the future completes on ``executor``. It has no deadline: the watcher of the
    future ends it. ``read``: turns the response into the result, which errors call ``awaited``."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    asked = link.ask(method, request, _AGAIN_S, repeats=True)

    def hand_over(_: Future[Any]) -> None:
        """Runs in grpc's thread, which must not block."""
        try:
            executor.submit(answered)
        except RuntimeError:  # the executor is shut down
            fail(future, StoreClosedError(f"the store was closed while waiting for {awaited}"))

    def answered() -> None:
        if future.done():  # the caller has given up
            return
        try:
            settle(future, read(asked.result()))
        except Exception as error:  # whatever it is, the future raises it
            fail(future, error)

    future.add_done_callback(lambda _: asked.cancel())
    asked.add_done_callback(hand_over)
    return future


_TOGETHER = ("Finish", "Commit", "Mean")  # every rank asks, and no answer comes before
_PATIENCE_S = 0.2  # for the last rank of the host

Later = Callable[[float, Callable[[], None]], None]  # calls something after so many seconds, in any thread


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    rank: int
    life: int
    request: bytes
    answer: Future[bytes] = field(default_factory=Future)


class LeadQuestions:
    """Collects what ranks ask, asks the lead, and gives each its answer.

    Knows ranks, methods and bytes; not what is asked, or how questions come here. Thread-safe; one thread gives
    answers."""

    def __init__(self, link: OwnerLink, later: Later) -> None:
        """``link``: to the lead."""
        self._link, self._later = link, later
        self._lock = threading.Lock()
        self._here: set[int] = set()  # the ranks of this host
        self._waiting: dict[str, list[_Question]] = defaultdict(list)  # by method: to leave
        self._asked: dict[str, list[_Question]] = defaultdict(list)  # by method: without an answer
        self._closed: RayZeroError | None = None
        self._answers = ThreadPoolExecutor(1, f"{link.caller.name}-answers")  # freed by: close()

    def meet(self, rank: int) -> None:
        """A rank is on this host, and may ask."""
        with self._lock:
            self._here.add(rank)

    def leave(self, rank: int) -> None:
        """A rank is gone: it waits for no answer, and others do not wait for its question."""
        with self._lock:
            self._here.discard(rank)
            for method, questions in self._waiting.items():
                self._waiting[method] = [each for each in questions if each.rank != rank]
        for method in _TOGETHER:
            self._send_if_whole(method)

    def ask(self, rank: int, life: int, method: str, request: bytes) -> Future[bytes]:
        """Ask for a rank in its ``life``; does not block. The future has the response, or fails with the lead's error,
        or with why there will be none."""
        question = _Question(rank, life, request)
        with self._lock:
            closed, first = self._closed, not self._waiting[method]
            if closed is None:
                self._waiting[method].append(question)
        if closed is not None:
            return failed(closed)
        if method not in _TOGETHER:
            self._send(method)
        elif not self._send_if_whole(method) and first:
            self._later(_PATIENCE_S, partial(self._send_late, method, question))
        return question.answer

    def _send_late(self, method: str, first: _Question) -> None:
        """The time of those that have waited since ``first`` is over, unless they have left."""
        with self._lock:
            waits = first in self._waiting[method]
        if waits:
            self._send(method)

    def _send_if_whole(self, method: str) -> bool:
        """Send what is asked if all ranks of the host have asked; whether that was so."""
        with self._lock:
            asking = {each.rank for each in (*self._waiting[method], *self._asked[method])}
            whole = self._here <= asking
        if whole:
            self._send(method)
        return whole

    def _send(self, method: str) -> None:
        """Ask the lead what waits, in one call."""
        with self._lock:
            questions, self._waiting[method] = self._waiting[method], []
            self._asked[method] += questions
        if questions:
            self._call(method, questions)

    def _call(self, method: str, questions: Sequence[_Question]) -> None:
        each_asks = [pb.AskRequest.Question(rank=each.rank, life=each.life, request=each.request) for each in questions]
        request, awaited = pb.AskRequest(method=method, questions=each_asks), f"{method} for ranks of this host"
        asked = long_call(self._link, "Ask", request, _itself, executor=self._answers, awaited=awaited)
        asked.add_done_callback(partial(self._answered, method, questions))

    def _answered(self, method: str, questions: Sequence[_Question], asked: Future[Any]) -> None:
        error, left = asked.exception(), dict(enumerate(questions))
        if error is not None:  # the link is over, or the epoch
            self._end(method, questions)
            for question in questions:
                fail(question.answer, error)
            return
        answered = [(left.pop(at), each) for each in asked.result().answers for at in each.questions if at in left]
        self._end(method, [question for question, _ in answered])
        for question, answer in answered:
            if answer.HasField("failure"):
                fail(question.answer, from_failure(answer.failure))
            else:
                settle(question.answer, answer.response)
        if left:  # the lead has made these wait
            self._call(method, list(left.values()))

    def _end(self, method: str, ended: Sequence[_Question]) -> None:
        """These have answers: a rank that has one may ask again at once."""
        with self._lock:
            self._asked[method] = [each for each in self._asked[method] if each not in ended]

    def describe(self, timeout_s: float) -> Future[str]:
        """Ask the lead what it waits for; does not block. The future ends within ``timeout_s`` seconds."""
        return self._link.describe(pb.DescribeRequest(step=True), timeout_s)

    def close(self, error: RayZeroError) -> None:
        """Fail what is asked, now and later, with ``error``. Idempotent."""
        with self._lock:
            self._closed = self._closed or error
            open_now = [each for group in (self._waiting, self._asked) for asked in group.values() for each in asked]
            self._waiting.clear()
            self._asked.clear()
        for question in open_now:
            fail(question.answer, error)

    def join(self) -> None:
        """End the thread, after ``close`` and once the link is closed."""
        self._answers.shutdown(wait=True)


def _itself(response: pb.AskResponse) -> pb.AskResponse:
    return response
