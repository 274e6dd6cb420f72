"""What a store page-locks for the copies of a CUDA rank: for its device, whichever one the calling thread is on."""

from __future__ import annotations

import gc

import pytest

from store.stores import STORES
from store.toy import make_spec
from tests.cuda_driver import OURS, Driver, driver

__all__ = ["driver"]


@pytest.mark.parametrize("name", STORES)
def test_memory_is_locked_for_the_ranks_device_and_given_back(name: str, driver: Driver) -> None:
    """The driver fails at what would make a context on device 0, where this thread is."""
    spec = make_spec(1, shard_numel=1024)
    with STORES[name](1, 2) as stores:
        stores[0].attach(spec, page_lock=OURS)
        windows = [stores[0].mapped(unit.index) for unit in spec.layout.units]
        gradients = 0 if name == "grpc" else 1  # one range; a rank alone adds nothing
        assert len(driver.registered) == gradients + sum(window is not None for window in windows)
    del windows, stores
    gc.collect()
    assert driver.registered == {}
    assert driver.devices.current() == 0


@pytest.mark.parametrize("name", STORES)
def test_without_a_device_nothing_is_locked(name: str, driver: Driver) -> None:
    with STORES[name](1, 2) as stores:
        stores[0].attach(make_spec(1))
        stores[0].mapped(0)
    assert driver.events == []
