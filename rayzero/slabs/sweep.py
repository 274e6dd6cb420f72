"""The slabs that lie on this host, whoever made them, and the removal of those that nobody has any more.

See [Note: no slab stays behind] in slabs/slab.py. Needs no torch, because janitors sweep and are to stay small.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rayzero.errors import HandshakeError
from rayzero.slabs.header import SlabHeader, decode_header
from rayzero.slabs.hold import held_in, is_free, is_ours, remove_dead_holds

__all__ = ["MAKING", "SHARED_MEMORY", "FoundSlab", "list_slabs", "read_header", "sweep"]

SHARED_MEMORY = Path("/dev/shm")
MAKING = ".making"  # suffix of a slab that is not filled yet


def read_header(path: Path, fd: int) -> SlabHeader:
    """Read the header of an open file. Raises HandshakeError if it is not a slab that this rayzero reads."""
    return decode_header(str(path), os.pread(fd, 1 << 20, 0), os.fstat(fd).st_size)


def sweep(
    directory: Path = SHARED_MEMORY, lineage: str | None = None, *, is_over: bool = False
) -> list[tuple[Path, int]]:
    """Remove the slabs whose makers are dead, unless another process of their run and lineage lives or somebody holds
    them (slabs/hold.py); returns (path, bytes) of each. Slabs of other users stay; so do those that this rayzero cannot
    read, while a process has one that it cannot read either: they may be of the same run.

    ``lineage``: only its slabs, and what nobody has filled; None: all. ``is_over``: nobody continues it or waits for
    its processes, so holds of those do not count."""
    remove_dead_holds(directory)
    held = set() if is_over else {each.lineage for each in held_in(directory)}
    running = {_run_of(found.header) for found in list_slabs(directory) if found.alive}
    removed = []
    for path, fd in _opened(directory):
        header = _header_or_none(path, fd)
        unfilled = header is None and path.suffix == MAKING  # no successor takes it over
        theirs = None if header is None else header.facts.lineage
        if not unfilled and (lineage not in (None, theirs) or theirs in held or _run_of(header) in running):
            continue
        if not is_free(fd) or not os.fstat(fd).st_nlink:
            continue  # its maker lives, or has removed it
        try:
            path.unlink()
        except FileNotFoundError:  # another sweep took it, or its maker renamed it and died: then the next does
            continue
        removed.append((path, os.fstat(fd).st_size))
    return removed


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSlab:
    """A slab file of this host."""

    path: Path
    bytes: int
    alive: bool  # its maker lives
    header: SlabHeader | None  # None: not filled yet, or from another rayzero


def list_slabs(directory: Path = SHARED_MEMORY) -> list[FoundSlab]:
    """This user's slabs on this host, sorted by name; root's are everybody's."""
    return [
        FoundSlab(
            path=path,
            bytes=os.fstat(fd).st_size,
            alive=not is_free(fd),
            header=_header_or_none(path, fd),
        )
        for path, fd in _opened(directory)
    ]


def _run_of(header: SlabHeader | None) -> tuple[str, str] | None:
    """The run and lineage of a slab; None if its header cannot be read. A run that starts again from a checkpoint has
    another lineage, and no use for what it had before."""
    return None if header is None else (header.facts.run, header.facts.lineage)


def _header_or_none(path: Path, fd: int) -> SlabHeader | None:
    try:
        return read_header(path, fd)
    except HandshakeError:
        return None


def _opened(directory: Path) -> Iterator[tuple[Path, int]]:
    """Every slab file, with a file descriptor that is closed after its turn."""
    for path in sorted([*directory.glob("rayzero-*.slab"), *directory.glob(f"rayzero-*.slab{MAKING}")]):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone in the meantime, another user's, or not a file
            continue
        try:
            if is_ours(fd):
                yield path, fd
        finally:
            os.close(fd)
