"""Lets calls to an owner's server wait on the event loop without a thread, however often they are repeated, and gives
ranks' questions that their door asks in one call an answer each."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from hashlib import sha256
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from rayzero.concurrency.futures import fail, future_raises
from rayzero.errors import HandshakeError, RayZeroError, StoreError, TransferError
from rayzero.quantities import count, format_bytes
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.calls.allowance import TooManyCallsError
from rayzero.store.wire.rpc import MAX_MESSAGE_BYTES, STORE_SERVICE, methods
from rayzero.store.wire.translate import to_failure

WAITING_CALLS = 64  # of one rank; it asks from one thread, and has a few
WAITING_BYTES = MAX_MESSAGE_BYTES  # of the requests of these

T = TypeVar("T")


async def ended(future: Future[Any], timeout_s: float | None = None) -> bool:
    """Wait until ``future`` is done, without holding a thread or cancelling it; False after ``timeout_s`` seconds.

    A thousand ranks wait so for one norm: asyncio's own ``wait_for`` would make a task for each, and the loop would be
    woken once for each although it is the loop's own thread that settles them."""
    if future.done():
        return True
    loop, here = asyncio.get_running_loop(), threading.get_ident()
    over = loop.create_future()

    def end() -> None:
        if not over.done():
            over.set_result(None)

    future.add_done_callback(lambda _: end() if threading.get_ident() == here else loop.call_soon_threadsafe(end))
    timer = None if timeout_s is None else loop.call_later(timeout_s, end)
    try:
        await over
    finally:
        if timer is not None:
            timer.cancel()
    return future.done()


async def result_of(future: Future[T]) -> T:
    """The result of a future that another thread completes."""
    await ended(future)
    return future.result()


_Key = tuple[str, int, bytes]  # of a call: its method, and the size and digest of its request


class Repeats:
    """The calls that wait for other ranks, by method and request: a repeat is the same call.

    Knows a rank's latest calls; not what they do."""

    def __init__(self, kept: int = 8) -> None:
        self._kept = kept
        self._calls: dict[int, dict[_Key, Future[Any]]] = defaultdict(dict)  # freed by: newer calls of the rank

    def once(self, rank: int, method: str, request: Any, start: Callable[[], Future[T]]) -> Future[T]:
        """The future of this call, started at its first arrival. Raises StoreError if too many of the rank wait."""
        content = request.SerializeToString(deterministic=True)
        key = method, len(content), sha256(content).digest()
        calls = self._calls[rank]
        found = calls.get(key)
        if found is None:
            self._require_room(rank, calls, len(content))
            found = calls[key] = start()
            self._forget(calls)
        return found

    def _require_room(self, rank: int, calls: dict[_Key, Future[Any]], size: int) -> None:
        """A rank could ask for any number of things that never come."""
        waiting = [each for (_, each, _), future in calls.items() if not future.done()]
        if len(waiting) >= WAITING_CALLS or (waiting and sum(waiting) + size > WAITING_BYTES):
            raise TooManyCallsError(
                f"rank {rank} has {count(len(waiting), 'call')} of {format_bytes(sum(waiting))} waiting here, and asks "
                f"for one of {format_bytes(size)}; it may have {WAITING_CALLS} of {format_bytes(WAITING_BYTES)}"
            )

    def end(self, rank: int, error: RayZeroError) -> None:
        """Drop the calls of a rank that has died: those that wait fail with ``error``, so that no other rank's in the
        same message waits for them."""
        for call in self._calls.pop(rank, {}).values():
            fail(call, error)

    def _forget(self, calls: dict[_Key, Future[Any]]) -> None:
        done = [key for key, future in calls.items() if future.done()]
        for key in done[: max(0, len(done) - self._kept)]:
            del calls[key]


_NAMES = "Finish", "Commit", "GetDecision", "Discard", "BeginSave", "Save", "Write", "Mean"
LEAD_CALLS = {name: methods(STORE_SERVICE)[name] for name in _NAMES}  # what a rank asks of the lead

Begin = Callable[[int, int, Any], Future[Any]]  # a rank, its life, and its request -> the response


def begin_questions(request: pb.AskRequest, known: Callable[[int], bool], begin: Begin) -> dict[int, Future[Any]]:
    """Start what each rank asks: by place, the future of the response. ``known``: whether a rank has attached here;
    what others ask has to wait. Raises StoreError for a method that no rank asks of the lead."""
    if request.method not in LEAD_CALLS:
        raise StoreError(f"a door asked {request.method!r} for ranks of its host; only {', '.join(_NAMES)} can be")
    kind = LEAD_CALLS[request.method].request
    return {
        place: _begin_one(request.method, kind, each, begin)
        for place, each in enumerate(request.questions)
        if known(each.rank)
    }


@future_raises
def _begin_one(method: str, kind: type[Any], question: pb.AskRequest.Question, begin: Begin) -> Future[Any]:
    try:
        asked = kind.FromString(question.request)
    except DecodeError as error:
        raise TransferError(f"rank {question.rank} asks what is no {method}: {error}") from error
    if method != "GetDecision" and (named := (asked.report if method == "Finish" else asked).rank) != question.rank:
        raise HandshakeError(f"{method} of rank {named} was sent as that of rank {question.rank}")
    return begin(question.rank, question.life, asked)


def answers_to(begun: dict[int, Future[Any]]) -> list[pb.AskResponse.Answer]:
    """What is known by now. Ranks that are answered alike, which is the usual case, share one answer: it is packed
    once."""
    found: dict[Any, pb.AskResponse.Answer] = {}
    for place, answer in begun.items():
        if answer.done():
            key, pack = _outcome(answer)
            if key not in found:
                found[key] = pack()
            found[key].questions.append(place)
    return list(found.values())


def _outcome(answer: Future[Any]) -> tuple[Any, Callable[[], pb.AskResponse.Answer]]:
    """(what tells it from others, the answer that it makes)."""
    error = answer.exception()
    if error is None:
        response = answer.result()
        return id(response), lambda: pb.AskResponse.Answer(response=response.SerializeToString())
    if not isinstance(error, RayZeroError):
        raise error
    return (type(error), str(error)), lambda: pb.AskResponse.Answer(failure=to_failure(error))
