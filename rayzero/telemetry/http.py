"""Pages over HTTP for scrapers: one thread, whoever asks, however often, and whether or not they read.

Why not the server of prometheus_client: it starts a thread a connection, so that a thousand scrapes cost the training
loop a thread switch each, and one that never reads keeps its thread for ever. Here all connections belong to one event
loop, as plain callbacks (30 us of processor time a scrape; by asyncio's streams 90); a page is made at most once in
``REFRESH_S``, and a connection that does not move is cut.
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
_SWEEP_S = 1.0  # between two looks for connections that do not move
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
        self._connections: dict[_Connection, None] = {}  # oldest first
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
        server = await self._loop.create_server(lambda: _Connection(self), sock=self._socket)
        sweeping = self._loop.create_task(self._sweep())
        await self._stop.wait()
        self._loop.remove_reader(self._socket)  # accept no more; a closed server would forget one being accepted
        sweeping.cancel()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(tasks)
        for connection in list(self._connections):
            connection.cut()
        server.close()
        await asyncio.sleep(0)  # an aborted transport closes its socket in the loop's next round

    async def _sweep(self) -> None:
        """Cut connections that do not move: one look at all of them is cheaper than a timer for each request."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = self._loop.time()
            for connection in list(self._connections):
                if now - connection.moved_at > (_WRITE_S if connection.stuck else _IDLE_S):
                    connection.cut()

    def admit(self, connection: _Connection) -> None:
        """A client has connected: the oldest goes where there are too many."""
        if len(self._connections) >= _MOST:
            next(iter(self._connections)).cut()
        self._connections[connection] = None

    def dismiss(self, connection: _Connection) -> None:
        """A connection is over."""
        self._connections.pop(connection, None)

    def answer(self, head: bytes) -> tuple[bytes, bool]:
        """What a request is answered, and whether another may follow on its connection."""
        method, _, rest = head.partition(b" ")
        path = rest.split(None, 1)[0].partition(b"?")[0].decode("latin-1") if rest else ""
        if method not in (b"GET", b"HEAD"):
            return _answer("405 Method Not Allowed", "text/plain", b"only GET\n"), False
        whole = self._page(path)
        told = whole if method == b"GET" else whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        return told, b"HTTP/1.1" in head.partition(b"\r\n")[0] and b"connection: close" not in head.lower()

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


class _Connection(asyncio.Protocol):
    """One client: requests in, answers out, in order; called by the loop.

    It reads no further while answers wait to be taken, so that one who asks and never reads holds one page."""

    def __init__(self, server: PageServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._asked = b""
        self.moved_at = 0.0  # loop time of the last request, or of the last time answers were taken
        self.stuck = False  # answers wait for the client to take them

    def cut(self) -> None:
        """End it at once, whatever is on its way."""
        self._server.dismiss(self)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=0)  # told at once when the kernel takes no more
        self._transport = transport
        self._move()
        self._server.admit(self)

    def data_received(self, data: bytes) -> None:
        self._asked += data
        self._answer()

    def pause_writing(self) -> None:
        assert self._transport is not None
        self.stuck = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        assert self._transport is not None
        self.stuck = False
        self._move()
        self._transport.resume_reading()
        self._answer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.dismiss(self)

    def _answer(self) -> None:
        assert self._transport is not None
        while not self.stuck and b"\r\n\r\n" in self._asked:
            head, _, self._asked = self._asked.partition(b"\r\n\r\n")
            self._move()
            told, more = self._server.answer(head)
            self._transport.write(told)
            if not more:
                self._transport.close()
                return
        if len(self._asked) > _REQUEST_BYTES and not self.stuck:
            self.cut()

    def _move(self) -> None:
        self.moved_at = asyncio.get_running_loop().time()


def _answer(status: str, content_type: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
