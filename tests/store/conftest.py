"""What every suite of the stores' conformance runs over, and shared memory of a test's own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayzero.slabs.sweep import SHARED_MEMORY
from store.stores import STORES, StoreFactory

FIRST_TIER = ("inprocess", "shm", "sums", "mixed-relay")  # each way that bytes go is in one of them


@pytest.fixture(params=[pytest.param(s, marks=[] if s in FIRST_TIER else [pytest.mark.thorough]) for s in STORES])
def make_stores(request: pytest.FixtureRequest) -> StoreFactory:
    """One store after the other."""
    return STORES[request.param]


@pytest.fixture
def slab_dir() -> Iterator[Path]:
    """A folder in shared memory where no other test's sweep comes."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-") as directory:
        yield Path(directory)
