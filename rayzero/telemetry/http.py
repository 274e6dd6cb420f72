"""Pages over HTTP for scrapers: one thread, whoever asks, however often, and whether or not they read.

Why not the server of prometheus_client: it starts a thread a connection, so that a thousand scrapes cost the training
loop a thread switch each, and one that never reads keeps its thread for ever. Here all connections are tasks of one
event loop; a page is made at most once in ``REFRESH_S``, and a connection that does not move is cut.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

REFRESH_S = 1.0  # a page asked for again within that time is not made anew
_IDLE_S = 60.0  # between two requests of a connection; Prometheus keeps them open
_WRITE_S = 10.0  # to take an answer
_MOST = 64  # connections; the oldest is cut for a new one
_REQUEST_BYTES = 8 << 10

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Page:
    """What is at one path."""

    content_type: str
    make: Callable[[], bytes]  # quick, waits for nothing


class PageServer:
    """Serves pages on one port until ``close``.

    Knows paths and connections; not what pages say. A page whose making fails answers 500 and is logged."""

    def __init__(self, host: str, port: int, pages: Mapping[str, Page]) -> None:
        """Listen on ``port`` (0: any free one). Raises OSError where that cannot be."""
        self._pages = dict(pages)
        self._made: dict[str, tuple[float, bytes]] = {}  # path -> when, answer
        self._writers: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._socket = socket.create_server((host, port), family=_family(host), backlog=128)
        bound = self._socket.getsockname()[1]
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"rayzero-exporter-{bound}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cut every connection and free the port. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, sock=self._socket, limit=_REQUEST_BYTES)
        await self._stop.wait()
        self._loop.remove_reader(self._socket)  # accept no more; a closed server would forget one being accepted
        for writer in list(self._writers):
            writer.transport.abort()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(tasks)
        server.close()
        await asyncio.sleep(0)  # an aborted transport closes its socket in the loop's next round

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._stop.is_set():
            writer.transport.abort()
            return
        if len(self._writers) >= _MOST:
            next(iter(self._writers)).transport.abort()
        self._writers[writer] = None
        try:
            while await self._answer(reader, writer):
                pass
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            log.debug("a scraper of %s went away", self.address)
        finally:
            del self._writers[writer]
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether another may follow."""
        async with asyncio.timeout(_IDLE_S):
            head = await reader.readuntil(b"\r\n\r\n")
        method, _, rest = head.partition(b" ")
        path = rest.split(None, 1)[0].partition(b"?")[0].decode("latin-1") if rest else ""
        if method not in (b"GET", b"HEAD"):
            writer.write(_answer("405 Method Not Allowed", "text/plain", b"only GET\n"))
            return False
        whole = self._page(path)
        writer.write(whole if method == b"GET" else whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
        async with asyncio.timeout(_WRITE_S):
            await writer.drain()
        return b"HTTP/1.1" in head.partition(b"\r\n")[0] and b"connection: close" not in head.lower()

    def _page(self, path: str) -> bytes:
        page = self._pages.get(path)
        if page is None:
            return _answer("404 Not Found", "text/plain", f"there is {', '.join(self._pages)}\n".encode())
        made = self._made.get(path)
        if made is None or time.monotonic() - made[0] >= REFRESH_S:
            made = self._made[path] = (time.monotonic(), self._make(path, page))
        return made[1]

    def _make(self, path: str, page: Page) -> bytes:
        try:
            return _answer("200 OK", page.content_type, page.make())
        except Exception as error:  # whatever a source raises: scrapers are told, training goes on
            log.exception("cannot make %s", path)
            return _answer("500 Internal Server Error", "text/plain", f"{type(error).__name__}: {error}\n".encode())


def _answer(status: str, content_type: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
