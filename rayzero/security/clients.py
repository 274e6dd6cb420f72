"""Addresses of processes, and clients that were refused.

An address is a host, perhaps with a port. An IPv6 address before a port is in brackets.
"""

from __future__ import annotations

import ipaddress
import logging
import math
from time import monotonic

from rayzero.quantities import count
from rayzero.telemetry.names import REFUSED
from rayzero.telemetry.recorder import Recorder

WARN_EVERY_S = 10.0  # a client that keeps trying must not fill the log

log = logging.getLogger(__name__)


def host_of(address: str) -> str:
    """The host, without brackets."""
    if address.startswith("["):
        return address.rpartition("]")[0].removeprefix("[")
    return address.partition(":")[0] if address.count(":") == 1 else address


def host_and_port(address: str) -> tuple[str, int]:
    """Both; the host without brackets. Raises ValueError without a port."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether an address is reached from its own host only."""
    host = host_of(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Refusals:
    """Counts clients that were refused or cut (``rayzero_refused_total``), and warns of them at most once in
    ``WARN_EVERY_S``, with the number since.

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
