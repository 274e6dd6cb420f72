"""Tensor bytes as protobuf messages, without protobuf's copies.

``FetchResponse``, ``PushRequest`` and ``LoadRequest`` of ``protos/rayzero/v1/store.proto`` all carry a ``Chunk`` as
field 1, and a chunk's payload is its last field. So a message is a few header bytes, written here by hand, followed
by the bytes of the tensor: one copy to send (grpc takes nothing but ``bytes``), none to receive. The bytes are exactly
those that the generated classes write (tests/store/test_wire.py), which take 1.3-2.9 times as long. The first message
of a client's stream also holds the stream's header, as field 2, after the chunk, so a small unit is one message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rayzero.errors import StoreError, TransferError
from rayzero.store.wire.seal import checksum, seal

Bytes = npt.NDArray[np.uint8]

CHUNK_BYTES = 1 << 20
"""The most of a shard that is under one checksum, and in one message. A message is copied several times at either end:
pushes in messages moved 1.99 GB/s with 2 MiB, 2.12 with 1 MiB, 1.85 with 512 KiB. On a connection beside the calls,
256 KiB to 2 MiB make no difference (lab/RESULTS.md, "store")."""

_VARINT, _FIXED64, _LEN, _FIXED32 = 0, 1, 2, 5  # protobuf wire types
_CHUNK, _HEADER = 1 << 3 | _LEN, 2 << 3 | _LEN  # of PushRequest and LoadRequest; FetchResponse has the chunk only
_SHARD, _OFFSET = 1 << 3 | _VARINT, 2 << 3 | _VARINT  # of Chunk
_CHECKSUM, _PAYLOAD = 3 << 3 | _FIXED64, 4 << 3 | _LEN


def byte_view(tensor: Tensor) -> Bytes:
    """The memory of a contiguous 1D CPU tensor as bytes, shared, not copied. Raises ``StoreError`` for others."""
    require_flat(tensor)
    return tensor.detach().view(torch.uint8).numpy()


def require_flat(tensor: Tensor) -> None:
    """Raise ``StoreError`` for anything but a contiguous 1D CPU tensor."""
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise StoreError(
            f"the store moves contiguous 1D CPU tensors, got shape {tuple(tensor.shape)}, "
            f"strides {tensor.stride()} on {tensor.device}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardChunk:
    """A part of one shard's bytes; ``payload`` is a view into the message it came in."""

    shard: int
    offset: int  # bytes from the shard's first byte
    checksum: int
    payload: memoryview

    def verify(self) -> None:
        """Raise ``TransferError`` if the payload is not what was sent."""
        got = checksum(self.payload)
        if got != self.checksum:
            raise TransferError(
                f"shard {self.shard} bytes {self.offset:,}..{self.offset + len(self.payload):,}: "
                f"checksum {got:016x}, sent as {self.checksum:016x}; the bytes were damaged on the way"
            )


# ---------------------------------------------------------------------------------------------------- encode


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_chunk(shard: int, offset: int, payload: memoryview, header: bytes = b"") -> bytes:
    """A FetchResponse, PushRequest or LoadRequest that holds one chunk followed by ``header``, an encoded message that
    has only the header field. Fields that are zero are left out, as in proto3."""
    digest = checksum(payload)
    fields = bytearray()
    if shard:
        fields += bytes([_SHARD]) + _varint(shard)
    if offset:
        fields += bytes([_OFFSET]) + _varint(offset)
    if digest:
        fields += struct.pack("<BQ", _CHECKSUM, digest)
    if len(payload):
        fields += bytes([_PAYLOAD]) + _varint(len(payload))
    opening = bytes([_CHUNK]) + _varint(len(fields) + len(payload))
    return b"".join((opening, fields, payload, header))


def encode_header(header: Any) -> bytes:
    """A message that has only the header field: ``header``, with a checksum."""
    content = seal(header)
    return b"".join((bytes([_HEADER]), _varint(len(content)), content))


def encode_shard(shard: int, values: Tensor, header: bytes = b"") -> Iterator[bytes]:
    """The messages that carry a shard's values (1D, CPU), at most ``CHUNK_BYTES`` of payload in each; ``header`` goes
    with the first."""
    content = byte_view(values).data
    for offset in range(0, len(content), CHUNK_BYTES):
        yield encode_chunk(shard, offset, content[offset : offset + CHUNK_BYTES], header if offset == 0 else b"")


# ---------------------------------------------------------------------------------------------------- decode


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    """The number at ``at`` and where it ends."""
    value = shift = 0
    while shift < 64 and at < len(message):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise TransferError("malformed message: a number that does not end")


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Every field as (tag, value): an int for numbers, a view for bytes. Unknown fields are included."""
    at, end = 0, len(message)
    while at < end:
        tag, at = (message[at], at + 1) if message[at] < 0x80 else _read_varint(message, at)
        wire_type = tag & 7
        if wire_type == _VARINT:
            number, at = _read_varint(message, at)
            yield tag, number
            continue
        if wire_type == _LEN:
            size, at = _read_varint(message, at)
        elif wire_type in (_FIXED64, _FIXED32):
            size = 8 if wire_type == _FIXED64 else 4
        else:
            raise TransferError(f"malformed message: wire type {wire_type}")
        if at + size > end:
            raise TransferError(f"malformed message: a field of {size:,} bytes in the last {end - at:,}")
        content = message[at : at + size]
        yield tag, content if wire_type == _LEN else int.from_bytes(content, "little")
        at += size


def _decode_chunk_body(body: memoryview) -> ShardChunk:
    found: dict[int, int | memoryview] = {_SHARD: 0, _OFFSET: 0, _CHECKSUM: 0, _PAYLOAD: memoryview(b"")}
    found.update(_fields(body))
    shard, offset, digest, payload = (found[tag] for tag in (_SHARD, _OFFSET, _CHECKSUM, _PAYLOAD))
    assert isinstance(shard, int)
    assert isinstance(offset, int)
    assert isinstance(digest, int)
    assert isinstance(payload, memoryview)
    return ShardChunk(shard=shard, offset=offset, checksum=digest, payload=payload)


def _field(message: bytes, wanted: int) -> memoryview | None:
    """The bytes of one field of a message, as a view; None if the message does not have it."""
    for tag, value in _fields(memoryview(message)):
        if tag == wanted:
            assert isinstance(value, memoryview)
            return value
    return None


def decode_chunk(message: bytes) -> ShardChunk | None:
    """The chunk that a message carries, as a view; None if it carries none.

    Raises ``TransferError`` if the bytes are not a protobuf message."""
    body = _field(message, _CHUNK)
    return None if body is None else _decode_chunk_body(body)


def decode_header(message: bytes) -> bytes | None:
    """The encoded header of a client's stream, sealed; None if the message has none. Raises ``TransferError`` if the
    bytes are not a protobuf message."""
    body = _field(message, _HEADER)
    return None if body is None else bytes(body)


class Assembly:
    """Writes one shard's chunks into its memory, from first to last byte.

    Knows which byte is next; not where chunks come from. Without memory it checks the bytes and drops them."""

    def __init__(self, shard: int, size_bytes: int, out: Bytes | None) -> None:
        """``out``: ``size_bytes`` bytes of memory, or None."""
        self._shard, self._size, self._out = shard, size_bytes, out
        self.filled = 0  # bytes

    @property
    def complete(self) -> bool:
        """True once every byte is there."""
        return self.filled == self._size

    def end_at(self, size_bytes: int) -> None:
        """The shard has that many bytes, which its first ones tell: the memory has room for more. Raises
        ``TransferError`` if it has not, or if more have come already."""
        if not self.filled <= size_bytes <= self._size:
            raise TransferError(f"a shard of {size_bytes:,} bytes came {self._where()}")
        self._size = size_bytes

    def take(self, message: bytes | None) -> None:
        """Verify a message's chunk and write it; None: the stream has ended. Raises ``TransferError`` if the chunk is
        missing, damaged or not the next one."""
        chunk = None if message is None else decode_chunk(message)
        if chunk is None:
            what = "the stream ended" if message is None else "a message without bytes came"
            raise TransferError(f"{what} {self._where()}")
        self._require_next(chunk.shard, chunk.offset, len(chunk.payload))
        chunk.verify()
        stop = chunk.offset + len(chunk.payload)
        if self._out is not None:
            self._out[chunk.offset : stop] = np.frombuffer(chunk.payload, dtype=np.uint8)  # releases the GIL
        self.filled = stop

    def room_for(self, shard: int, offset: int, size_bytes: int) -> memoryview:
        """The memory of a chunk whose bytes come next; ``add`` says that they are there. Raises ``TransferError`` if it
        is not the next chunk."""
        self._require_next(shard, offset, size_bytes)
        if not size_bytes:
            raise TransferError(f"a chunk without bytes came {self._where()}")
        return memoryview(bytearray(size_bytes)) if self._out is None else self._out.data[offset : offset + size_bytes]

    def add(self, size_bytes: int) -> None:
        """What ``room_for`` gave has its bytes, and they are what was sent."""
        self.filled += size_bytes

    def _require_next(self, shard: int, offset: int, size_bytes: int) -> None:
        stop = offset + size_bytes
        if shard != self._shard or offset != self.filled or stop > self._size:
            raise TransferError(f"shard {shard} bytes {offset:,}..{stop:,} came {self._where()}")

    def _where(self) -> str:
        return f"after {self.filled:,} of {self._size:,} bytes of shard {self._shard}"
