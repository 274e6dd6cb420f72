"""What holds for every test."""

from __future__ import annotations

import gc
import os

from hypothesis import settings

os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112 - Ray ends processes where others fill the machine
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - 15 is Ray's: its workers starve beside the other parts' tests

settings.register_profile("rayzero", settings(), deadline=None)  # a loaded machine is no failure
settings.load_profile("rayzero")


def pytest_collection_finish() -> None:
    """Let no garbage collection look through the thousands of collected tests and the libraries again: code under test
    asks for collections, and each took 0.2-1 s."""
    gc.collect()
    gc.freeze()
