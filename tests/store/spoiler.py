"""A proxy that spoils what passes: it flips bits, truncates, duplicates and replays TLS records or HTTP/2 frames.

Whole ones: TCP's checksums let no byte through that a wire has changed, so whoever spoils them is between the hosts,
and knows what it does. Of plain HTTP/2, frames with messages are spoilt; others only end the connection.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable

from rayzero.store.wire.tensor_stream import TAG_BYTES, TICKET_BYTES
from store.http2 import DATA, OPENING
from store.proxy import Proxy

_HEAD = struct.Struct("<IIQQ")  # of a chunk: shard, bytes, offset, checksum
KINDS = ("flips", "truncates", "duplicates", "replays")


class Spoiler(Proxy):
    """Spoils one in ``every`` units, in both directions, until it has spoilt ``most``."""

    def __init__(self, target: str, kind: str, *, tls: bool, seed: int, every: int, most: int) -> None:
        self.spoilt, self._most, self._every = 0, most, every
        self._kind, self._tls, self._draws = kind, tls, random.Random(seed)
        super().__init__(target)

    def _reader(self, source: socket.socket) -> Callable[[], bytes]:
        former: list[bytes] = []
        first = not self._tls

        def read() -> bytes:
            nonlocal first
            if first:
                first = False
                opening = _exactly(source, 3)
                if opening == OPENING[:3]:
                    return opening + _exactly(source, len(OPENING) - 3)
                return self._spoil(_unit(source, opening, tls=False), former)
            head = _exactly(source, 5 if self._tls else 3)
            return self._spoil(_unit(source, head, tls=self._tls), former) if head else b""

        return read

    def _spoil(self, unit: bytes, former: list[bytes]) -> bytes:
        size = 5 if self._tls else 9
        if not unit or not (self._tls or unit[3] == DATA) or len(unit) <= size:
            return unit
        former.append(unit)
        if self.spoilt >= self._most or self._draws.randrange(self._every):
            return unit
        self.spoilt += 1
        head, content = unit[:size], bytearray(unit[size:])
        if self._kind == "duplicates":
            return unit + unit
        if self._kind == "replays":
            return unit + self._draws.choice(former)
        if self._kind == "flips":
            content[self._draws.randrange(len(content))] ^= 1 << self._draws.randrange(8)
            return head + content
        return _resized(head, content[: self._draws.randrange(len(content))], tls=self._tls)


def _unit(source: socket.socket, head: bytes, *, tls: bool) -> bytes:
    """A record or frame whose first bytes are ``head``."""
    if tls:
        return head + _exactly(source, int.from_bytes(head[3:5], "big"))
    return head + _exactly(source, 6 + int.from_bytes(head[:3], "big"))


def _resized(head: bytes, content: bytes | bytearray, *, tls: bool) -> bytes:
    size = len(content).to_bytes(2 if tls else 3, "big")
    return (head[:3] + size if tls else size + head[3:]) + content


def _exactly(source: socket.socket, size: int) -> bytes:
    """So many bytes; fewer at the end of the connection."""
    found = b""
    while len(found) < size and (more := source.recv(size - len(found))):
        found += more
    return found


class ChunkSpoiler(Spoiler):
    """The same of the chunks on connections for tensors; one that is truncated is the connection's last. It spoils no
    chunk's size: bytes that do not come are those of a slow peer, until the wait for them ends."""

    def _reader(self, source: socket.socket) -> Callable[[], bytes]:
        former: list[bytes] = []
        opened = ended = False

        def read() -> bytes:
            nonlocal opened, ended
            if not opened:  # a ticket one way, a byte the other
                opened = True
                return source.recv(TICKET_BYTES)
            if ended:
                return b""
            head = _exactly(source, _HEAD.size)
            if len(head) < _HEAD.size:
                return head
            tag = TAG_BYTES if self._tls else 0
            whole = head + _exactly(source, _HEAD.unpack(head)[1] + tag)
            passed = self._spoil_chunk(whole, former)
            ended = len(passed) < len(whole)
            return passed

        return read

    def _spoil_chunk(self, chunk: bytes, former: list[bytes]) -> bytes:
        former.append(chunk)
        if self.spoilt >= self._most or self._draws.randrange(self._every):
            return chunk
        self.spoilt += 1
        if self._kind == "duplicates":
            return chunk + chunk
        if self._kind == "replays":
            return self._draws.choice(former) + chunk
        if self._kind == "truncates":
            return chunk[: self._draws.randrange(len(chunk))]
        spoilt = bytearray(chunk)
        spoilt[self._draws.randrange(8, len(spoilt))] ^= 1 << self._draws.randrange(8)
        return bytes(spoilt)
