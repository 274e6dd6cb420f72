"""Where a rank finds its owners."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rayzero.store.rank.remote import RemoteConnection


class OwnerTable:
    """The owners' addresses, which change when an owner gets a successor, and the connections that follow them.

    One a process: a rank's connections, one for each prepared model, learn of a successor together."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """``addresses``: by owner."""
        self._lock = threading.Lock()
        self._addresses = list(addresses)
        self._connections: list[RemoteConnection] = []

    def connect(self, make: Callable[[Sequence[str]], RemoteConnection]) -> RemoteConnection:
        """Make a connection by ``make(addresses)``, and let it follow later successors."""
        with self._lock:
            connection = make(self._addresses)
            self._connections.append(connection)
        return connection

    def succeed(self, owner: int, address: str) -> None:
        """The process of an owner has died; its successor is at ``address``. Does not block."""
        with self._lock:
            self._addresses[owner] = address
            for connection in self._connections:
                connection.succeed(owner, address)
