"""A TCP connection for transfers: calls that move the bytes of tensors, straight from memory and into memory.

[Note: beside gRPC] gRPC for Python copies a message once to send it and twice to receive it, its event loop reads for
all callers, and a call takes as long as moving hundreds of KiB (lab/RESULTS.md, "store"). So a transfer is no call of
gRPC: its question, its bytes and its answer are on one connection. They come in chunks: a head (shard, bytes, offset in
the shard, xxh3_64) and the payload, which the kernel copies out of the sender's tensor and into the receiver's. A
message is a chunk, too. Both ends know how many bytes a transfer has, so nothing marks their end; an answer that comes
before that says why there will be no more. Where gRPC uses TLS, chunks are encrypted with keys that came over it.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from rayzero.errors import TransferError
from rayzero.store.wire.payload import CHUNK_BYTES, Assembly, checksum

KEY_BYTES = 32
TAG_BYTES = 16  # that an encrypted chunk is longer


class ChunkCipher:
    """Encrypts one direction of one connection, chunk by chunk, at one end. Used by one thread at a time.

    Python's TLS takes 1.1 CPU seconds a GB of both ends together, most of them for its records of 16 KiB; one pass over
    a whole chunk takes 0.2 (lab/RESULTS.md, "store"). A key is one connection's in one direction, and the two that use
    it have it from a call over mutual TLS. Chunks are counted, and the count is the nonce: one that is changed, left
    out, repeated or of another connection is refused. (AES-256-GCM: NIST SP 800-38D.)"""

    def __init__(self, key: bytes) -> None:
        self._cipher, self._count = AESGCM(key), 0

    def encrypt(self, head: bytes, payload: memoryview, out: memoryview) -> None:
        """Write the next chunk's payload into ``out``, encrypted, with a tag at its end that also covers ``head``."""
        self._cipher.encrypt_into(self._nonce(), payload, head, out)

    def decrypt(self, head: bytes, sealed: memoryview, out: memoryview) -> bool:
        """Write the payload of the next chunk into ``out``. False: it is not what the other end has sent."""
        try:
            self._cipher.decrypt_into(self._nonce(), sealed, head, out)
        except InvalidTag:
            return False
        return True

    def _nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(12, "little")


TICKET_BYTES = 32  # what a client says first: what it got from OpenTensorStream
WELCOME = b"\1"  # what it is answered
SILENT_S = 0.05  # how long a thread waits for a peer that sends or takes nothing
MESSAGE = (1 << 32) - 1  # where shards have their numbers: the chunk is a message
MESSAGE_BYTES = 16 << 20  # the most of one

_TURN_S = 0.1  # after which a thread that moves bytes serves another connection, if that waits for it

_HEAD = struct.Struct("<IIQQ")


class StreamEndedError(TransferError):
    """The connection has ended, or was ended."""


class MessageCameError(TransferError):
    """A message came where bytes of a shard had to: the other end says why they do not."""

    def __init__(self, content: bytes) -> None:
        super().__init__("a message came where bytes of a shard had to")
        self.content = content


class StreamWork(Protocol):
    """Bytes that are to pass."""

    @property
    def chunks(self) -> int:
        """How many have passed."""
        ...

    def advance(self) -> bool:
        """Move bytes until all have passed (True), or until the peer is slow, or others have waited for long (False).
        Raises StreamEndedError, and TransferError for bytes that are not what was sent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamKeys:
    """What one end encrypts with, and what the other end does."""

    sending: bytes = field(repr=False)
    receiving: bytes = field(repr=False)


def moving_threads(cores: int) -> int:
    """How many connections an owner's threads serve at a time, on a host with so many cores."""
    return max(2, min(8, cores))


def new_stream_keys() -> StreamKeys:
    """The keys of another connection."""
    return StreamKeys(sending=secrets.token_bytes(KEY_BYTES), receiving=secrets.token_bytes(KEY_BYTES))


class TensorStream:
    """One end of a connection. One thread at a time moves bytes; any thread may end it.

    Knows bytes; not what they are, or who is at the other end."""

    def __init__(self, connection: socket.socket, keys: StreamKeys | None) -> None:
        """Take the connection over: closed by ``close``. ``keys``: None: chunks are not encrypted."""
        self.connection = connection
        self.waits = True  # for a peer that is slow; False: on an event loop, which does that
        self._sending = None if keys is None else ChunkCipher(keys.sending)
        self._receiving = None if keys is None else ChunkCipher(keys.receiving)
        self._sent = self._received = 0  # chunks that have a checksum, which their number is a part of
        self._scratch = bytearray()  # an encrypted chunk
        self._ending = threading.Lock()  # a connection that is closed may be another one's number
        _set_up(connection)

    def read(self, out: memoryview) -> int:
        """Read up to ``len(out)`` bytes; fewer: no more came for a while. Raises StreamEndedError."""
        try:
            read = self.connection.recv_into(out, 0, socket.MSG_WAITALL if self.waits else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _ended(error) from error
        if not read:
            raise StreamEndedError("the connection for tensors ended")
        return read

    def write(self, content: memoryview, *, more: bool = False) -> int:
        """Write up to all of ``content``; fewer: the peer took no more for a while. ``more``: other bytes follow at
        once. Raises StreamEndedError."""
        flags = (socket.MSG_MORE if more else 0) | (0 if self.waits else socket.MSG_DONTWAIT)
        try:
            return self.connection.send(content, flags)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _ended(error) from error

    def pack(self, shard: int, offset: int, payload: memoryview) -> list[memoryview]:
        """The next chunk, as it is written; valid until the one after it."""
        if self._sending is None:
            self._sent += 1
            return [memoryview(_HEAD.pack(shard, len(payload), offset, checksum(payload, self._sent))), payload]
        head = _HEAD.pack(shard, len(payload), offset, 0)  # the tag covers what a checksum does
        sealed = self._room(len(payload) + TAG_BYTES)
        self._sending.encrypt(head, payload, sealed)
        return [memoryview(head), sealed]

    def room_to_read(self, payload: memoryview) -> memoryview:
        """Where the next chunk is read, until ``unpack``: its payload's memory, or that of an encrypted chunk."""
        return payload if self._receiving is None else self._room(len(payload) + TAG_BYTES)

    def unpack(self, head: memoryview, came: memoryview, payload: memoryview) -> None:
        """Have the payload of the next chunk in its memory. ``came``: what was read. Raises TransferError if it is not
        what was sent."""
        shard, size, offset, digest = _HEAD.unpack(head)
        what = "a message" if shard == MESSAGE else f"shard {shard} bytes {offset:,}..{offset + size:,}"
        if self._receiving is None:
            self._received += 1
            found = checksum(payload, self._received)
            if found != digest:
                raise TransferError(
                    f"{what}: checksum {found:016x}, sent as {digest:016x}; the bytes were damaged on the way, or are "
                    "not the next ones"
                )
        elif not self._receiving.decrypt(bytes(head), came, payload):
            raise TransferError(f"{what}: the bytes were damaged on the way, or are not the next ones")

    def _room(self, size_bytes: int) -> memoryview:
        if len(self._scratch) < size_bytes:
            self._scratch = bytearray(size_bytes)
        return memoryview(self._scratch)[:size_bytes]

    def forget_scratch(self) -> None:
        """Free that memory: the transfer is over."""
        self._scratch = bytearray()

    @property
    def has_ended(self) -> bool:
        """Whether the peer has ended the connection, also if bytes of its are not read yet."""
        return self._polled(select.POLLRDHUP)

    @property
    def has_bytes(self) -> bool:
        """Whether something can be read, or the connection has ended."""
        return self._polled(select.POLLIN)

    @property
    def is_quiet(self) -> bool:
        """Whether the connection is open and nothing has come: another transfer may use it."""
        return not self._polled(select.POLLRDHUP | select.POLLIN)

    def _polled(self, events: int) -> bool:
        """Whether one of the events is there now, or the connection is broken."""
        poll = select.poll()
        poll.register(self.connection, events)
        return bool(poll.poll(0))

    def end_writing(self) -> None:
        """Write nothing more: the other end sees that, once it has read all."""
        with suppress(OSError):  # it has ended
            self.connection.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        """End the connection: the thread that moves bytes gets StreamEndedError. Any thread may call it."""
        with self._ending, suppress(OSError):  # it has ended
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the connection, which nobody uses any more."""
        with self._ending:
            self.connection.close()


class Progress:
    """Counts the chunks of a stream as they pass. When it is repeated, only chunks beyond the best try are progress: a
    link that breaks again and again must not hide that nothing moves."""

    def __init__(self) -> None:
        self.chunks = 0  # of the best try
        self._now = 0  # of this one

    def begin(self) -> None:
        """Another try."""
        self._now = 0

    def moved(self) -> None:
        """One chunk has passed."""
        self._now += 1
        self.chunks = max(self.chunks, self._now)


class Receiving:
    """One shard's chunks on their way from a stream into memory, or a message."""

    def __init__(
        self, stream: TensorStream, assembly: Assembly | None = None, progress: Progress | None = None
    ) -> None:
        """``assembly``: None: a message comes. ``progress``: of a shard."""
        self._stream, self._assembly, self._progress = stream, assembly, progress or Progress()
        self._head = memoryview(bytearray(_HEAD.size))
        self._payload: memoryview | None = None  # of the chunk whose head is here: its memory
        self._coming: memoryview = self._head  # what is being read
        self._filled = 0  # bytes of that
        self.message = b""  # which has come
        self.chunks = 0

    def advance(self) -> bool:
        """See ``StreamWork``. Raises MessageCameError if a message comes in place of a shard's bytes."""
        until = time.monotonic() + _TURN_S
        while not self._is_through:
            if not self._take_chunk() or time.monotonic() > until:
                return self._is_through
        return True

    @property
    def _is_through(self) -> bool:
        return bool(self.message) if self._assembly is None else self._assembly.complete

    def _take_chunk(self) -> bool:
        """Move one chunk; False: the peer was slow, and not all of it is here yet."""
        if self._payload is None:
            if not self._fill():
                return False
            self._payload = self._room()
            self._coming = self._stream.room_to_read(self._payload)
        if not self._fill():
            return False
        payload, came = self._payload, self._coming
        self._payload, self._coming = None, self._head
        self._stream.unpack(self._head, came, payload)
        self.chunks += 1
        if _HEAD.unpack(self._head)[0] == MESSAGE:
            self.message = bytes(payload)
            if self._assembly is not None:
                raise MessageCameError(self.message)
        elif self._assembly is not None:
            self._assembly.add(len(payload))
            self._progress.moved()
        return True

    def _room(self) -> memoryview:
        """The memory of the chunk whose head is here."""
        shard, size, offset, _ = _HEAD.unpack(self._head)
        most = MESSAGE_BYTES if shard == MESSAGE else CHUNK_BYTES
        if size > most:  # an end may hold an encrypted chunk of each connection
            raise TransferError(f"a chunk of {size:,} bytes came; the most are {most:,}")
        if shard == MESSAGE and size:
            return memoryview(bytearray(size))
        if self._assembly is None or shard == MESSAGE:
            raise TransferError(f"{size:,} bytes of shard {shard} came where a message had to")
        return self._assembly.room_for(shard, offset, size)

    def _fill(self) -> bool:
        """Read what is left of what is coming; False: it is not all here yet."""
        self._filled += self._stream.read(self._coming[self._filled :])
        if self._filled < len(self._coming):
            return False
        self._filled = 0
        return True


class Sent:
    """One shard's chunks on their way from memory into a stream."""

    def __init__(
        self,
        stream: TensorStream,
        shard: int,
        content: memoryview,
        progress: Progress | None = None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """``content``: bytes, which nobody changes until all have passed."""
        self._stream, self._shard, self._content = stream, shard, content
        self._chunk_bytes, self._progress = chunk_bytes, progress or Progress()
        self._offset = 0  # where the next chunk begins
        self._left: list[memoryview] = []  # of this chunk: head and payload
        self.chunks = 0

    def advance(self) -> bool:
        """See ``StreamWork``."""
        until = time.monotonic() + _TURN_S
        while not self._is_through:
            if not self._left:
                self._left = self._next_chunk()
            if not self._write_chunk():
                return False
            self.chunks += 1
            self._progress.moved()
            if time.monotonic() > until:
                return self._is_through
        return True

    @property
    def _is_through(self) -> bool:
        return not self._left and self._offset == len(self._content)

    def _write_chunk(self) -> bool:
        """Write what is left of the chunk; False: the peer was slow, and something still is."""
        while self._left:
            written = self._stream.write(self._left[0], more=len(self._left) > 1)
            if written < len(self._left[0]):
                self._left[0] = self._left[0][written:]
                return False
            self._left.pop(0)
        return True

    def _next_chunk(self) -> list[memoryview]:
        offset = self._offset
        payload = self._content[offset : offset + self._chunk_bytes]
        self._offset += len(payload)
        return self._stream.pack(self._shard, offset, payload)


def message_on(stream: TensorStream, content: bytes) -> Sent:
    """A message on its way into a stream. Raises TransferError if it is too long."""
    if len(content) > MESSAGE_BYTES:
        raise TransferError(f"a message of {len(content):,} bytes is too long: {MESSAGE_BYTES:,} at most")
    return Sent(stream, MESSAGE, memoryview(content), chunk_bytes=MESSAGE_BYTES)


class InTurn:
    """Several shards' bytes, one after the other: a thread that moves them need not be sent for again."""

    def __init__(self, works: Iterable[tuple[StreamWork, Callable[[], object]]]) -> None:
        """``works``: each with what to do once it has passed, in the same thread."""
        self._left = deque(works)
        self._passed = 0

    @property
    def chunks(self) -> int:
        """See ``StreamWork``."""
        return self._passed + (self._left[0][0].chunks if self._left else 0)

    def advance(self) -> bool:
        """See ``StreamWork``."""
        until = time.monotonic() + _TURN_S
        while self._left:
            work, then = self._left[0]
            if not work.advance():
                return False
            self._passed += work.chunks
            self._left.popleft()
            then()
            if time.monotonic() > until:
                return not self._left
        return True


def _set_up(connection: socket.socket) -> None:
    connection.settimeout(None)  # the kernel waits, and fills a whole chunk in one call
    patience = struct.pack("ll", 0, int(SILENT_S * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a peer whose host has vanished sends nothing
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


def _ended(error: OSError) -> StreamEndedError:
    return StreamEndedError(f"the connection for tensors ended: {error.strerror or error}")
