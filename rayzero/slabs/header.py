"""The first pages of a slab: whose it is, and a table of the regions in it.

::

    magic, format version, header bytes, slab bytes, pid | run, role, index, number, incarnation, layout digest, kernel,
    lineage, epoch | number of regions, crc32 of header and table | region table: {kind, offset, bytes, stride} each
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rayzero.errors import HandshakeError, UnsupportedError
from rayzero.quantities import whole_pages

MAGIC = b"RZSLAB\r\n"
FORMAT = 3
_FIXED = struct.Struct("<8sIIQQ128s16sIIQ64s64s32sQI")  # as drawn above, without the crc
_CRC = struct.Struct("<I")
_REGION = struct.Struct("<16sQQQ")
_TABLE_AT = _FIXED.size + _CRC.size


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabFacts:
    """Says whose slab it is."""

    run: str  # run id: at most 128 bytes
    role: str  # "params", "state", "control" of an owner; "grads", "control" of a rank: at most 16 bytes
    index: int  # of the owner or rank
    number: int = 0  # which of its slabs of this role
    incarnation: int  # the life of the owner or rank: after a restart it has another one, and other slabs
    layout_digest: str
    kernel: str  # the kernel that makes the bits of parameters and states, with its instruction set
    lineage: str = ""  # of the states: only a run that continues them has the same; at most 32 bytes
    epoch: int = 0  # of an owner's control slab (protocol/ownership.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A range of a slab with one purpose. A reader ignores kinds that it does not know."""

    kind: str  # at most 16 bytes
    offset: int  # bytes from the slab's start
    bytes: int
    stride: int = 0  # bytes from one entry to the next; 0: no entries


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabHeader:
    """Everything in the header."""

    facts: SlabFacts
    regions: tuple[Region, ...]
    header_bytes: int
    bytes: int  # of the whole slab, header included: whole pages
    pid: int  # of the process that holds the slab, in its own namespace

    def spans(self, later: Collection[str] = ()) -> list[tuple[int, int]]:
        """(offset, bytes) of what has pages from the start, in whole pages: all but the regions of the kinds in
        ``later``."""
        found, start = [], 0
        for region in (region for region in self.regions if region.kind in later):
            found.append((start, region.offset - start))
            start = region.offset + whole_pages(region.bytes)
        found.append((start, self.bytes - start))
        return [(start, size) for start, size in found if size]

    def regions_of(self, kind: str) -> tuple[Region, ...]:
        """The regions of one kind, in table order."""
        return tuple(region for region in self.regions if region.kind == kind)


def header_bytes(num_regions: int) -> int:
    """Bytes before the first region: whole pages."""
    return whole_pages(_TABLE_AT + num_regions * _REGION.size)


def lay_out_slab(facts: SlabFacts, wanted: Sequence[tuple[str, int, int]]) -> SlabHeader:
    """Lay out regions in order, each on its own pages. ``wanted``: (kind, bytes, stride) of each."""
    offset = first = header_bytes(len(wanted))
    regions = []
    for kind, size, stride in wanted:
        regions.append(Region(kind=kind, offset=offset, bytes=size, stride=stride))
        offset += whole_pages(size)
    return SlabHeader(facts=facts, regions=tuple(regions), header_bytes=first, bytes=offset, pid=os.getpid())


def encode_header(header: SlabHeader) -> bytes:
    """The header's bytes, without the rest of its last page. Raises UnsupportedError for names that do not fit."""
    facts = header.facts
    fixed = _FIXED.pack(
        MAGIC,
        FORMAT,
        header.header_bytes,
        header.bytes,
        header.pid,
        _text("run", facts.run, 128),
        _text("role", facts.role, 16),
        facts.index,
        facts.number,
        facts.incarnation,
        _text("layout digest", facts.layout_digest, 64),
        _text("kernel", facts.kernel, 64),
        _text("lineage", facts.lineage, 32),
        facts.epoch,
        len(header.regions),
    )
    table = b"".join(_REGION.pack(_text("kind", r.kind, 16), r.offset, r.bytes, r.stride) for r in header.regions)
    return fixed + _CRC.pack(zlib.crc32(fixed + table)) + table


def decode_header(source: str, data: bytes, file_bytes: int) -> SlabHeader:
    """Read what ``encode_header`` wrote. ``data``: the slab's first bytes, at least its header. ``file_bytes``: size of
    the whole file. Raises HandshakeError, naming ``source``, for anything else."""
    magic, version = struct.unpack_from("<8sI", data.ljust(12, b"\0"))
    if magic != MAGIC:
        raise HandshakeError(f"{source} is not a slab: it begins with {magic!r}, a slab with {MAGIC!r}")
    if version != FORMAT:
        raise HandshakeError(
            f"{source} has slab format {version}, this rayzero reads {FORMAT}: install the same rayzero in every "
            "process"
        )
    if len(data) < _TABLE_AT:
        raise HandshakeError(f"{source} ends after {len(data)} bytes, within its header")
    _, _, size, total, pid, run, role, index, number, incarnation, *texts, epoch, count = _FIXED.unpack_from(data)
    digest, kernel, lineage = texts
    table = data[_TABLE_AT : _TABLE_AT + count * _REGION.size]
    (crc,) = _CRC.unpack_from(data, _FIXED.size)
    if crc != (found := zlib.crc32(data[: _FIXED.size] + table)):
        raise HandshakeError(f"{source} has a damaged header: its crc is {crc:08x}, its bytes give {found:08x}")
    if total > file_bytes:
        raise HandshakeError(f"{source} has {file_bytes:,} bytes, its header says {total:,}: it was cut off")
    facts = SlabFacts(
        run=_str(run),
        role=_str(role),
        index=index,
        number=number,
        incarnation=incarnation,
        layout_digest=_str(digest),
        kernel=_str(kernel),
        lineage=_str(lineage),
        epoch=epoch,
    )
    rows = _REGION.iter_unpack(table)
    regions = tuple(Region(kind=_str(kind), offset=at, bytes=n, stride=stride) for kind, at, n, stride in rows)
    return SlabHeader(facts=facts, regions=regions, header_bytes=size, bytes=total, pid=pid)


def check_header(source: str, header: SlabHeader, *, run: str, layout_digest: str) -> None:
    """Raise HandshakeError, naming both sides, unless the slab belongs to this run and this layout."""
    theirs = header.facts
    if theirs.run != run:
        raise HandshakeError(f"{source} belongs to run {theirs.run!r}, this is run {run!r}")
    if theirs.layout_digest != layout_digest:
        raise HandshakeError(
            f"{source} has layout {theirs.layout_digest[:12]}, this process has {layout_digest[:12]}: "
            "all processes of a run must build the same model and config"
        )


def _text(name: str, value: str, room: int) -> bytes:
    encoded = value.encode()
    if len(encoded) > room or "\0" in value:
        raise UnsupportedError(f"{name} {value!r} takes {len(encoded)} bytes; a slab's header has room for {room}")
    return encoded


def _str(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")
