"""Counts clients that were refused or cut, and warns of them now and then."""

from __future__ import annotations

import logging
import math
from time import monotonic

from rayzero.quantities import count
from rayzero.telemetry.names import REFUSED
from rayzero.telemetry.recorder import Recorder

WARN_EVERY_S = 10.0  # a client that keeps trying must not fill the log

log = logging.getLogger(__name__)


class Refusals:
    """Counts in ``rayzero_refused_total`` and logs, each at most once in ``WARN_EVERY_S``, with the number since.

    Used by one thread. Knows no protocol."""

    def __init__(self, door: str, recorder: Recorder) -> None:
        """``door``: where clients come in, see ``names.REFUSED``."""
        self._door, self._recorder = door, recorder
        self._untold, self._told = 0, -math.inf  # since the last warning; time of that warning

    def note(self, reason: str, client: str, why: str) -> None:
        """One more. ``reason``: see ``names.REFUSED``. ``client``: its address. ``why``: in words."""
        self._recorder.add(REFUSED, door=self._door, reason=reason)
        self._untold += 1
        if monotonic() - self._told >= WARN_EVERY_S:
            what = count(self._untold, "call" if self._door == "owner" else "client")
            log.warning("refused %s, the last from %s: %s", what, client, why)
            self._untold, self._told = 0, monotonic()
