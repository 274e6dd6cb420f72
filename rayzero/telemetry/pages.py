"""Pages for scrapers, as HTTP answers; who serves them is telemetry/http.py."""

from __future__ import annotations

import logging
import socket
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

REFRESH_S = 1.0  # a page asked for again within that time is not made anew
IDLE_S = 150.0  # between two requests of a connection; Prometheus keeps them open, and asks once a minute
WRITE_S = 10.0  # to take an answer
MOST = 64  # connections; the oldest is cut for a new one: also in native/pages.c
REQUEST_BYTES = 8 << 10  # of one request: also in native/pages.c

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Page:
    """What is at one path."""

    content_type: str
    make: Callable[[], bytes]  # quick, waits for nothing

    def answer(self, path: str) -> bytes:
        """The page as it is now; where making it fails, that is what the answer says, and is logged."""
        try:
            return _answer("200 OK", self.content_type, self.make())
        except BaseException as error:  # whatever a source raises: scrapers are told, training and the server go on
            log.exception("cannot make %s", path)
            said = "".join(traceback.format_exception_only(error))  # even of one that cannot say what it is
            return _answer("500 Internal Server Error", "text/plain", said.encode(errors="backslashreplace"))


REFUSED = b"HTTP/1.1 405 Method Not Allowed\r\nContent-Type: text/plain\r\nContent-Length: 9\r\n\r\nonly GET\n"


def unknown(pages: Mapping[str, Page]) -> bytes:
    """What is said of a path that is not there."""
    return _answer("404 Not Found", "text/plain", f"there is {', '.join(pages)}\n".encode())


def end(connection: socket.socket) -> None:
    """End a connection, or listening, though a process forked off (a loader of data) holds the socket open too."""
    with suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


def head_of(answer: bytes) -> bytes:
    """Status and headers."""
    return answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


def _answer(status: str, content_type: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
