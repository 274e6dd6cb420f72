"""What ranks ask that are a step ahead of the others: a rank that uses no parameters waits for nobody."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rayzero.concurrency.futures import chain

T = TypeVar("T")


class EarlyCalls:
    """Calls about steps that are not open yet.

    Knows steps and the order of the calls; not what is asked. Called under the lead's lock."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, Callable[[], None]]] = []  # step, call

    def wait(self, step: int, call: Callable[[], Future[T]]) -> Future[T]:
        """What ``call`` will answer, which is made when ``step`` opens."""
        future: Future[T] = Future()
        self._calls.append((step, lambda: chain(call(), future)))
        return future

    def take(self, step: int) -> list[Callable[[], None]]:
        """The calls that ``step``, which opens, lets in."""
        ready = [call for at, call in self._calls if at <= step]
        self._calls = [(at, call) for at, call in self._calls if at > step]
        return ready

    def take_all(self) -> list[Callable[[], None]]:
        """All of them: no step will open any more."""
        calls, self._calls = self._calls, []
        return [call for _, call in calls]
