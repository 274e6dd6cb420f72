"""Slabs: files of shared memory. One process makes a slab and holds its lock; any number of processes attach it.

[Note: no slab stays behind] A maker locks its file (``flock``) before it fills it, and keeps the lock while it lives.
The kernel frees the lock when the maker dies, however it dies. ``sweep`` removes exactly the files for which it gets
a shared lock, and only those of runs without a living process on this host that nobody holds (slabs/sweep.py): a dead
owner's slabs wait for its successor (``Slab.adopt``). (An exclusive lock would fail while another process lists or
sweeps the slab, so a dead maker would seem alive.) A sweep can hit a file that is created but not locked yet: its
maker, which waits for the sweep's lock, then sees that the file has lost its name, and makes another one. A process
that the maker forked, without exec, shares the lock and keeps the slab from sweeps.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import os
import re
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from rayzero.concurrency.backoff import backoff
from rayzero.errors import ConfigError, HandshakeError, StoreClosedError, StoreError
from rayzero.files import regular_size
from rayzero.memory.mapping import Mapping, PageLock, punch_hole
from rayzero.memory.planner import no_room
from rayzero.quantities import PAGE, format_bytes
from rayzero.slabs.header import SlabFacts, SlabHeader, check_header, encode_header
from rayzero.slabs.sweep import MAKING, SHARED_MEMORY, read_header

SLAB_BYTES = 1 << 30  # several smaller files, so that several threads fill them
_PIECE = 64 << 20  # bytes that are allocated and faulted in between two reports of progress
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT)
_LOOKED_AT_S = 1.0  # how long others may look at a slab that is taken over

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
log = logging.getLogger(__name__)
_QUICK_S = 1.0  # nothing is logged before
_SAY_EVERY_S = 5.0


class Slab:
    """One file of shared memory, mapped.

    Knows its file, its lock and its mapping; not what the regions mean. Its tensors and ``keeper`` stay valid after
    ``close()``; the memory is freed when the last of them is gone, in every process."""

    def __init__(
        self, header: SlabHeader, mapping: Mapping, fd: int, path: Path | None, *, made: bool, adopted: bool = False
    ) -> None:
        """Take over an open, mapped file. ``Slab.create``, ``Slab.attach`` and ``Slab.adopt`` call it."""
        self.header, self.path = header, path
        self._mapping: Mapping | None = mapping
        self._fd = fd
        ours = path if made or adopted else None
        self._release = weakref.finalize(self, _release, fd, ours, os.getpid(), unlink=not adopted)  # at exit too

    @classmethod
    def create(cls, header: SlabHeader, directory: Path | None = SHARED_MEMORY, *, later: Collection[str] = ()) -> Slab:
        """Make one slab; see ``create_slabs``."""
        return create_slabs([header], directory, later=later)[0]

    @classmethod
    def attach(cls, path: Path, *, writable: bool, run: str, layout_digest: str) -> Slab:
        """Map a slab of another process. Raises HandshakeError if it is missing, is not a slab, or is from another run
        or layout, OSError if it cannot be mapped.

        ``writable=False``: a write into one of its tensors kills the process."""
        try:
            regular_size(path, follow_links=False)  # a rank may name anything; opening a FIFO waits for ever
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

    @classmethod
    def adopt(cls, path: Path, *, with_others: bool = False) -> Slab:
        """Take a slab over from its maker, which must be dead: this process holds its lock from here on. The file keeps
        its name, so who has mapped it goes on. ``close`` removes it; if this process ends without that, it stays for
        another successor. Raises HandshakeError if it is gone or no slab, StoreError if its maker lives.

        with_others: other living owners may use other parts of it, and one of them may hold the lock."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as exc:
            raise HandshakeError(f"slab {path} is not there: it was swept before a successor took it over") from exc
        try:
            _take_lock(path, fd, must=not with_others)
            if not os.fstat(fd).st_nlink:
                raise HandshakeError(f"slab {path} was swept before a successor took it over")
            header = replace(read_header(path, fd), pid=os.getpid())
            os.pwrite(fd, encode_header(header), 0)  # at once: it is less than a page
            mapping = Mapping.of_file(fd, header.bytes, writable=True)
        except BaseException:
            os.close(fd)
            raise
        return cls(header, mapping, fd, path, made=False, adopted=True)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """The bytes from ``offset`` on, counted from the slab's start, as a tensor: 1D, ``numel`` elements. Raises
        ValueError beyond the slab's end, StoreClosedError after ``close``."""
        return self._open().tensor(offset, numel, dtype)

    def address(self, offset: int) -> int:
        """The address of byte ``offset`` in this process, valid while ``keeper`` is held."""
        return self._open().address + offset

    @property
    def keeper(self) -> object:
        """Keeps the slab mapped while it is held, for callers that use addresses."""
        return self._open().keeper

    def page_lock(self, device: torch.device, offset: int = 0, size: int | None = None) -> PageLock:
        """Lock the pages of ``size`` bytes from ``offset`` on (None: all), so that a CUDA device copies to and from
        them directly. The slab must be writable here."""
        mapping = self._open()
        span = mapping.address + offset, mapping.size - offset if size is None else size
        return PageLock([span], mapping.keeper, device=device)

    def fileno(self) -> int:
        """The open file's descriptor, to map parts of it elsewhere."""
        self._open()
        return self._fd

    def allocate(self, offset: int, size: int) -> None:
        """Make sure that ``size`` bytes from ``offset`` on have pages, after ``punch`` or if they were left for later;
        no effect on pages that are there. Raises MemoryPlanError if there is no room: without this, a later write would
        be a SIGBUS."""
        try:
            self._open().allocate(self._fd, offset, size)
        except OSError as error:
            directory = self.path.parent if self.path is not None else None
            raise no_room(size, directory, str(error.strerror)) from error

    def punch(self, offset: int, size: int) -> int:
        """Give the whole pages among ``size`` bytes from ``offset`` on back to the kernel; returns their bytes. They
        read as zeros; call ``allocate`` before they are written."""
        self._open()
        start, stop = -(-offset // PAGE) * PAGE, (offset + size) // PAGE * PAGE
        if start < stop:
            punch_hole(self._fd, start, stop - start)
        return max(0, stop - start)

    def close(self, *, unlink: bool = True) -> None:
        """Close the file. Who made or adopted it also removes it; ``unlink=False`` leaves that to a successor or a
        ``sweep``. Idempotent."""
        self._mapping = None
        if (left := self._release.detach()) is not None:
            _, _, (fd, path, pid), _ = left
            _release(fd, path, pid, unlink=unlink)

    def _open(self) -> Mapping:
        if self._mapping is None:
            raise StoreClosedError(f"slab {self.path} was used after close()")
        return self._mapping


def _release(fd: int, path: Path | None, pid: int, *, unlink: bool = True) -> None:
    """Close a slab's file. ``path``: set only for the maker, process ``pid``, which also removes the file and frees the
    lock; a process forked from the maker does neither."""
    if path is not None and os.getpid() == pid:
        if unlink:
            path.unlink(missing_ok=True)
        fcntl.flock(fd, fcntl.LOCK_UN)  # a mapping that is still in use would keep it
    os.close(fd)


# ---- making -----------------------------------------------------------------------------------------------------


def create_slabs(
    headers: Sequence[SlabHeader],
    directory: Path | None = SHARED_MEMORY,
    *,
    on_progress: Progress | None = None,
    later: Collection[str] = (),
) -> list[Slab]:
    """Make slabs with all pages allocated, zeroed and mapped, several at once; all of them or none.

    ``later``: kinds of regions whose pages are not allocated yet: ``Slab.allocate`` them before their first use.
    ``directory``: in shared memory, or on a file system with room; None: unnamed files, for one process.
    ``on_progress``: called in the making threads, one at a time. Pages lie where the calling thread's NUMA policy says.
    Raises MemoryPlanError if there is no room, ConfigError if there is no such directory."""
    total = sum(size for header in headers for _, size in header.spans(later))
    if directory is not None:
        _check_room(total, directory)
    filling = _Filling(total, on_progress)
    pool = ThreadPoolExecutor(min(len(headers), os.cpu_count() or 1, 4) or 1, "rayzero-slab")
    try:
        return list(pool.map(functools.partial(_create, directory, filling, later), headers))
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
    """The slabs that are being made: the bytes done, the slabs made, and the first error."""

    def __init__(self, total: int, on_progress: Progress | None) -> None:
        self._total, self._done, self._on_progress = total, 0, on_progress
        self._made: list[Slab] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def go_on(self) -> bool:
        """Whether there has been no error so far."""
        return self._error is None

    def progress(self, size: int) -> None:
        """Count ``size`` more bytes as done."""
        with self._lock:
            self._done += size
            if self._on_progress:
                self._on_progress(self._done, self._total)

    def add(self, slab: Slab) -> Slab:
        """Keep a slab that is made; returns it."""
        with self._lock:
            self._made.append(slab)
        return slab

    def stop(self, error: BaseException) -> BaseException:
        """Stop the other slabs because of ``error``; returns the first error."""
        with self._lock:
            self._error = self._error or error
            return self._error

    def close_all(self) -> None:
        """Close and remove the slabs that were made."""
        for slab in self._made:
            slab.close()


def _create(directory: Path | None, filling: _Filling, later: Collection[str], header: SlabHeader) -> Slab:
    if directory is None:
        fd, path = os.memfd_create(_stem(header.facts), os.MFD_CLOEXEC), None
    else:
        fd, path = _create_locked(directory, _stem(header.facts))
    try:
        os.ftruncate(fd, header.bytes)
        mapping = Mapping.of_file(fd, header.bytes, writable=True)
        for start, size in _pieces(header, later):
            if not filling.go_on():
                raise InterruptedError("another slab could not be made")
            mapping.allocate(fd, start, size)
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


def _pieces(header: SlabHeader, later: Collection[str]) -> Iterator[tuple[int, int]]:
    for start, size in header.spans(later):
        for at in range(start, start + size, _PIECE):
            yield at, min(_PIECE, start + size - at)


def _create_locked(directory: Path, stem: str) -> tuple[int, Path]:
    """Create a file and lock it. See [Note: no slab stays behind]."""
    while True:
        path = directory / f"{stem}-{secrets.token_hex(4)}.slab{MAKING}"
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
            f"slab_dir is {str(directory)!r}, which is not a directory: name one with room for shared memory"
        )
    if total > shutil.disk_usage(directory).free:
        raise no_room(total, directory, "too small")


def _take_lock(path: Path, fd: int, *, must: bool) -> None:
    """Lock a dead maker's slab. Who only looks at it (``is_free``) may hold the lock for a moment. ``must``: nobody
    else may have it; otherwise it is enough that somebody has it."""
    deadline = time.monotonic() + _LOOKED_AT_S
    for pause in backoff():
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as exc:
            if not must:
                return
            if time.monotonic() + pause > deadline:
                raise StoreError(f"slab {path} cannot be taken over: the process that made it still runs") from exc
        time.sleep(pause)


class FillProgress:
    """Logs a line once making takes more than a second, then every few seconds, then at the end. A ``Progress``
    (slabs/slab.py), for one call of ``create_slabs``."""

    def __init__(self, who: str) -> None:
        """``who``: the maker's name in the log."""
        self._who, self._began = who, monotonic()
        self._next = self._began + _QUICK_S

    def __call__(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes are made."""
        now, told = monotonic(), self._next > self._began + _QUICK_S
        if now < self._next and not (done == total and told):
            return
        self._next = now + _SAY_EVERY_S
        speed = done / (now - self._began) / 1e9
        log.info(
            "%s has made %s of %s of shared memory, %.1f GB/s",
            self._who,
            format_bytes(done),
            format_bytes(total),
            speed,
        )
