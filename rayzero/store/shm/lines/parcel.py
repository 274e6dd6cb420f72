"""The bytes of one call between two processes of a host: its caller makes memory for them, and the other end maps it.

::

    u32 number (of a shard, or the place of a message), u64 bytes | the bytes | the next number, and so on
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rayzero.errors import HandshakeError, TransferError
from rayzero.slabs.header import SlabFacts, lay_out_slab
from rayzero.slabs.slab import Slab

_HEAD = struct.Struct("<IQ")


def room_for(sizes: Sequence[int]) -> int:
    """Bytes of a parcel for pieces of these sizes."""
    return sum(sizes) + _HEAD.size * len(sizes)


class Parcel:
    """Pieces of bytes, one after the other, put in at one end and taken out at the other.

    Knows numbers and sizes; not what a piece is. One thread at a time uses it."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self.size_bytes = slab.header.bytes - slab.header.header_bytes
        self._memory = slab.tensor(slab.header.header_bytes, self.size_bytes, torch.uint8).numpy().data
        self._at = 0

    @classmethod
    def make(cls, facts: SlabFacts, directory: Path, size_bytes: int) -> Parcel:
        """``facts``: of the line. ``size_bytes``: see ``room_for``. Raises MemoryPlanError if there is no room. Freed
        by: close()."""
        own = replace(facts, role="parcel")
        return cls(Slab.create(lay_out_slab(own, [("pieces", max(1, size_bytes), 0)]), directory))

    @classmethod
    def open(cls, name: str, facts: SlabFacts, directory: Path) -> Parcel:
        """Map what another process has made in ``directory`` for the line with these ``facts``. Raises HandshakeError
        if it is gone, or of another line. Freed by: close()."""
        path = directory / Path(name).name
        slab = Slab.attach(path, writable=True, run=facts.run, layout_digest=facts.layout_digest)
        if slab.header.facts != replace(facts, role="parcel"):
            slab.close()
            raise HandshakeError(f"{path} is not of the line over which it was named")
        return cls(slab)

    @property
    def name(self) -> str:
        """Its file's."""
        assert self._slab.path is not None
        return self._slab.path.name

    def put(self, number: int, content: memoryview) -> None:
        """Add a piece. Raises TransferError if there is no room left."""
        self.room(number, len(content))[:] = content

    def room(self, number: int, size_bytes: int) -> memoryview:
        """Add a piece whose bytes the caller puts in. Raises TransferError if there is no room left."""
        begin = self._at + _HEAD.size
        if begin + size_bytes > self.size_bytes:
            raise TransferError(f"piece {number} of {size_bytes:,} bytes does not fit a parcel of {self.size_bytes:,}")
        _HEAD.pack_into(self._memory, self._at, number, size_bytes)
        self._at = begin + size_bytes
        return self._memory[begin : self._at]

    def take(self, number: int) -> memoryview:
        """The bytes of the next piece, valid until ``close``. Raises TransferError if that is another one."""
        begin = self._at + _HEAD.size
        if begin > len(self._memory):
            raise TransferError(f"nothing came where piece {number} had to")
        came, size = _HEAD.unpack_from(self._memory, self._at)
        if came != number or begin + size > self.size_bytes:
            raise TransferError(f"piece {came} of {size:,} bytes came where piece {number} had to")
        self._at = begin + size
        return self._memory[begin : begin + size]

    def rewind(self) -> None:
        """Begin again with the first piece: the other end has put pieces in, or the call is repeated."""
        self._at = 0

    def close(self) -> None:
        """Idempotent."""
        self._memory = memoryview(b"")
        self._slab.close()
