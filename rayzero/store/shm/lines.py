"""A line, and the parcels of its calls: what a channel is over gRPC, in the memory of one host.

An optimizer actor that shares memory has a *lobby* for each of its addresses: a file that says which process it is, and
its bell. Who finds the lobby of an address is on the owner's host. It makes a *line*, a file with a mailbox
(store/shm/mailbox.py), rings, and calls over it what others call over gRPC.

::

    lobby   process | bell | an arrival for each number of a caller, modulo their number
    line    opening, by the caller | the caller's bell, over | what the owner says unasked | questions | answers
    parcel  the bytes of a call: u32 number (of a shard, or the place of a message), u64 bytes | the bytes | and so on
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import struct
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rayzero.concurrency.processes import ProcessIdentity, SeenProcess
from rayzero.errors import HandshakeError, TransferError
from rayzero.slabs.header import SlabFacts, lay_out_slab
from rayzero.slabs.slab import Slab
from rayzero.slabs.sweep import is_free
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.shm.mailbox import Cells
from rayzero.store.shm.signals import BELL_BYTES, Cell, changed, host_identity, load_acquire_64, store_release_64
from rayzero.store.shm.words import bell_of, cell_of, region
from rayzero.store.wire import translate

log = logging.getLogger(__name__)

_ARRIVALS = 4096
_PROCESS_BYTES = 512
_OPENING_BYTES = 2 << 10
_NOTICE_BYTES = 72 << 10  # two errors, whose text has at most 8192 characters of 4 bytes
QUESTION_BYTES = 1 << 10
ANSWER_BYTES = 2 << 10
_OVER = 1


def _name(directory: Path, address: str, token: str) -> str:
    """What lobby and lines of an address have as their run. Who does not know the token finds none, and on another host
    the same address is another one's: the directory may be on a file system that several hosts have."""
    return hashlib.sha256(f"{host_identity(directory)}\n{address}\n{token}".encode()).hexdigest()[:32]


class Lobby:
    """The lobby of one address.

    Knows its owner's process and bell, and that callers have come; not what they say."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self.facts, self.bell = slab.header.facts, bell_of(slab)
        assert slab.path is not None
        self.directory, self._keeper = slab.path.parent, slab.keeper
        self._arrivals = slab.address(region(slab, "arrivals").offset)
        self._seen = array("Q", [0] * _ARRIVALS)

    @classmethod
    def make(cls, directory: Path, address: str, token: str, lineage: str, process: ProcessIdentity) -> Lobby:
        """The owner's. ``lineage``: of the run's states. Freed by: close()."""
        facts = SlabFacts(
            run=_name(directory, address, token),
            role="lobby",
            index=0,
            incarnation=secrets.randbits(63),
            layout_digest="",
            kernel="",
            lineage=lineage,
        )
        regions = [
            ("process", Cell.bytes_for(_PROCESS_BYTES), 0),
            ("bell", BELL_BYTES, 0),
            ("arrivals", 8 * _ARRIVALS, 8),
        ]
        slab = Slab.create(lay_out_slab(facts, regions), directory)
        cell_of(slab, "process").write(translate.process_to_pb(process).SerializeToString())
        return cls(slab)

    @classmethod
    def find(cls, directory: Path, address: str, token: str) -> Lobby | None:
        """The lobby of an owner of this host; None: there is no such owner, or it has ended. Freed by: close(). Raises
        OSError if it cannot be mapped."""
        name = _name(directory, address, token)
        for path in directory.glob(f"rayzero-{name}-lobby-*.slab"):
            try:
                found = cls(Slab.attach(path, writable=True, run=name, layout_digest=""))
            except HandshakeError:  # it has just ended
                continue
            is_made = cell_of(found._slab, "process").read() is not None
            if is_made and not found.is_abandoned:
                return found
            if is_made:  # a dead owner's. Sweeps leave it alone while other files of this name have living makers
                path.unlink(missing_ok=True)
            found.close()
        return None

    @property
    def process(self) -> ProcessIdentity:
        """The owner's."""
        read = cell_of(self._slab, "process").read()
        assert read is not None, "make() has written it"
        return translate.process_from_pb(pb.Process.FromString(read[1]))

    @property
    def is_abandoned(self) -> bool:
        """Whether the owner serves here no more, or its process has ended: its lock tells, unless a process has it that
        the owner has forked. Then only the death of a process that can be seen tells."""
        if is_free(self._slab.fileno()):
            return True
        seen = SeenProcess.open(self.process)
        if seen is None:
            return False
        dead = seen.has_died
        seen.close()
        return dead

    def come(self, number: int) -> None:
        """A caller has made a line: let the owner look for it."""
        store_release_64(self._arrivals + 8 * (number % _ARRIVALS), time.monotonic_ns())
        self.bell.ring()

    def has_arrivals(self) -> bool:
        """Whether callers have come since the last look."""
        return bool(changed(self._arrivals, 8, self._seen, _ARRIVALS))

    def lines(self) -> Iterator[Line]:
        """The lines that nobody has taken yet. They lose their names, so that none stays behind. Freed by: close().
        Raises OSError if one cannot be mapped now."""
        for path in self.directory.glob(f"rayzero-{self.facts.run}-line-*.slab"):
            try:
                line = Line(Slab.attach(path, writable=True, run=self.facts.run, layout_digest=""))
            except HandshakeError as error:  # its caller has closed it, or is of another rayzero
                log.debug("a line is not taken: %s", error)
                continue
            if line.opening is None:  # its caller is making it, and comes again
                line.close()
                continue
            path.unlink(missing_ok=True)
            yield line

    def remove_parcels(self, line: Line) -> None:
        """Remove the memory for the bytes of calls over a line that is over: its caller may be dead."""
        facts = line.facts
        for path in self.directory.glob(f"rayzero-{facts.run}-parcel-{facts.index}.{facts.number}-*.slab"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Callers see it. Idempotent."""
        self._slab.close()


class Line:
    """The memory of one line, at either end.

    Knows where its parts are; not what is said."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self.facts, self.bell = slab.header.facts, bell_of(slab)
        self._opening, self._notice = cell_of(slab, "opening"), cell_of(slab, "notice")
        self._said = slab.address(region(slab, "notice").offset)  # the cell's number, twice
        self._keeper = slab.keeper
        self._over = slab.address(region(slab, "bell").offset) + 8
        self.questions = Cells(slab.address(region(slab, "questions").offset), slab.keeper, QUESTION_BYTES)
        self.answers = Cells(slab.address(region(slab, "answers").offset), slab.keeper, ANSWER_BYTES)

    @classmethod
    def make(cls, lobby: Lobby, number: int, opening: pb.LineOpening) -> Line:
        """The caller's. ``number``: of the caller. Freed by: close()."""
        own = secrets.randbits(32)
        facts = replace(lobby.facts, role="line", index=number, number=own, incarnation=secrets.randbits(63))
        regions = [
            ("opening", Cell.bytes_for(_OPENING_BYTES), 0),
            ("bell", 16, 0),  # and whether the line is over
            ("notice", Cell.bytes_for(_NOTICE_BYTES), 0),
            ("questions", Cells.bytes_for(QUESTION_BYTES), 0),
            ("answers", Cells.bytes_for(ANSWER_BYTES), 0),
        ]
        line = cls(Slab.create(lay_out_slab(facts, regions), lobby.directory))
        line._opening.write(opening.SerializeToString())
        lobby.come(number)
        return line

    @property
    def opening(self) -> pb.LineOpening | None:
        """What the caller says of itself; None: nothing yet."""
        read = self._opening.read()
        return None if read is None else pb.LineOpening.FromString(read[1])

    def say(self, notice: pb.LineNotice) -> None:
        """Say everything that the owner has said unasked so far: the other end may miss what was said in between."""
        self._notice.write(notice.SerializeToString())
        self.bell.ring()

    def heard(self, after: int = 0) -> tuple[int, pb.LineNotice] | None:
        """The number of what was said last, and that; None: nothing since that with the number ``after``."""
        if load_acquire_64(self._said) // 2 == after:  # a read takes as long as its cell is large
            return None
        read = self._notice.read()
        return None if read is None else (read[0], pb.LineNotice.FromString(read[1]))

    @property
    def is_abandoned(self) -> bool:
        """Whether the caller's process has ended, as far as its lock tells. Not after ``close``."""
        return is_free(self._slab.fileno())

    def end(self) -> None:
        """One end says nothing more. It rings the other end's bell afterwards."""
        store_release_64(self._over, _OVER)

    @property
    def is_over(self) -> bool:
        """Whether one of the ends has ended it."""
        return load_acquire_64(self._over) == _OVER

    def close(self) -> None:
        """Idempotent."""
        self._slab.close()


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
