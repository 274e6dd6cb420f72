"""The slabs that lie on this host, of any run, and the removal of those that no process has any more.
And what keeps some of them from it: a hold is a small file beside the slabs, whose lock a living process has, while a
successor may come for what killed processes have left: the janitors of a run's processes, while somebody may take the
place of one that dies; a dead run's janitor for a while, then the driver that continues the run.

See [Note: no slab stays behind] in slabs/slab.py. Needs no torch, because janitors sweep, hold for long,
and are to stay small.

[Note: hosts without a driver] A process that is killed cannot remove its slabs. On the driver's host the driver or its
janitor does (cluster/janitor.py). Each process on another host has a janitor of its own, which waits until no successor
can need the slabs any more, and until no other process of the run has any on that host: those may still be read.

[Note: slabs that are awaited] Between a death and its successor, a host may have no process of the run, but others'
sweeps have to leave its slabs alone. So a janitor holds them from its start until its patience is over;
on the driver's host the driver's janitor does.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

from rayzero.concurrency.survivor import Maker, Survivor
from rayzero.errors import HandshakeError
from rayzero.slabs.header import SlabHeader, decode_header

SHARED_MEMORY = Path("/dev/shm")
MAKING = ".making"  # suffix of a slab that is not filled yet, and of a hold that is not written
_SUFFIX = ".hold"
_MOST = 1 << 12  # bytes
_LOOK_S = 5.0  # between two looks for other processes of the run
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
        path = directory / f"rayzero-{secrets.token_hex(8)}{_SUFFIX}{MAKING}"
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
    for path in [*directory.glob(f"rayzero-*{_SUFFIX}"), *directory.glob(f"rayzero-*{_SUFFIX}{MAKING}")]:
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


def read_header(path: Path, fd: int) -> SlabHeader:
    """Read the header of an open file. Raises HandshakeError if it is not a slab that this rayzero reads."""
    return decode_header(str(path), os.pread(fd, 1 << 20, 0), os.fstat(fd).st_size)


def sweep(
    directory: Path = SHARED_MEMORY, lineage: str | None = None, *, is_over: bool = False
) -> list[tuple[Path, int]]:
    """Remove the slabs whose makers are dead, unless another process of their run and lineage lives or somebody holds
    them; returns (path, bytes) of each. Slabs of other users stay; so do those that this rayzero
    cannot read, while a process has one that it cannot read either: they may be of the same run.

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
    user: int  # whose it is
    changed_ns: int  # when the file was written to last
    alive: bool  # its maker lives
    header: SlabHeader | None  # None: not filled yet, or from another rayzero


def list_slabs(directory: Path = SHARED_MEMORY) -> list[FoundSlab]:
    """This user's slabs on this host, sorted by name; root's are everybody's."""
    return [
        FoundSlab(
            path=path,
            bytes=(status := os.fstat(fd)).st_size,
            user=status.st_uid,
            changed_ns=status.st_mtime_ns,
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


class SlabJanitor:
    """A process's end: starts the janitor, and releases it. Leaving the ``with`` block closes it."""

    def __init__(self, directory: Path, lineage: str, patience_s: float) -> None:
        """``directory``: of the slabs. ``lineage``: in their headers. ``patience_s``: how long a successor may take to
        come, if this process is killed; 0: there is none. Raises OSError."""
        self._directory, self._lineage = directory, lineage
        self._survivor = Survivor(__name__, str(directory.absolute()), lineage, str(patience_s), detached=True)

    def close(self) -> None:
        """The process has removed its own slabs. It now removes those that killed ones of its run have left, unless a
        janitor still holds them for a successor. Idempotent."""
        self._survivor.close()
        sweep(self._directory, self._lineage)

    def __enter__(self) -> SlabJanitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def clear_up(directory: Path, lineage: str, patience_s: float, hold: Hold | None = None) -> None:
    """Remove what dead processes of a run have left, once a successor would have come. Returns when nothing is left.
    ``hold``: keeps it until then; freed here."""
    if _has_dead(directory, lineage):
        time.sleep(patience_s)
    if hold is not None:
        hold.close()
    sweep(directory, lineage)
    while _has_dead(directory, lineage):
        time.sleep(_LOOK_S)
        sweep(directory, lineage)


def _has_dead(directory: Path, lineage: str) -> bool:
    dead = [slab.header for slab in list_slabs(directory) if not slab.alive]
    return any(header is not None and header.facts.lineage == lineage for header in dead)


def main() -> None:
    """Wait for the maker's death."""
    maker = Maker(sys.argv)
    directory, lineage, patience_s = Path(maker.arguments[0]), maker.arguments[1], float(maker.arguments[2])
    hold = hold_or_none(directory, lineage) if patience_s else None
    try:
        for _ in maker.told():
            pass
        clear_up(directory, lineage, patience_s, hold)
    finally:
        if hold is not None:
            hold.close()


if __name__ == "__main__":
    main()
