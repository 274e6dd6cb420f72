"""Logs the progress of making slabs: at a few GB/s, those of a large model take a minute before training starts."""

from __future__ import annotations

import logging
from time import monotonic

from rayzero.quantities import format_bytes

log = logging.getLogger(__name__)

_QUICK_S = 1.0  # nothing is logged before
_SAY_EVERY_S = 5.0


class FillProgress:
    """Logs a line once making takes more than a second, then every few seconds, then at the end. A ``Progress``
    (slabs/slab.py), for one call of ``create_slabs``."""

    def __init__(self, who: str) -> None:
        """``who``: the maker's name in the log."""
        self._who, self._began = who, monotonic()
        self._next = self._began + _QUICK_S

    def __call__(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes are made."""
        now, told = monotonic(), self._next > self._began + _QUICK_S
        if now < self._next and not (done == total and told):
            return
        self._next = now + _SAY_EVERY_S
        speed = done / (now - self._began) / 1e9
        log.info(
            "%s has made %s of %s of shared memory, %.1f GB/s",
            self._who,
            format_bytes(done),
            format_bytes(total),
            speed,
        )
