"""How one rank asks the lead: by mailbox on one host, by long polls elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from rayzero.concurrency.futures import then
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.rank.memory.shared_memory import SharedRank
from rayzero.store.rank.owner_link import LongPoll, OwnerLink
from rayzero.store.rank.stall import StallWatch
from rayzero.store.wire.rpc import STORE_SERVICE, methods

T = TypeVar("T")


class LeadLine:
    """Carries a rank's questions to the lead, and its answers back.

    Knows ways; not what the questions mean. Every wait ends by an answer, leave, abort or stall."""

    def __init__(self, link: OwnerLink, shared: SharedRank | None, watch: StallWatch) -> None:
        """``shared``: where the lead may be of this host."""
        self._link, self._shared, self._watch = link, shared, watch
        self._answers = ThreadPoolExecutor(1, f"rayzero-rank{link.rank}-answers")  # freed by: close()

    def ask(self, method: str, request: Any, read: Callable[[Any], T], awaited: str) -> Future[T]:
        """Ask; ``read`` makes the result of the response, ``awaited`` names it for errors."""
        asked = self._shared.ask_lead(method, request.SerializeToString()) if self._shared is not None else None
        if asked is not None:
            response = methods(STORE_SERVICE)[method].response
            answer = then(asked, lambda message: read(response.FromString(message)))
        else:
            answer = LongPoll(self._link, method, request, read, executor=self._answers, awaited=awaited).future
        return self._watch.watch(answer, awaited, self.describe)

    def describe(self, timeout_s: float) -> Future[str]:
        """What the lead says it waits for, within ``timeout_s``; does not block."""
        return self._link.describe(pb.DescribeRequest(step=True), timeout_s)

    def close(self) -> None:
        """End the thread that completes answers; after link and mailbox were closed. Idempotent."""
        self._answers.shutdown(wait=True)
