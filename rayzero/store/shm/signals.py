"""Flags, bells and cells: words in shared memory by which processes signal each other (``native/signals.c``).

A signal is an address in writable shared memory and the object that keeps that memory mapped. A process that loads a
flag, wakes from a bell or reads a cell sees everything that the other process wrote before it stored, rang or wrote;
a plain Python store does not guarantee that. Words lie at multiples of their own size; fresh (zeroed) memory is a valid
signal of each kind.

Two processes share memory if they have the same kernel, the same mount and the same user.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from array import array
from collections.abc import Callable
from ctypes import byref, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path

from rayzero.errors import UnsupportedError
from rayzero.kernels import native
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.store.shm import signals

__all__ = [
    "BELL_BYTES",
    "Bell",
    "Cell",
    "Listener",
    "available",
    "changed",
    "fence_acquire",
    "load_acquire_32",
    "load_acquire_64",
    "store_release_32",
    "store_release_64",
]

BELL_BYTES = 4
_CELL_HEADER = 16  # bytes: sequence and size, rz_cell in signals.c


def available() -> str | None:
    """None if signals work; else why not, in one sentence."""
    library = _load()
    return library if isinstance(library, str) else None


# ---- flags ------------------------------------------------------------------------------------------------------


def store_release_32(address: int, value: int) -> None:
    """Store a 32-bit word; a process that loads it sees everything written before."""
    _signals().store_release_32(address, value)


def store_release_64(address: int, value: int) -> None:
    """Store a 64-bit word; a process that loads it sees everything written before."""
    _signals().store_release_64(address, value)


def load_acquire_32(address: int) -> int:
    """Load a 32-bit word, and see everything written before it was stored."""
    return int(_signals().load_acquire_32(address))


def load_acquire_64(address: int) -> int:
    """Load a 64-bit word, and see everything written before it was stored."""
    return int(_signals().load_acquire_64(address))


def fence_acquire() -> None:
    """Order every load before this call, also those of a copy, before every one after it."""
    _signals().fence_acquire()


def changed(address: int, stride: int, seen: array[int], count: int) -> list[int]:
    """Which of ``count`` 64-bit words, ``stride`` bytes apart from ``address`` on, differ from ``seen``.

    seen: ``array("Q")`` of at least ``count`` values, which this updates. One call handles thousands of words."""
    if seen.typecode != "Q" or len(seen) < count:
        raise UnsupportedError(
            f"seen is array({seen.typecode!r}) of {len(seen)} values: it must be array('Q') of {count}"
        )
    indices = (c_int64 * count)()
    found: int = _signals().changed(address, stride, seen.buffer_info()[0], count, indices)
    return indices[:found]


# ---- bells and cells --------------------------------------------------------------------------------------------


class Bell:
    """A 32-bit count of rings in shared memory (it wraps around), on which threads and processes sleep.

    Knows one word; not what a ring means. Read the value, look for work, then wait on that value: no ring is lost."""

    __slots__ = ("_address", "_memory", "_signals")

    def __init__(self, address: int, memory: object) -> None:
        """``address``: ``BELL_BYTES`` bytes, at a multiple of 4, in writable shared memory that ``memory`` keeps
        mapped."""
        self._signals = _signals()
        self._address, self._memory = address, memory

    @property
    def value(self) -> int:
        """How often it has rung, modulo 2^32."""
        return int(self._signals.load_acquire_32(self._address))

    def ring(self) -> None:
        """Wake all waiters. A system call of about a microsecond; it keeps the interpreter lock."""
        self._signals.ring(self._address)

    def wait(self, seen: int, timeout_s: float) -> int:
        """Sleep until the value is not ``seen``, for at most ``timeout_s`` seconds. Returns the value; ``seen`` means
        that time is up."""
        if (value := self.value) != seen:
            return value
        deadline = time.monotonic_ns() + int(timeout_s * 1e9)
        while True:  # a signal ends it early, with the value unchanged: Python's handler runs and may raise
            value = int(self._signals.wait(self._address, seen, deadline))
            if value != seen or time.monotonic_ns() >= deadline:
                return value


class Cell:
    """A message in shared memory that one writer replaces while any number of readers read it.

    Knows bytes and their sequence number; not their meaning, or who waits for them (ring a Bell after the write)."""

    __slots__ = ("_address", "_memory", "_signals", "capacity")

    def __init__(self, address: int, memory: object, capacity: int) -> None:
        """``address``: ``Cell.bytes_for(capacity)`` bytes, at a multiple of 8, in writable shared memory that
        ``memory`` keeps mapped. ``capacity``: bytes of the largest message."""
        self._signals = _signals()
        self._address, self._memory, self.capacity = address, memory, capacity

    @staticmethod
    def bytes_for(capacity: int) -> int:
        """Bytes of shared memory that a cell takes."""
        return _CELL_HEADER + _whole_words(capacity)

    @staticmethod
    def capacity_in(size: int) -> int:
        """Bytes of the largest message of a cell that takes ``size`` bytes."""
        return size - _CELL_HEADER

    def write(self, message: bytes) -> None:
        """Replace the message. Only one thread of one process may write at a time, not always the same one. Raises
        UnsupportedError if the message does not fit."""
        if len(message) > self.capacity:
            raise UnsupportedError(f"a message of {len(message):,} bytes does not fit a cell of {self.capacity:,}")
        self._signals.cell_write(self._address, message, len(message))

    def read(self) -> tuple[int, bytes] | None:
        """The message and its number (1: the first); None: never written, or being written."""
        to, size = ctypes.create_string_buffer(_whole_words(self.capacity)), c_uint64()
        sequence = int(self._signals.cell_read(self._address, to, len(to), byref(size)))
        return (sequence // 2, to.raw[: size.value]) if sequence else None


def _whole_words(size: int) -> int:
    return -(-size // 8) * 8


# ---- the library ------------------------------------------------------------------------------------------------


class _Signals:
    """The functions of signals.c. All but ``wait`` keep the interpreter lock: they take nanoseconds."""

    def __init__(self, path: str) -> None:
        quick, slow = ctypes.PyDLL(path), ctypes.CDLL(path)
        self.has_futex = bool(quick.rz_has_futex())
        typed = native.typed
        self.store_release_32 = typed(quick.rz_store_release_32, None, c_void_p, c_uint32)
        self.store_release_64 = typed(quick.rz_store_release_64, None, c_void_p, c_uint64)
        self.load_acquire_32 = typed(quick.rz_load_acquire_32, c_uint32, c_void_p)
        self.load_acquire_64 = typed(quick.rz_load_acquire_64, c_uint64, c_void_p)
        self.fence_acquire = typed(quick.rz_fence_acquire, None)
        self.changed = typed(quick.rz_changed, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_void_p)
        self.ring = typed(quick.rz_ring, None, c_void_p)
        self.wait = typed(slow.rz_wait, c_uint32, c_void_p, c_uint32, c_int64)
        self.cell_write = typed(quick.rz_cell_write, None, c_void_p, c_void_p, c_uint64)
        self.cell_read = typed(quick.rz_cell_read, c_uint64, c_void_p, c_void_p, c_uint64, c_void_p)


@functools.cache
def _load() -> _Signals | str:
    library = native.load()
    if isinstance(library, str):
        return library
    try:
        signals = _Signals(str(library.path))
    except AttributeError as exc:
        return f"{library.path.name} is older than this rayzero: install it again ({exc})"
    return signals if signals.has_futex else "signals between processes need a 64-bit Linux"


def _signals() -> _Signals:
    signals = _load()
    if isinstance(signals, str):
        raise UnsupportedError(f"no signals between processes: {signals}")
    return signals


# ---- listening ---------------------------------------------------------------------------------------------------

_LISTEN_S = 1.0  # how often a listener looks even if nothing rings


class Listener:
    """Looks at once, and again whenever the bell rings, in a thread that it starts.

    Knows the bell; not what there is to see. A ring during a look makes it look again."""

    def __init__(self, bell: Bell, look: Callable[[], None], name: str) -> None:
        """``look`` must not wait, and handles its own errors."""
        self._bell, self._look = bell, look
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name=name, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._closing:
            heard = self._bell.value  # before looking
            self._look()
            self._bell.wait(heard, _LISTEN_S)

    def close(self) -> None:
        """End the thread and join it. If the thread itself calls this, it ends after the current look. Idempotent."""
        self._closing = True
        self._bell.ring()
        if self._thread is not threading.current_thread():
            self._thread.join()


def host_identity(directory: Path = SHARED_MEMORY) -> str:
    """Equal in processes that can map each other's slabs in ``directory``; "" if this one cannot share memory.

    Containers on one host have the same boot id, but different mounts."""
    if why_no_sharing(directory) is not None:
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    mount = directory.stat()
    return f"{boot}:{mount.st_dev}:{mount.st_ino}:{os.geteuid()}"


def why_no_sharing(directory: Path = SHARED_MEMORY) -> str | None:
    """Why this process cannot share memory, in a few words; None if it can."""
    reason = signals.available()
    if reason is None and not os.access(directory, os.W_OK | os.X_OK):
        reason = f"{directory} cannot be written to"
    return reason
