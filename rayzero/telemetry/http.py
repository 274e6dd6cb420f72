"""Serves pages to scrapers over HTTP from one thread, however many clients ask and whether or not they read. And
decides who may read them: by a certificate, a password, or the token of the run's own tools.

All connections belong to one event loop, as plain callbacks (50 us of processor time a scrape; by asyncio's streams
90). A page is made at most once in ``REFRESH_S``, and a connection that does not move is cut. The server of
prometheus_client starts a thread for each connection, and one that never reads keeps its thread for ever.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import importlib
import ipaddress
import logging
import os
import re
import socket
import ssl
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any
from weakref import WeakSet

from rayzero.errors import ConfigError

REST = 9  # a wrong password is followed by a rest, as many times as long as its comparison: guesses take 1/10 of a core

_AUTHORIZATION = re.compile(rb"\r\nauthorization:[ \t]*([^\r\n]*)", re.IGNORECASE)
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """What an exporter asks of its clients. Travels to every process of a run."""

    certificate: bytes | None = None  # PEM, perhaps with its chain; None: connections are plain
    key: bytes | None = field(default=None, repr=False)  # PEM
    clients: bytes = b""  # PEM: authorities of clients' certificates; empty: clients are asked for none
    requires_client: bool = False  # whether a client without a certificate is cut
    versions: tuple[str, str] = ("TLS12", "TLS13")
    users: Mapping[str, str] = field(default_factory=dict)  # name -> bcrypt hash of the password
    token: str | None = field(default=None, repr=False)  # the run's own tools have it; None: nobody is asked who it is

    @property
    def scheme(self) -> str:
        return "http" if self.certificate is None else "https"

    def context(self) -> ssl.SSLContext | None:
        """For servers; None: no TLS. Raises ValueError, and ssl.SSLError (an OSError), for what cannot be used."""
        if self.certificate is None or self.key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version, context.maximum_version = (_VERSIONS[name] for name in self.versions)
        load_pair(context, self.certificate + b"\n" + self.key)
        if self.clients:
            context.load_verify_locations(cadata=self.clients.decode("ascii"))
            context.verify_mode = ssl.CERT_REQUIRED if self.requires_client else ssl.CERT_OPTIONAL
        return context


def load_pair(context: ssl.SSLContext, pem: bytes) -> None:
    """Let a context show a certificate. ``pem``: with its key. Python only takes files, and this one is in memory.
    Raises ssl.SSLError or ValueError if they do not fit, or the key has a password."""
    handle = os.memfd_create("rayzero-certificate", os.MFD_CLOEXEC)
    try:
        os.write(handle, pem)
        context.load_cert_chain(f"/proc/self/fd/{handle}", password=lambda: b"")
    finally:
        os.close(handle)


def require_bcrypt() -> Any:
    """The package that compares passwords. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module("bcrypt")
    except ImportError as error:
        raise ConfigError(
            "run.telemetry.web_config has basic_auth_users, which needs the package bcrypt on every host; "
            "pip install 'rayzero[metrics]'"
        ) from error


class Guard:
    """Answers whether a request may be answered; knows nothing of pages.

    A password that was right is remembered, as a salted digest: comparing it takes some 50 ms, and Prometheus asks each
    second. Wrong ones are compared one after the other in a thread of their own, with rests."""

    def __init__(self, protection: Protection) -> None:
        """Raises ConfigError if passwords cannot be compared here."""
        self.tls = protection.context()
        self._token = None if protection.token is None else f"Bearer {protection.token}".encode()
        self._users = dict(protection.users)
        self._bcrypt = require_bcrypt() if self._users else None
        self._salt, self._right = os.urandom(16), set[bytes]()  # digests of names and passwords
        self._ended = threading.Event()
        self.comparing = ThreadPoolExecutor(1, "rayzero-passwords")

    def renew(self, protection: Protection) -> None:
        """Show and believe these certificates from the next handshake on; all else stays. Any thread may call it."""
        self.tls = protection.context()

    def admits(self, head: bytes) -> bool | None:
        """Whether the request with this head may be answered; None: ``compare`` says."""
        if self._token is None:
            return True
        found = _AUTHORIZATION.search(head)
        if found is None:
            return False
        if hmac.compare_digest(found[1].strip(), self._token):
            return True
        shown = _password(found[1]) if self._users else None
        if shown is None:
            return False
        return True if self._digest(shown) in self._right else None

    def compare(self, head: bytes) -> bool:
        """Whether the password in a head is its user's; slow. Runs in ``comparing``."""
        found = _AUTHORIZATION.search(head)
        shown = None if found is None else _password(found[1])
        if shown is None or self._bcrypt is None:
            return False
        began = time.monotonic()
        name, _, password = shown.partition(b":")
        known = self._users.get(name.decode(errors="replace"))
        against = known or next(iter(self._users.values()))  # an unknown name takes as long as a wrong password
        right = bool(self._bcrypt.checkpw(password[:72], against.encode())) and known is not None  # bcrypt reads 72
        if right:
            self._right.add(self._digest(shown))
        else:
            self._ended.wait(REST * (time.monotonic() - began))
        return right

    def _digest(self, shown: bytes) -> bytes:
        return sha256(self._salt + shown).digest()

    def close(self) -> None:
        """Compare nothing more. Idempotent."""
        self._ended.set()
        self.comparing.shutdown(wait=False, cancel_futures=True)


def _password(said: bytes) -> bytes | None:
    """The name and password, with a colon between them, of a header's value; None: there are none."""
    kind, _, encoded = said.strip().partition(b" ")
    if kind.lower() != b"basic":
        return None
    try:
        shown = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        return None
    return shown if b":" in shown and b"\0" not in shown else None


REFRESH_S = 1.0  # a page requested again within this time is not made again
IDLE_S = 150.0  # between two requests of a connection; Prometheus keeps them open, and asks once a minute
WRITE_S = 10.0  # to take an answer
HANDSHAKE_S = 5.0  # for a TLS handshake
MOST = 64  # connections; the oldest is cut for a new one
REQUEST_BYTES = 8 << 10  # of one request
LAST_PORT = 65_535

_SWEEP_S = 1.0  # between two looks for connections that do not move
_PATH_ENDS = re.compile(rb"[ ?\r]")
_HOST = re.compile(rb"\r\nhost:([^\r\n]*)", re.IGNORECASE)
_PORT = re.compile(r":\d*$")


def _answer(status: str, body: bytes, content_type: str = "text/plain", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\n{more}Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


_REFUSED = _answer("405 Method Not Allowed", b"only GET\n")
_UNKNOWN_CLIENT = _answer("401 Unauthorized", b"Unauthorized\n", more="WWW-Authenticate: Basic\r\n")
_FOREIGN_NAME = _answer("421 Misdirected Request", b"served on loopback: ask 127.0.0.1 or localhost\n")

Refused = Callable[[str, str, str], None]  # reason, client, why

_listening: WeakSet[socket.socket] = WeakSet()  # of this process

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Page:
    """The page at one path."""

    content_type: str
    make: Callable[[], bytes]  # must be quick and not wait

    def answer(self, path: str) -> bytes:
        """The page as it is now. If making it fails, the answer says so, and the error is logged."""
        try:
            return _answer("200 OK", self.make(), self.content_type)
        except BaseException as error:  # whatever a source raises: the answer reports it, training and the server go on
            log.exception("cannot make %s", path)
            said = "".join(traceback.format_exception_only(error))  # even an error whose text cannot be made
            return _answer("500 Internal Server Error", said.encode(errors="backslashreplace"))


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
        self._made: dict[str, tuple[float, bytes]] = {}  # path -> when, answer
        self._connections: dict[_Connection, None] = {}  # oldest first
        self._socket = listening
        self._is_on_loopback = ipaddress.ip_address(listening.getsockname()[0]).is_loopback
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self.closing = False  # many pages may be made one after the other: looked at between them
        name = f"rayzero-exporter-{listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cut every connection and free the port. Idempotent."""
        self.closing = True
        if self._thread.is_alive():
            with suppress(RuntimeError):  # another thread closes it too, and the loop has ended
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        if self.guard is not None:
            self.guard.close()

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
        for connection in list(self._connections):
            connection.stop_waiting()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(tasks)
        for connection in list(self._connections):
            connection.cut()
        _end(self._socket)
        server.close()
        await asyncio.sleep(0)  # an aborted transport closes its socket in the loop's next round

    async def _sweep(self) -> None:
        """Cut connections without progress: one check of all of them is cheaper than a timer per request."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = self._loop.time()
            for connection in list(self._connections):
                if connection.owes and now - connection.moved_at > WRITE_S:
                    connection.refuse("slow", f"it does not read its answer for {WRITE_S:g} s")
                elif now - connection.moved_at > IDLE_S:
                    connection.cut()

    def admit(self, connection: _Connection) -> None:
        """A client has connected; if there are too many, cut the oldest."""
        if len(self._connections) >= MOST:
            next(iter(self._connections)).refuse("limit", f"{MOST} are connected, and it is the oldest")
        self._connections[connection] = None

    def dismiss(self, connection: _Connection) -> None:
        self._connections.pop(connection, None)

    def misses(self, head: bytes) -> bool:
        """Whether a request is for somebody else's name."""
        return self._is_on_loopback and not all(map(_is_loopback, _HOST.findall(head)))

    def answer(self, head: bytes) -> tuple[bytes, bool]:
        """(the answer to a request, whether another request may follow on its connection)."""
        method, _, rest = head.partition(b" ")
        path = _PATH_ENDS.split(rest, 1)[0].decode("latin-1")
        if method not in (b"GET", b"HEAD") or b"\0" in head:
            return _REFUSED, False
        made, page = self._made.get(path), self._pages.get(path)
        if page is None:
            whole = _answer("404 Not Found", f"there is {', '.join(self._pages)}\n".encode())
        elif made is not None and time.monotonic() - made[0] < REFRESH_S:
            whole = made[1]
        else:
            began, whole = time.monotonic(), page.answer(path)
            self._made[path] = (began, whole)
        told = whole if method == b"GET" else whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        return told, b"HTTP/1.1" in head.partition(b"\r\n")[0] and b"connection: close" not in head.lower()


class _Connection(asyncio.Protocol):
    """One client: requests in, answers out, in order; called by the loop.

    It stops reading while answers wait to be sent, so that a client that asks and never reads holds only one page."""

    def __init__(self, server: PageServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None  # over TLS, if there is a guard that wants it
        self._below: asyncio.Transport | None = None  # the same without TLS
        self._client = ""  # its address
        self._asked = b""
        self._waits_for: asyncio.Future[Any] | None = None  # a handshake, or the comparison of a password
        self.moved_at = 0.0  # loop time of the last request, or of the last time answers were taken
        self.stuck = False  # answers wait for the client to take them

    def cut(self) -> None:
        """End the connection at once, even with data in flight."""
        self._server.dismiss(self)
        self.stop_waiting()
        if self._transport is not None:
            _end(self._transport.get_extra_info("socket"))
            self._transport.abort()

    def refuse(self, reason: str, why: str) -> None:
        self._server.refused(reason, self._client, why)
        self.cut()

    @property
    def owes(self) -> bool:
        """Whether the client has not taken all of its answers. (TLS passes a whole page on before it pauses.)"""
        return self.stuck or (self._below is not None and self._below.get_write_buffer_size() > 0)

    def stop_waiting(self) -> None:
        if self._waits_for is not None:
            self._waits_for.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=0)  # call pause_writing as soon as the kernel takes no more
        self._transport = self._below = transport
        self._client = str((transport.get_extra_info("peername") or ("an unknown address",))[0])
        self._move()
        self._server.admit(self)
        guard = self._server.guard
        if guard is not None and guard.tls is not None and not self._server.closing:
            transport.pause_reading()
            self._waits_for = asyncio.ensure_future(self._shake_hands(transport, guard.tls))

    async def _shake_hands(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        try:
            secured = await loop.start_tls(
                transport, self, tls, server_side=True, ssl_handshake_timeout=HANDSHAKE_S, ssl_shutdown_timeout=WRITE_S
            )
        except OSError:  # it speaks no TLS, shows no certificate, or says nothing
            secured = None
        self._waits_for = None
        if secured is None:
            self.refuse("handshake", "it ended no TLS handshake with what is asked for here")
            return
        secured.set_write_buffer_limits(high=1)  # 0 would pause it for ever: TLS pauses at the limit, not above
        self._transport = secured
        self._move()
        self._answer()  # a request may have come with the handshake's end

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
        self.stop_waiting()
        if self._transport is not None:
            self._transport.close()  # of TLS, which does not know yet

    def _answer(self) -> None:
        assert self._transport is not None
        while b"\r\n\r\n" in self._asked and not (self.stuck or self._waits_for or self._server.closing):
            head, _, self._asked = self._asked.partition(b"\r\n\r\n")
            if self._server.misses(head):
                self._turn_away("host", "it asks for the name of another host", _FOREIGN_NAME)
                return
            guard = self._server.guard
            admitted = True if guard is None else guard.admits(head)
            if guard is not None and admitted is None:
                compared = asyncio.get_running_loop().run_in_executor(guard.comparing, guard.compare, head)
                self._waits_for = compared
                compared.add_done_callback(partial(self._compared, head))
                return
            self._reply(head, admitted is True)
        if len(self._asked) > REQUEST_BYTES and not self.stuck:
            self.refuse("nonsense", f"its request has more than {REQUEST_BYTES:,} bytes")

    def _compared(self, head: bytes, right: asyncio.Future[bool]) -> None:
        assert self._transport is not None
        if not right.cancelled() and not self._transport.is_closing():
            self._waits_for = None
            self._reply(head, right.result())
            self._answer()

    def _reply(self, head: bytes, admitted: bool) -> None:
        if admitted:
            self._write(*self._server.answer(head))
        else:
            self._turn_away("password", "it shows no password that opens this exporter", _UNKNOWN_CLIENT)

    def _turn_away(self, reason: str, why: str, told: bytes) -> None:
        self._server.refused(reason, self._client, why)
        self._write(told, more=False)

    def _write(self, told: bytes, more: bool) -> None:
        assert self._transport is not None
        self._move()
        self._transport.write(told)
        if not more:
            self._asked = b""  # it would be answered once this answer is taken
            self._transport.close()

    def _move(self) -> None:
        self.moved_at = asyncio.get_running_loop().time()


def _is_loopback(named: bytes) -> bool:
    """Whether the value of a Host header means this host by itself, at any port."""
    name = _PORT.sub("", named.decode("latin-1").strip()).strip("[]").lower()
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
