"""Servers that do not answer as an exporter does."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

HOST = "127.0.0.1"


@contextmanager
def served_by(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A port of whose first connection ``answer`` does what it likes; its address."""
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"{HOST}:{server.getsockname()[1]}"
    thread.join(10)


@contextmanager
def nobody() -> Iterator[str]:
    """An address that nobody listens at, nor anybody else can while this lasts."""
    with socket.socket() as place:
        place.bind((HOST, 0))
        yield f"{HOST}:{place.getsockname()[1]}"


def drip(connection: socket.socket) -> None:
    """A byte now and then, for ever."""
    while True:
        connection.sendall(b"H")
        time.sleep(0.01)
