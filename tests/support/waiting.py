"""How tests wait for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(there: Callable[[], object], timeout_s: float = 60.0, what: str = "it did not come") -> None:
    """Wait for a condition. Only a fault lasts as long as the timeout."""
    deadline = time.monotonic() + timeout_s
    while not there():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
