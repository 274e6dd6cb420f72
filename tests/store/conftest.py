"""What every suite of the stores' conformance runs over."""

from __future__ import annotations

import pytest

from store.stores import STORES, StoreFactory


@pytest.fixture(params=list(STORES))
def make_stores(request: pytest.FixtureRequest) -> StoreFactory:
    """One store after the other."""
    return STORES[request.param]
