"""What waits for a thread travels with its like."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import pytest

from rayzero.store.host.transfer_calls import BATCH_BYTES, Batches


@dataclass(frozen=True)
class Parcel:
    name: str
    size: int = 10
    kind: str = "v1"


class Shelf(Executor):
    """Threads that begin when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], Any]] = []
        self.closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self.jobs.append(lambda: fn(*args, **kwargs))
        return Future()

    def run(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()


def moved(*rounds: list[Parcel]) -> list[str]:
    """The batches, each as the names in it, when the threads are free between rounds."""
    shelf, batches = Shelf(), list[str]()
    queue = Batches[Parcel](shelf, lambda parts: batches.append("".join(part.name for part in parts)))
    for parcels in rounds:
        for parcel in parcels:
            queue.add(parcel)
        shelf.run()
    return batches


def test_what_waits_for_a_thread_goes_together_in_order() -> None:
    assert moved([Parcel("a")], [Parcel("b"), Parcel("c"), Parcel("d")]) == ["a", "bcd"]


def test_only_one_kind_travels_together() -> None:
    assert moved([Parcel("a"), Parcel("b", kind="v2"), Parcel("c", kind="v2"), Parcel("d")]) == ["a", "bc", "d"]


def test_a_batch_is_bounded_and_what_is_larger_goes_alone() -> None:
    half, big = BATCH_BYTES // 2, BATCH_BYTES + 1
    assert moved([Parcel("a", half), Parcel("b", half), Parcel("c", 1), Parcel("d", big), Parcel("e")]) == [
        "ab",
        "c",
        "d",
        "e",
    ]


def test_an_owner_that_stands_still_holds_one_thread() -> None:
    shelf, batches = Shelf(), list[str]()
    queue = Batches[Parcel](shelf, lambda parts: batches.append("".join(part.name for part in parts)))

    def take(parts: list[Parcel]) -> None:
        for name in "bcd":  # while the first batch is under way
            stopped.add(Parcel(name))
        assert shelf.jobs == []

    stopped = Batches[Parcel](shelf, take)
    stopped.add(Parcel("a"))
    assert len(shelf.jobs) == 1
    shelf.jobs.pop()()
    assert len(shelf.jobs) == 1, "one thread is asked for once there is more to move"
    queue.add(Parcel("x"))
    shelf.jobs.pop()()
    assert batches == ["x"]


def test_what_was_added_before_the_threads_end_still_goes() -> None:
    shelf, batches = Shelf(), list[str]()

    def move(parts: list[Parcel]) -> None:
        batches.append("".join(part.name for part in parts))
        if batches == ["a"]:
            queue.add(Parcel("b"))
            shelf.closed = True

    queue = Batches[Parcel](shelf, move)
    queue.add(Parcel("a"))
    shelf.run()
    assert batches == ["a", "b"]
    with pytest.raises(RuntimeError):
        queue.add(Parcel("c"))
