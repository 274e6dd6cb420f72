"""Every engine test runs on one thread, in debug mode (buffers swapped out are NaN), and leaves no context behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rayzero.engine.context import RankContext, running_in
from rayzero.engine.units.schedule import PrefetchPace


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setenv("RAYZERO_DEBUG", "1")


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """For runs in fixtures of a module: a thread that computes for the first time takes torch's global number of
    threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def alone() -> Iterator[RankContext]:
    """Rank 0 of 1 with an in-process store, closed at the end."""
    with running_in(RankContext()) as context:
        yield context


@pytest.fixture
def full_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefetches go as far as ``prefetch_buffer_size`` says, whatever was measured."""
    monkeypatch.setattr(PrefetchPace, "depth", lambda _, limit: limit)


@pytest.fixture(params=[False, True], ids=["copied", "mapped"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters in buffers of the rank's own, or where the owners write them."""
    monkeypatch.setenv("RAYZERO_DEBUG", "0" if request.param else "1")
