"""What ranks of a host ask the lead in one call of their door: each question is what that rank would ask itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from google.protobuf.message import DecodeError

from rayzero.concurrency.futures import failed
from rayzero.errors import HandshakeError, RayZeroError, StoreError, TransferError
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.wire.failures import to_failure
from rayzero.store.wire.rpc import STORE_SERVICE, methods

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


def _begin_one(method: str, kind: type[Any], question: pb.AskRequest.Question, begin: Begin) -> Future[Any]:
    try:
        asked = kind.FromString(question.request)
    except DecodeError as error:
        return failed(TransferError(f"rank {question.rank} asks what is no {method}: {error}"))
    if method != "GetDecision" and (named := (asked.report if method == "Finish" else asked).rank) != question.rank:
        return failed(HandshakeError(f"{method} of rank {named} was sent as that of rank {question.rank}"))
    try:
        return begin(question.rank, question.life, asked)
    except RayZeroError as error:
        return failed(error)


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
