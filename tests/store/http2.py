"""A client that speaks HTTP/2 by hand (RFC 9113): grpc's own ends what it begins."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable

OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, WINDOW = 0, 1, 3, 4, 6, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
_FRAME = 16384  # the most bytes of one, unless the server takes more


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content


def headers(path: str, metadata: Iterable[tuple[str, str]]) -> bytes:
    """As HPACK literals without an index (RFC 7541, 6.2.2)."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
    fields += [("content-type", "application/grpc"), ("te", "trailers"), *metadata]
    return b"".join(b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in field) for field in fields)


class UnendedCalls:
    """Calls on one connection, each of which sends a message but for its last byte, as far as the server lets it."""

    def __init__(self, address: str, path: str, metadata: Iterable[tuple[str, str]], calls: int, size: int) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._left = {2 * n + 1: size + 4 for n in range(calls)}  # bytes to send, by stream
        self._windows = dict.fromkeys(self._left, 65535)
        self._window, self._initial, self._received = 65535, 65535, b""
        self.largest_frame = _FRAME  # that the server takes
        self.sent, self.ended = 0, set[int]()  # bytes of bodies; streams that the server has ended
        opening = [OPENING + frame(SETTINGS, 0, 0)]
        block, prefix = headers(path, metadata), b"\0" + struct.pack(">I", size)
        self._prefixes = dict.fromkeys(self._left, prefix)
        opening += [frame(HEADERS, END_HEADERS, stream, block) for stream in self._left]
        self._socket.sendall(b"".join(opening))

    def send(self, most_bytes: int, quiet_s: float) -> None:
        """Send until the server lets nothing through and ends nothing for ``quiet_s``, or ``most_bytes`` are sent."""
        moved = time.monotonic()
        while time.monotonic() - moved < quiet_s and self.sent < most_bytes:
            before = self.sent, len(self.ended)
            for stream in list(self._left):
                self._send_some(stream)
            self._take(0.05)
            if (self.sent, len(self.ended)) != before:
                moved = time.monotonic()

    def _send_some(self, stream: int) -> None:
        room = min(self._windows[stream], self._window, self._left[stream], self.largest_frame)
        if room <= 5:  # the prefix goes in one piece
            return
        prefix = self._prefixes.pop(stream, b"")
        self._socket.sendall(frame(DATA, 0, stream, prefix + bytes(room - len(prefix))))
        self._windows[stream] -= room
        self._window -= room
        self._left[stream] -= room
        self.sent += room

    def _take(self, patience_s: float) -> None:
        """Take the frames that come within ``patience_s``, if any."""
        self._socket.settimeout(patience_s)
        try:
            while more := self._socket.recv(1 << 16):
                self._received += more
                if len(more) < 1 << 16:
                    break
        except TimeoutError:
            pass
        self._socket.settimeout(60)
        while len(self._received) >= 9 + (size := int.from_bytes(self._received[:3], "big")):
            kind, flags, stream = self._received[3], self._received[4], int.from_bytes(self._received[5:9], "big")
            self._see(kind, flags, stream, self._received[9 : 9 + size])
            self._received = self._received[9 + size :]

    def _see(self, kind: int, flags: int, stream: int, content: bytes) -> None:
        if kind == WINDOW:
            grown = int.from_bytes(content, "big")
            if stream:
                self._windows[stream] = self._windows.get(stream, 0) + grown
            else:
                self._window += grown
        elif kind == SETTINGS and not flags & ACK:
            for at in range(0, len(content), 6):
                name, value = struct.unpack(">HI", content[at : at + 6])
                if name == 4:
                    self._windows = {one: window + value - self._initial for one, window in self._windows.items()}
                    self._initial = value
                elif name == 5:
                    self.largest_frame = value
            self._socket.sendall(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._socket.sendall(frame(PING, ACK, 0, content))
        elif stream and (kind == RESET or (kind == HEADERS and flags & END_STREAM)):
            self.ended.add(stream)
            self._left.pop(stream, None)

    def close(self) -> None:
        self._socket.close()
