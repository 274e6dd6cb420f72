"""Notices the death of another process of this host, from the process itself and not from its connections. What
this process asks for itself: open files, and so connections; imports without the search for garbage."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import resource
import secrets
import select
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from rayzero.concurrency.event_loop import shared_loop

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one kernel. A later process with the same pid has another start time."""

    kernel: str  # boot and pid namespace: pids mean the same in all processes that have it; "": not known
    pid: int
    started: int  # clock ticks after boot


def this_process() -> ProcessIdentity:
    return _identity(os.getpid())


def process_with(pid: int) -> ProcessIdentity | None:
    """The process of this kernel and pid namespace that has this pid now. None: there is none, or this process cannot
    see others' deaths."""
    kernel, started = this_process().kernel, _start_of(pid)
    return ProcessIdentity(kernel, pid, started) if kernel and started is not None else None


@cache
def _identity(pid: int) -> ProcessIdentity:
    """``pid`` is the caller's own: it is the key of the cache because a forked child is another process."""
    started = _start_of(pid)
    if started is None or not hasattr(os, "pidfd_open"):
        return ProcessIdentity("", pid, 0)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ProcessIdentity(f"{boot}:{Path('/proc/self/ns/pid').readlink()}", pid, started)


def _start_of(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped, by SIGSTOP or a debugger. False if there is none."""
    return _stat(pid)[:1] in (["T"], ["t"])


class Sleepers(Generic[T]):
    """Since when processes are stopped."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s, self._since = patience_s, dict[T, float]()

    def overdue(self, stopped: Iterable[T], now: float) -> list[T]:
        """Those of ``stopped``, which are all that are stopped now, that have been so at every look for longer than the
        patience."""
        self._since = {who: self._since.get(who, now) for who in stopped}
        return [who for who, since in self._since.items() if now - since > self._patience_s]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/pid/stat after the process's name, its state first; none if there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def watch_process(process: ProcessIdentity, died: Callable[[], None]) -> Callable[[], None] | None:
    """Call ``died`` once, on the process's event loop, as soon as ``process`` has died; also if it is dead already.
    Returns what ends the watch; idempotent, from any thread. None: this process cannot see that one's death, because it
    runs under another kernel or in another pid namespace.

    A process that watches itself is never told."""
    if process == this_process():
        return lambda: None
    loop = shared_loop().loop
    seen = SeenProcess.open(process)
    if seen is None:
        return None
    watch = _Watch(seen, died)  # frees it
    loop.call_soon_threadsafe(watch.tell if seen.is_dead else watch.begin)
    return lambda: _on_loop(watch.end)


class SeenProcess:
    """A process whose death can be seen: ``file`` becomes readable then."""

    def __init__(self, file: int | None, *, is_dead: bool) -> None:
        self.file, self.is_dead = file, is_dead  # ``file``: a pidfd; None: it was dead when it was looked for

    @classmethod
    def open(cls, process: ProcessIdentity) -> SeenProcess | None:
        """None: this process cannot see that one. Freed by: close()."""
        if not this_process().kernel or process.kernel != this_process().kernel:
            return None
        try:
            file = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return cls(None, is_dead=True)
        except OSError:  # forbidden here: only links tell
            return None
        started = _start_of(process.pid)  # unknown if /proc hides other users' processes
        # another start: another process than the one that is watched, and it holds the pid
        return cls(file, is_dead=started is not None and started != process.started)

    @property
    def has_died(self) -> bool:
        """Whether it is dead by now; one that nobody has waited for yet is."""
        if self.file is None or self.is_dead:
            return self.is_dead
        ready = select.poll()
        ready.register(self.file, select.POLLIN)
        return bool(ready.poll(0))

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


def kernel_word(process: ProcessIdentity) -> int:
    """The boot and pid namespace of a process, in 64 bits; those that are not known are never the same."""
    known = process.kernel or secrets.token_hex()
    return int.from_bytes(hashlib.sha256(known.encode()).digest()[:8], "little")


def has_died(kernel: int, pid: int, started: int) -> bool:
    """Whether a process that shared memory names is known to have died; not one in another pid namespace.

    ``kernel``: its ``kernel_word``."""
    me = this_process()
    if kernel != kernel_word(me):
        return False
    seen = SeenProcess.open(ProcessIdentity(me.kernel, pid, started))
    if seen is None:
        return False
    dead = seen.has_died
    seen.close()
    return dead


def _on_loop(call: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop has ended with the interpreter, and the file with it
        shared_loop().loop.call_soon_threadsafe(call)


class _Watch:
    """A process that the event loop waits for. Its methods run on the loop."""

    def __init__(self, seen: SeenProcess, died: Callable[[], None]) -> None:
        self._seen, self._died = seen, died
        self._over = False

    def begin(self) -> None:
        if not self._over and self._seen.file is not None:
            shared_loop().loop.add_reader(self._seen.file, self.tell)

    def tell(self) -> None:
        if not self._over:
            self.end()
            self._died()

    def end(self) -> None:
        if not self._over:
            self._over = True
            if self._seen.file is not None:
                shared_loop().loop.remove_reader(self._seen.file)
            self._seen.close()


MOST = 1 << 20  # that a process asks for: what Linux lets it have unless somebody has changed fs.nr_open

log = logging.getLogger(__name__)


def open_files_allowed(soft: int, hard: int) -> int:
    """How many files a process may have open once it has raised its soft limit (RLIMIT_NOFILE). A negative limit is
    none."""
    return MOST if soft < 0 else max(soft, MOST if hard < 0 else min(hard, MOST))


def raise_open_files() -> int:
    """Raise this process's soft limit of open files as far as it may; returns how many it may have open then.
    Idempotent.

    Many systems give a process 1,024, for programs that use select(2), and a much higher hard limit for all others.
    Ray raises the limit of a driver, and so of the cluster that ``ray.init`` starts, to 65,536, but not that of a node
    that ``ray start`` makes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = open_files_allowed(soft, hard)
    if 0 <= soft < allowed:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        except (OSError, ValueError) as error:  # beyond fs.nr_open, or forbidden here
            log.warning("the limit of open files stays at %d: %s", soft, error)
            return soft
    return allowed


@contextmanager
def uncollected() -> Iterator[None]:
    """A block in which no garbage is collected, in any thread; afterwards it is as it was before. For imports alone: to
    import torch makes half a million objects that stay, and Python would look through all of them again and again while
    they grow. What else makes garbage may need much memory."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
