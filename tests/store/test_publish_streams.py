"""What an owner has published reaches each listener once, and costs the update nothing while there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rayzero.protocol.messages import Published
from rayzero.store.owner.served_model import PublishStream, PublishStreams


class Loop:
    """An event loop that is woken and has not run yet."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def call_soon_threadsafe(self, call: Callable[..., object], *args: Any) -> None:
        self.calls.append(lambda: call(*args))

    def run(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


def heard(stream: PublishStream) -> list[tuple[int, int]]:
    """(shard, version) of what is new to a listener."""
    published, error = asyncio.run(asyncio.wait_for(stream.next(), 5))
    assert error is None
    return [(each.shard, each.version) for each in published]


def test_the_loop_is_woken_for_listeners_only_and_once_until_it_has_looked() -> None:
    loop = Loop()
    streams = PublishStreams(loop)  # type: ignore[arg-type]
    for version in range(3):
        streams.publish([Published(0, version, version), Published(1, version, version)])
    assert not loop.calls
    late = streams.open("rank 0")
    assert heard(late) == [(0, 2), (1, 2)]
    for shard in range(3):
        streams.publish([Published(shard, 3, 3)])
    assert len(loop.calls) == 1
    other = streams.open("rank 1")
    assert heard(late) == heard(other) == [(0, 3), (1, 3), (2, 3)]
    loop.run()
    streams.publish([Published(1, 4, 4)])
    loop.run()
    assert heard(late) == heard(other) == [(1, 4)]
    for stream in (late, other):
        streams.close(stream)
    streams.publish([Published(1, 5, 5)])
    assert not loop.calls
