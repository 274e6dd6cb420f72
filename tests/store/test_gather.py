"""One future for several parts: cancelled once, although each part asks."""

from __future__ import annotations

import logging

import pytest

from rayzero.concurrency.futures import Gather


def test_parts_of_a_cancelled_future_are_not_done_and_nobody_complains(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    gather = Gather(3)
    assert gather.future.cancel()
    with caplog.at_level(logging.DEBUG):
        gather.run(lambda: done.append(0))
        gather.run(lambda: done.append(1))
        gather.end(OSError("the third part's owner is gone"))
    assert gather.future.cancelled()
    assert done == []
    assert caplog.records == []


def test_the_first_part_ends_the_time_to_cancel() -> None:
    gather = Gather(2)
    gather.run(lambda: None)
    assert not gather.future.cancel()
    gather.end(OSError("lost"))
    with pytest.raises(OSError, match="lost"):
        gather.future.result(0)
