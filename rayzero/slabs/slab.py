"""Slabs: files of shared memory that outlive nobody. One maker, who holds the file's lock; any number who attach.

[Note: no slab stays behind] A maker locks its file (``flock``) before it fills it and keeps the lock while it lives;
the kernel frees the lock when it dies, however it dies. ``sweep`` removes exactly the files whose lock it can share:
an exclusive one would fail beside whoever lists the slab or sweeps too, and take a dead maker for a living one. A file
that was created but not locked yet can be caught by that: its maker, who waits for the sweep's lock, sees that it lost
its name, and begins again under another one. A process that the maker forked, without exec, shares the lock and keeps
the slab from sweeps.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import re
import secrets
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rayzero.errors import ConfigError, HandshakeError, StoreClosedError
from rayzero.memory.page_lock import PageLock
from rayzero.memory.planner import no_room
from rayzero.slabs.header import SlabFacts, SlabHeader, check_header, decode_header, encode_header
from rayzero.slabs.mapping import Mapping

SHARED_MEMORY = Path("/dev/shm")
SLAB_BYTES = 1 << 30  # more, smaller files: each is filled by a thread of its own
_PIECE = 64 << 20  # bytes that are allocated and faulted in between two reports of progress
_MAKING = ".making"  # end of the name of a slab that is not filled yet
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT)

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


class Slab:
    """One file of shared memory, mapped.

    Knows its file, its lock and its mapping; not what the regions mean. What was taken from it (tensors, ``keeper``)
    stays readable after ``close()``; the memory is freed when the last of that is gone, in every process."""

    def __init__(self, header: SlabHeader, mapping: Mapping, fd: int, path: Path | None, *, made: bool) -> None:
        """Take over an open, mapped file. ``Slab.create`` and ``Slab.attach`` make one."""
        self.header, self.path = header, path
        self._mapping: Mapping | None = mapping
        self._fd = fd
        self._release = weakref.finalize(self, _release, fd, path if made else None, os.getpid())  # at exit too

    @classmethod
    def create(cls, header: SlabHeader, directory: Path | None = SHARED_MEMORY) -> Slab:
        """Make one: see ``create_slabs``."""
        return create_slabs([header], directory)[0]

    @classmethod
    def attach(cls, path: Path, *, writable: bool, run: str, layout_digest: str) -> Slab:
        """Map a slab of another process. Raises HandshakeError where it is not this run's, this layout's or no slab.

        writable=False: a write into one of its tensors kills the process."""
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as exc:
            raise HandshakeError(f"slab {path} is not there: its maker has ended, or is on another host") from exc
        try:
            header = read_header(path, fd)
            check_header(str(path), header, run=run, layout_digest=layout_digest)
            mapping = Mapping.of_file(fd, header.bytes, writable=writable)
        except BaseException:
            os.close(fd)
            raise
        return cls(header, mapping, fd, path, made=False)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """1D, ``numel``: the bytes from ``offset``, counted from the slab's start. Raises ValueError beyond its end."""
        return self._open().tensor(offset, numel, dtype)

    def address(self, offset: int) -> int:
        """Where byte ``offset`` of the slab is in this process; valid while ``keeper`` is held."""
        return self._open().address + offset

    @property
    def keeper(self) -> object:
        """Keeps the mapping while it is held: for who uses addresses."""
        return self._open().keeper

    def page_lock(self) -> PageLock:
        """Have CUDA copy to and from it by itself; of a slab that this process may write to."""
        mapping = self._open()
        return PageLock(mapping.address, mapping.size, mapping.keeper, read_only=False)

    def fileno(self) -> int:
        """The open file, to map parts of it elsewhere."""
        self._open()
        return self._fd

    def close(self, *, unlink: bool = True) -> None:
        """Let go of the file. The maker removes it, unless unlink=False leaves that to a ``sweep``. Idempotent."""
        self._mapping = None
        if (left := self._release.detach()) is not None:
            _, _, (fd, path, pid), _ = left
            _release(fd, path, pid, unlink=unlink)

    def _open(self) -> Mapping:
        if self._mapping is None:
            raise StoreClosedError(f"slab {self.path} was used after close()")
        return self._mapping


def _release(fd: int, path: Path | None, pid: int, *, unlink: bool = True) -> None:
    """``path``: of the maker, process ``pid``; a process forked from it leaves file and lock alone."""
    if path is not None and os.getpid() == pid:
        if unlink:
            path.unlink(missing_ok=True)
        fcntl.flock(fd, fcntl.LOCK_UN)  # a mapping that is still in use would keep it
    os.close(fd)


def read_header(path: Path, fd: int) -> SlabHeader:
    """Of an open file. Raises HandshakeError where it is no slab that this rayzero reads."""
    return decode_header(str(path), os.pread(fd, 1 << 20, 0), os.fstat(fd).st_size)


# ---- making -----------------------------------------------------------------------------------------------------


def create_slabs(
    headers: Sequence[SlabHeader], directory: Path | None = SHARED_MEMORY, *, on_progress: Progress | None = None
) -> list[Slab]:
    """Make slabs, all their pages allocated, zeroed and mapped, several at once; all of them or none.

    directory: of shared memory, or a file system that has room; None: files without a name, for one process.
    on_progress: called in the making threads, one at a time. Pages lie where the calling thread's NUMA policy says.
    Raises MemoryPlanError where there is no room, ConfigError where there is no such directory."""
    total = sum(header.bytes for header in headers)
    if directory is not None:
        _check_room(total, directory)
    filling = _Filling(total, on_progress)
    pool = ThreadPoolExecutor(min(len(headers), os.cpu_count() or 1, 4) or 1, "rayzero-slab")
    try:
        return list(pool.map(functools.partial(_create, directory, filling), headers))
    except BaseException as exc:
        error = filling.stop(exc)
        pool.shutdown()
        filling.close_all()
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise no_room(total, directory, os.strerror(error.errno)) from error
        raise error from None
    finally:
        pool.shutdown()


class _Filling:
    """Several slabs on their way: what is done, what was made, and what went wrong first."""

    def __init__(self, total: int, on_progress: Progress | None) -> None:
        self._total, self._done, self._on_progress = total, 0, on_progress
        self._made: list[Slab] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def go_on(self) -> bool:
        """Whether nothing went wrong so far."""
        return self._error is None

    def progress(self, size: int) -> None:
        """``size`` bytes more are there."""
        with self._lock:
            self._done += size
            if self._on_progress:
                self._on_progress(self._done, self._total)

    def add(self, slab: Slab) -> Slab:
        """A slab is made."""
        with self._lock:
            self._made.append(slab)
        return slab

    def stop(self, error: BaseException) -> BaseException:
        """Something went wrong: the first thing that did."""
        with self._lock:
            self._error = self._error or error
            return self._error

    def close_all(self) -> None:
        """Remove what was made."""
        for slab in self._made:
            slab.close()


def _create(directory: Path | None, filling: _Filling, header: SlabHeader) -> Slab:
    if directory is None:
        fd, path = os.memfd_create(_stem(header.facts), os.MFD_CLOEXEC), None
    else:
        fd, path = _create_locked(directory, _stem(header.facts))
    try:
        mapping = Mapping.of_file(fd, header.bytes, writable=True)  # of a file that grows into it
        for start in range(0, header.bytes, _PIECE):
            if not filling.go_on():
                raise InterruptedError("another slab could not be made")
            size = min(_PIECE, header.bytes - start)
            os.posix_fallocate(fd, start, size)  # not ftruncate: full memory is an error here, SIGBUS at a write later
            mapping.populate(start, size)
            filling.progress(size)
        os.pwrite(fd, encode_header(header), 0)
        if path is not None:
            path = path.rename(path.with_suffix(""))
    except BaseException as exc:
        filling.stop(exc)
        _release(fd, path, os.getpid())
        raise
    return filling.add(Slab(header, mapping, fd, path, made=True))


def _create_locked(directory: Path, stem: str) -> tuple[int, Path]:
    """A new file that is locked. See [Note: no slab stays behind]."""
    while True:
        path = directory / f"{stem}-{secrets.token_hex(4)}.slab{_MAKING}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd, path
        os.close(fd)  # swept between the two calls


def _stem(facts: SlabFacts) -> str:
    words = (facts.run[:64], facts.role, f"{facts.index}.{facts.number}")
    return "-".join(("rayzero", *(re.sub(r"[^A-Za-z0-9_.]", "_", word) for word in words)))


def _check_room(total: int, directory: Path) -> None:
    if not directory.is_dir():
        raise ConfigError(
            f"slab_dir is {str(directory)!r}, which is no directory: name one with room for shared memory"
        )
    if total > shutil.disk_usage(directory).free:
        raise no_room(total, directory, "too small")


# ---- other people's slabs ---------------------------------------------------------------------------------------


def sweep(directory: Path = SHARED_MEMORY) -> list[tuple[Path, int]]:
    """Remove the slabs whose makers are dead; (path, bytes) of each. Those of other users are left alone."""
    removed = []
    for path, fd in _opened(directory):
        if not _free(fd) or not os.fstat(fd).st_nlink:
            continue  # its maker lives, or has removed it
        try:
            path.unlink()
        except FileNotFoundError:  # another sweep's; or it got its final name, and its maker died: the next sweep's
            continue
        removed.append((path, os.fstat(fd).st_size))
    return removed


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSlab:
    """A slab file of this host."""

    path: Path
    bytes: int
    alive: bool  # its maker lives
    header: SlabHeader | None  # None: not filled yet, or of another rayzero


def list_slabs(directory: Path = SHARED_MEMORY) -> list[FoundSlab]:
    """The slabs of this host that this user may read, by name."""
    return [
        FoundSlab(
            path=path,
            bytes=os.fstat(fd).st_size,
            alive=not _free(fd),
            header=_header_or_none(path, fd),
        )
        for path, fd in _opened(directory)
    ]


def _header_or_none(path: Path, fd: int) -> SlabHeader | None:
    try:
        return read_header(path, fd)
    except HandshakeError:
        return None


def _opened(directory: Path) -> Iterator[tuple[Path, int]]:
    """Each slab file with a file descriptor that is closed after its turn."""
    for path in sorted([*directory.glob("rayzero-*.slab"), *directory.glob(f"rayzero-*.slab{_MAKING}")]):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, another user's, or no file
            continue
        try:
            yield path, fd
        finally:
            os.close(fd)


def _free(fd: int) -> bool:
    """Whether no maker holds the lock; then none gets it before ``fd`` is closed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
