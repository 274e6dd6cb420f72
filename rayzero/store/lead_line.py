"""How one rank asks the lead: by mailbox on one host, by long polls elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from rayzero.errors import RayZeroError
from rayzero.optimizer.futures import then
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner_link import LongPoll, OwnerLink
from rayzero.store.rpc import STORE_SERVICE, methods
from rayzero.store.shared_rank import SharedRank
from rayzero.store.stall import StallWatch

T = TypeVar("T")

_DESCRIBE_S = 5.0  # deadline of asking whom a step waits for


class LeadLine:
    """Carries a rank's questions to the lead, and its answers back.

    Knows ways and patience; not what the questions mean. Every wait ends by an answer, leave, abort or stall."""

    def __init__(self, link: OwnerLink, shared: SharedRank | None, watch: StallWatch, patience_s: float) -> None:
        """``shared``: where the lead may be of this host; ``patience_s``: of a wait in which nothing changes."""
        self._link, self._shared, self._watch, self._patience_s = link, shared, watch, patience_s
        self._answers = ThreadPoolExecutor(1, f"rayzero-rank{link.rank}-answers")  # freed by: close()

    def ask(self, method: str, request: Any, read: Callable[[Any], T], awaited: str) -> Future[T]:
        """Ask; ``read`` makes the result of the response, ``awaited`` names it for errors."""
        asked = self._shared.ask_lead(method, request.SerializeToString()) if self._shared is not None else None
        if asked is not None:
            response = methods(STORE_SERVICE)[method].response
            answer = then(asked, lambda message: read(response.FromString(message)))
            return self._watch.watch(answer, awaited, self._describe)
        poll = LongPoll(
            self._link,
            method,
            request,
            read,
            executor=self._answers,
            patience_s=self._patience_s,
            awaited=awaited,
            clock=time.monotonic,
        )
        return poll.future

    def _describe(self) -> str:
        try:
            return str(self._link.ask("Describe", pb.DescribeRequest(step=True), _DESCRIBE_S).text)
        except RayZeroError as error:
            return str(error)

    def close(self) -> None:
        """End the thread that completes answers; after link and mailbox were closed. Idempotent."""
        self._answers.shutdown(wait=True)
