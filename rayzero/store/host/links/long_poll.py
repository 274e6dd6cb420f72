"""A call that waits for other ranks, without a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Generic, TypeVar

from rayzero.concurrency.futures import fail, settle
from rayzero.errors import StoreClosedError
from rayzero.store.host.links.channel import NoAnswerError
from rayzero.store.host.links.owner_link import OwnerLink
from rayzero.store.wire.rpc import POLL_MARGIN_S

T = TypeVar("T")

_POLL_S = 60.0  # the longest that an owner may hold a long poll; it answers "ask again" sooner


class LongPoll(Generic[T]):
    """A call that waits for other ranks, repeated until it has an answer or an error, or until its future ends.

    It holds no thread while it waits, and its future completes on the executor it was given. It has no deadline:
    the watcher of the future ends it."""

    def __init__(
        self,
        link: OwnerLink,
        method: str,
        request: Any,
        read: Callable[[Any], T],
        *,
        executor: Executor,
        awaited: str,
    ) -> None:
        """``read``: turns a response that is not ``waiting`` into the result, which errors call ``awaited``."""
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()
        self._link, self._method, self._request, self._read = link, method, request, read
        self._executor, self._awaited = executor, awaited
        self._asked: list[Future[Any]] = []  # the call under way
        asked = self._asked
        self.future.add_done_callback(lambda _: [call.cancel() for call in asked])
        self._ask()

    def _ask(self) -> None:
        self._asked[:] = [self._link.ask(self._method, self._request, _POLL_S + POLL_MARGIN_S)]
        self._asked[0].add_done_callback(self._hand_over)

    def _hand_over(self, asked: Future[Any]) -> None:
        """Runs in grpc's thread, which must not block."""
        if self.future.done():  # the caller has given up
            return
        try:
            self._executor.submit(self._answered, asked)
        except RuntimeError:  # the executor is shut down
            fail(self.future, StoreClosedError(f"the store was closed while waiting for {self._awaited}"))

    def _answered(self, asked: Future[Any]) -> None:
        if self.future.done():
            return
        try:
            if isinstance(asked.exception(), NoAnswerError):
                self._ask()
                return
            response = asked.result()
            if response.HasField("waiting"):
                self._ask()
            else:
                settle(self.future, self._read(response))
        except Exception as error:  # whatever it is, the future raises it
            fail(self.future, error)
