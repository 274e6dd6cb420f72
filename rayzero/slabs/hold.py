"""Keeps what killed processes have left in shared memory from being swept, so that their successors find it.

A hold is a small file beside the slabs, whose lock a living process has: the janitors of a run's processes, while
somebody may take the place of one that dies; a dead run's janitor for a while, then the driver that continues the run.
Needs no torch, because janitors wait for long and are to stay small.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

__all__ = ["Hold", "HoldRecord", "end_hold", "held_in", "hold_or_none", "is_free", "is_ours", "remove_dead_holds"]

_SUFFIX, _MAKING = ".hold", ".making"
_MOST = 1 << 12  # bytes
_ENDS_S = 5.0  # how long a holder may take to end


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldRecord:
    """What a hold keeps."""

    lineage: str  # of the slabs
    pid: int  # of the holder
    until: float | None = None  # seconds since 1970; None: until its run, or who continues it, needs it no more
    step: int | None = None  # that is open, once it is known


class Hold:
    """Keeps a lineage's slabs as long as this process lives, or until ``close``."""

    def __init__(self, directory: Path, lineage: str, until: float | None = None) -> None:
        """``directory``: of the slabs. ``lineage``, ``until``: see ``HoldRecord``. Raises OSError."""
        self._held = HoldRecord(lineage=lineage, pid=os.getpid(), until=until)
        self._path, self._fd = _create(directory, self._held)  # freed by: close(), or the end of the process

    def tell(self, step: int, until: float) -> None:
        """Say which step is kept, and how long. Raises OSError."""
        before = self._path, self._fd
        self._held = replace(self._held, step=step, until=until)
        self._path, self._fd = _create(self._path.parent, self._held)
        _remove(*before)

    def close(self) -> None:
        """Give it up. Idempotent."""
        if self._fd >= 0:
            _remove(self._path, self._fd)
            self._fd = -1


def hold_or_none(directory: Path, lineage: str, until: float | None = None) -> Hold | None:
    """Hold a lineage's slabs; None: the directory takes no file."""
    with suppress(OSError):
        return Hold(directory, lineage, until)
    return None


def _remove(path: Path, fd: int) -> None:
    path.unlink(missing_ok=True)
    os.close(fd)


def _create(directory: Path, held: HoldRecord) -> tuple[Path, int]:
    while True:
        path = directory / f"rayzero-{secrets.token_hex(8)}{_SUFFIX}{_MAKING}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            os.write(fd, json.dumps(asdict(held)).encode())
            return path.rename(path.with_suffix("")), fd
        os.close(fd)  # removed between the two calls


def held_in(directory: Path) -> list[HoldRecord]:
    """The holds of living processes."""
    return [held for _, held in _living(directory)]


def _living(directory: Path) -> Iterator[tuple[Path, HoldRecord]]:
    for path in sorted(directory.glob(f"rayzero-*{_SUFFIX}")):
        with suppress(OSError, ValueError, TypeError):  # gone meanwhile, another user's, or of another version
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if is_ours(fd) and not is_free(fd):
                    yield path, HoldRecord(**json.loads(os.pread(fd, _MOST, 0)))
            finally:
                os.close(fd)


def remove_dead_holds(directory: Path) -> None:
    """Remove the files of holders that were killed."""
    for path in [*directory.glob(f"rayzero-*{_SUFFIX}"), *directory.glob(f"rayzero-*{_SUFFIX}{_MAKING}")]:
        with suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if is_free(fd):
                    path.unlink(missing_ok=True)
            finally:
                os.close(fd)


def end_hold(directory: Path, lineage: str) -> None:
    """End the janitor that holds a lineage, if there is one: what it keeps stays where it is. Returns once it is gone,
    so that it sweeps nothing any more."""
    for path, held in list(_living(directory)):
        if held.lineage != lineage or held.until is None:
            continue
        with suppress(ProcessLookupError):
            os.kill(held.pid, signal.SIGTERM)
        deadline = time.monotonic() + _ENDS_S
        while any(each.pid == held.pid for _, each in _living(directory)) and time.monotonic() < deadline:
            time.sleep(0.01)
        path.unlink(missing_ok=True)


def is_ours(fd: int) -> bool:
    """Whether an open file is a regular one of this user; of anybody, if this is root. Everybody may put files into
    /dev/shm, under any name."""
    status = os.fstat(fd)
    return stat.S_ISREG(status.st_mode) and os.geteuid() in (0, status.st_uid)


def is_free(fd: int) -> bool:
    """Whether no living process has the lock of a file. If so, none can get it before ``fd`` is closed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
