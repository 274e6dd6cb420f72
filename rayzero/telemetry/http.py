"""Serves pages to scrapers over HTTP from one thread, however many clients ask and whether or not they read.

aiohttp speaks HTTP, on an event loop of that thread (60 us of processor time a scrape, and 7 MiB of a process). What
is ours is who may connect, and how long a client may take. The server of prometheus_client starts a thread for each
connection, and one that never reads keeps its thread for ever.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakSet

from aiohttp import web

from rayzero.telemetry.pages import Guard, Page, Refused

REFRESH_S = 1.0  # a page requested again within this time is not made again
IDLE_S = 150.0  # between two requests of a connection; Prometheus keeps them open, and asks once a minute
WRITE_S = 10.0  # between two bytes of an answer that a client takes
HANDSHAKE_S = 5.0  # for a TLS handshake
MOST = 64  # connections; the oldest is cut for a new one
LAST_PORT = 65_535

_RETRY_S = 1.0  # after which a process that had no descriptor for a connection looks again
_PORT = re.compile(r":\d*$")


class Answer(NamedTuple):
    """What a request gets."""

    status: int
    body: bytes
    content_type: str = "text/plain"


_UNKNOWN_CLIENT = Answer(401, b"Unauthorized\n")
_FOREIGN_NAME = Answer(421, b"served on loopback: ask 127.0.0.1 or localhost\n")

_listening: WeakSet[socket.socket] = WeakSet()  # of this process

log = logging.getLogger(__name__)


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """A listening socket (``port`` 0: any free one) and its host:port. Raises OSError if it cannot listen."""
    if port > LAST_PORT:
        raise OSError(f"ports end at {LAST_PORT}")  # the socket module raises an OverflowError, and leaks the socket
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=128)
    _listening.add(listening)
    bound = listening.getsockname()[1]
    return listening, f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"


def _close_in_child() -> None:
    """A forked process (a data loader) may outlive this one, and would keep the port from its successor."""
    for listening in list(_listening):
        listening.close()


os.register_at_fork(after_in_child=_close_in_child)


class PageServer:
    """Serves pages until ``close``; on loopback, only to requests for a name of loopback. A page of the web whose name
    was made to mean 127.0.0.1 (DNS rebinding) would else read ours with the browser of somebody on this host.

    Knows paths and connections; not the content of pages."""

    def __init__(
        self,
        listening: socket.socket,
        pages: Mapping[str, Page],
        guard: Guard | None = None,
        refused: Refused = lambda reason, client, why: None,
    ) -> None:
        """``listening``: the server owns it from now on, as it does ``guard``; None: everybody may read. ``refused``:
        called in the server's thread with each client that is refused or cut, see ``names.REFUSED``."""
        self._pages, self.guard, self.refused = dict(pages), guard, refused
        self._made: dict[str, tuple[float, Answer]] = {}  # path -> when it was begun, and what it is
        self.connections: dict[socket.socket, str] = {}  # -> client; oldest first
        self._opening = set[asyncio.Task[None]]()
        self._socket = listening
        self._is_on_loopback = ipaddress.ip_address(listening.getsockname()[0]).is_loopback
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        name = f"rayzero-exporter-{listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cut every connection and free the port. Idempotent."""
        if self._thread.is_alive():
            with suppress(RuntimeError):  # another thread closes it too, and the loop has ended
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        if self.guard is not None:
            self.guard.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._server = web.Server(self._respond)
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._accept)
        await self._stop.wait()
        self._loop.remove_reader(self._socket)
        connections = [self._socket, *self.connections]
        for one in connections:
            _end(one)
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await asyncio.sleep(0)  # a closed transport closes its socket in the loop's next round
        for one in connections:  # perhaps nobody had begun to serve it
            one.close()

    def _accept(self) -> None:
        """Take a new connection; if there are too many, cut the oldest."""
        try:
            connection, (client, *_) = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has gone
            return
        except OSError:  # the process has no descriptor for it
            self._loop.remove_reader(self._socket)
            self._loop.call_later(_RETRY_S, self._loop.add_reader, self._socket, self._accept)
            return
        connection.setblocking(False)
        # The kernel cuts a client that takes nothing for so long, whatever lies between it and the page: TLS, too
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * WRITE_S))
        if len(self.connections) >= MOST:
            oldest = next(iter(self.connections))
            self.refused("limit", self.connections.pop(oldest), f"{MOST} are connected, and it is the oldest")
            _end(oldest)
        self.connections[connection] = client
        opening = self._loop.create_task(self._open(connection, client))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket, client: str) -> None:
        """Have aiohttp serve a connection, over TLS if there is a guard that wants it."""
        tls = None if self.guard is None else self.guard.tls
        limits = {} if tls is None else {"ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": WRITE_S}
        try:
            await self._loop.connect_accepted_socket(
                lambda: _Connection(self._server, self, connection), connection, ssl=tls, **limits
            )
        except OSError:  # it speaks no TLS, shows no certificate, or says nothing
            if self.connections.pop(connection, None) is not None:  # else it was cut for a newer one
                self.refused("handshake", client, "it ended no TLS handshake with what is asked for here")

    async def _respond(self, request: web.BaseRequest) -> web.Response:
        if self._is_on_loopback and not all(map(_is_loopback, request.headers.getall("Host", ()))):
            return self._turn_away(request, "host", "it asks for the name of another host", _FOREIGN_NAME)
        if self.guard is not None:
            shown = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            admitted = self.guard.admits(shown)
            if admitted is None:
                admitted = await self._loop.run_in_executor(self.guard.comparing, self.guard.compare, shown)
            if not admitted:
                return self._turn_away(
                    request, "password", "it shows no password that opens this exporter", _UNKNOWN_CLIENT
                )
        return _response(self._answer(request.method, request.path))

    def _turn_away(self, request: web.BaseRequest, reason: str, why: str, answer: Answer) -> web.Response:
        self.refused(reason, str(request.remote), why)
        response = _response(answer)
        response.force_close()
        return response

    def _answer(self, method: str, path: str) -> Answer:
        if method not in ("GET", "HEAD"):
            return Answer(405, b"only GET\n")
        page = self._pages.get(path)
        if page is None:
            return Answer(404, f"there is {', '.join(self._pages)}\n".encode())
        began, answer = self._made.get(path, (-math.inf, _FOREIGN_NAME))
        if time.monotonic() - began >= REFRESH_S:
            began, answer = time.monotonic(), _made(path, page)
            self._made[path] = (began, answer)
        return answer


class _Connection(web.RequestHandler):
    """A connection as aiohttp serves it; says why it refuses or loses its client."""

    __slots__ = ("_pages", "_socket")

    def __init__(self, server: web.Server, pages: PageServer, connection: socket.socket) -> None:
        settings: dict[str, Any] = {"keepalive_timeout": IDLE_S, "lingering_time": 0.0, "access_log": None}
        super().__init__(server, loop=asyncio.get_running_loop(), **settings)
        self._pages, self._socket = pages, connection

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        client = self._pages.connections.pop(self._socket, None)
        if client is not None and isinstance(exc, TimeoutError):
            self._pages.refused("slow", client, f"it does not read its answer for {WRITE_S:g} s")

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status != 400:
            return super().handle_error(request, status, exc, message)
        self._pages.refused("nonsense", str(request.remote), "it sends what is no request")
        response = _response(Answer(400, b"this is no request\n"))
        response.force_close()
        return response


def _made(path: str, page: Page) -> Answer:
    """A page as it is now. If making it fails, the answer says so, and the error is logged."""
    try:
        return Answer(200, page.make(), page.content_type)
    except BaseException as error:  # whatever a source raises: the answer reports it, training and the server go on
        log.exception("cannot make %s", path)
        said = "".join(traceback.format_exception_only(error))  # even an error whose text cannot be made
        return Answer(500, said.encode(errors="backslashreplace"))


def _response(answer: Answer) -> web.Response:
    headers = {"Server": "rayzero", "Content-Type": answer.content_type}
    if answer.status == 401:
        headers["WWW-Authenticate"] = "Basic"
    return web.Response(status=answer.status, body=answer.body, headers=headers)


def _is_loopback(named: str) -> bool:
    """Whether the value of a Host header means this host by itself, at any port."""
    name = _PORT.sub("", named).strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _end(connection: socket.socket) -> None:
    """Shut down a socket, even if a forked process (a data loader) also holds it open."""
    with suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)
