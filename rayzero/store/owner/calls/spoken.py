"""What one rank asks in the name of others of its host, at the lead: each question is what that rank would ask itself.

[Note: who may speak for whom] A rank names its voice with its Attach, which it makes over its own link and with its own
certificate. A voice asks for ranks that have named it, in their present lives, and nothing but finishes, commits and
means. Whoever else it names is not heard, and asks itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from google.protobuf.message import DecodeError

from rayzero.concurrency.futures import failed
from rayzero.errors import HandshakeError, RayZeroError, StoreError, TransferError
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.wire.rpc import to_failure

_REQUESTS: dict[str, type[Any]] = {"Finish": pb.FinishRequest, "Commit": pb.CommitRequest, "Mean": pb.MeanRequest}

Begin = Callable[[int, Any], Future[Any]]  # a rank, and its request -> the response


class Voices:
    """Which rank each rank has named as its voice. Lives on the event loop."""

    def __init__(self) -> None:
        self._named: dict[int, tuple[int, int]] = {}  # rank -> its life, its voice

    def name(self, rank: int, life: int, voice: int | None) -> None:
        """A rank has attached, or its last life is over. ``voice``: who may speak for it from now on; None: nobody."""
        self._named.pop(rank, None)
        if voice is not None:
            self._named[rank] = life, voice

    def doubt(self, voice: int, rank: int, life: int) -> str | None:
        """Why ``voice`` may not speak for a rank; None: it may."""
        if self._named.get(rank) == (life, voice):
            return None
        return f"life {life} of rank {rank} has not named rank {voice} as its voice"


def begin_said(request: pb.SpeakRequest, voices: Voices, begin: Begin) -> list[Future[Any] | str]:
    """Start what each rank asks; the future of its response, or why it is not heard. Raises StoreError for a method
    that no voice may call, TransferError for bytes that are no request, HandshakeError for a request of another rank
    than the one that is named with it."""
    kind = _REQUESTS.get(request.method)
    if kind is None:
        raise StoreError(
            f"rank {request.rank} speaks for others with {request.method!r}; only {', '.join(_REQUESTS)} can"
        )
    return [_begin_one(request, kind, each, voices, begin) for each in request.said]


def _begin_one(
    request: pb.SpeakRequest, kind: type[Any], said: pb.SpeakRequest.Said, voices: Voices, begin: Begin
) -> Future[Any] | str:
    doubt = voices.doubt(request.rank, said.rank, said.life)
    if doubt is not None:
        return doubt
    try:
        asked = kind.FromString(said.request)
    except DecodeError as error:
        raise TransferError(f"rank {request.rank} says what is no {request.method}: {error}") from error
    if (named := (asked.report if request.method == "Finish" else asked).rank) != said.rank:
        raise HandshakeError(f"{request.method} of rank {named} was sent as that of rank {said.rank}")
    try:
        return begin(said.rank, asked)
    except RayZeroError as error:
        return failed(error)


def answers_to(said: Sequence[Future[Any] | str]) -> list[pb.SpeakResponse.Answer]:
    """What is known by now. Ranks that are answered alike, which is the usual case, share one answer: it is packed
    once."""
    found: dict[Any, pb.SpeakResponse.Answer] = {}
    for place, asked in enumerate(said):
        if isinstance(asked, str) or asked.done():
            key, pack = _outcome(asked)
            if key not in found:
                found[key] = pack()
            found[key].said.append(place)
    return list(found.values())


def _outcome(asked: Future[Any] | str) -> tuple[Any, Callable[[], pb.SpeakResponse.Answer]]:
    """(what tells it from others, the answer that it makes)."""
    if isinstance(asked, str):
        return asked, lambda: pb.SpeakResponse.Answer(unheard=asked)
    error = asked.exception()
    if error is None:
        response = asked.result()
        return id(response), lambda: pb.SpeakResponse.Answer(response=response.SerializeToString())
    if not isinstance(error, RayZeroError):
        raise error
    return (type(error), str(error)), lambda: pb.SpeakResponse.Answer(failure=to_failure(error))
