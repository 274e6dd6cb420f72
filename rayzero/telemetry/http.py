"""Pages over HTTP for scrapers: one thread, whoever asks, however often, and whether or not they read.

Why not the server of prometheus_client: it starts a thread a connection, so that a thousand scrapes cost the training
loop a thread switch each, and one that never reads keeps its thread for ever. A page is made at most once in
``pages.REFRESH_S``, and a connection that does not move is cut.

Two servers do the same (one test suite): native_http.py, where its library was built, needs the interpreter lock when
a page is made and not for an answer; loop_http.py is Python alone. What an answer takes from a training loop is mostly
the lock's going to and fro, 0.1 ms each time: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Protocol

from rayzero.telemetry import native_http
from rayzero.telemetry.loop_http import LoopServer
from rayzero.telemetry.native_http import NativeServer
from rayzero.telemetry.pages import Page


class PageServer(Protocol):
    """Serves pages on one port until ``close``."""

    def close(self) -> None:
        """Cut every connection and free the port. Idempotent."""
        ...


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """A listening socket (``port`` 0: any free one) and its host:port. Raises OSError where that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=128)
    bound = listening.getsockname()[1]
    return listening, f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"


def serve_pages(listening: socket.socket, pages: Mapping[str, Page]) -> PageServer:
    """Serve on a listening socket, which is the server's from now on: the native way where there is one."""
    library = native_http.load()
    return LoopServer(listening, pages) if isinstance(library, str) else NativeServer(listening, pages, library)
