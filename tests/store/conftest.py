"""What every suite of the stores' conformance runs over, and shared memory of a test's own."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from clock import StallClock

from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.store.host import waits
from store.stores import STORES, StoreFactory
from store.toy import WAIT

FIRST_TIER = ("inprocess", "shm", "sums", "mixed", "door")  # each way that bytes go is in one of them


def in_the_first_tier(test: str) -> set[str]:
    """The two of ``FIRST_TIER`` over which the first tier runs a test: two fifths of the tests run over each."""
    at = zlib.crc32(test.encode())
    return {FIRST_TIER[at % len(FIRST_TIER)], FIRST_TIER[(at + 1) % len(FIRST_TIER)]}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What holds for every store is tested over every one."""
    if "make_stores" in metafunc.fixturenames:
        early = in_the_first_tier(metafunc.function.__name__)
        found = [pytest.param(s, marks=[] if s in early else [pytest.mark.thorough]) for s in STORES]
        metafunc.parametrize("make_stores", found, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The bytes of the other four stores go in the ways of ``FIRST_TIER``'s, so over each of them a test has one of its
    cases in turn: each case over four stores at least, each test over all."""
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and "make_stores" in item.fixturenames:
            store = item.callspec.params["make_stores"]
            cases.setdefault((item.nodeid.partition("[")[0], store), []).append(item)
    others = [store for store in STORES if store not in FIRST_TIER]
    left_out = {
        item
        for (_, store), same in cases.items()
        if store in others
        for item in same
        if item is not same[others.index(store) % len(same)]
    }
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def make_stores(request: pytest.FixtureRequest) -> StoreFactory:
    """One store after the other."""
    return STORES[request.param]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What is entered here is left once the test has ended."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def slab_dir() -> Iterator[Path]:
    """A folder in shared memory where no other test's sweep comes."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-") as directory:
        yield Path(directory)


@pytest.fixture
def stall_clock(monkeypatch: pytest.MonkeyPatch) -> StallClock:
    """For stores of this process that are made after it."""
    clock = StallClock()
    monkeypatch.setattr(waits, "monotonic", clock)
    monkeypatch.setattr(waits, "_POLL_S", 0.05)  # between two looks
    monkeypatch.setattr(waits, "_ANSWER_S", (WAIT, WAIT))
    return clock
