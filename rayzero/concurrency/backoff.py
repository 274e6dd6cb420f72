"""How long to wait before something that has failed is tried again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

_FIRST_S = 0.05
_MOST_S = 2.0


def backoff(draw: Callable[[], float] = random.random) -> Iterator[float]:
    """Seconds to wait before each next try: doubled each time, from 0.05 s to 2 s, less a random part of up to a half,
    so that many who failed together do not try again together. ``draw``: random numbers from 0 to 1."""
    most = _FIRST_S
    while True:
        yield most * (1 - draw() / 2)
        most = min(2 * most, _MOST_S)
