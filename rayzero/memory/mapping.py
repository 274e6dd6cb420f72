"""Maps ranges of virtual memory through the C library, and unmaps them once nothing uses them any more."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
import weakref
from ctypes import c_int, c_size_t, c_void_p
from typing import Any

import torch
from torch import Tensor

from rayzero.memory.pages import PAGE, whole_pages

_MAP_FIXED = 0x10  # not in the mmap module; the same on Linux and macOS
_PROT_NONE = 0  # not in the mmap module either
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_HIGHEST = 7 if sys.byteorder == "little" else 0  # the byte of a pagemap entry that has these flags (bits 63, 62, 61)
_PRESENT, _SWAPPED, _OF_FILE = 0x80, 0x40, 0x20
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2), Linux
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


class Mapping:
    """A range of this process's memory. Its bytes stay mapped while it, its ``keeper`` or any tensor of it is alive.

    Knows addresses; not what lies there, or which file it came from."""

    def __init__(self, address: int, size: int) -> None:
        """Take over a range of ``size`` bytes that has just been mapped."""
        self.address, self.size = address, size
        self.keeper = (ctypes.c_ubyte * size).from_address(address)  # held by tensors, and by users of the address
        weakref.finalize(self.keeper, _unmap, address, size).atexit = False  # threads may still read at exit

    @classmethod
    def of_file(cls, fd: int, size: int, *, writable: bool) -> Mapping:
        """Map the first ``size`` bytes of a file, shared with every process that maps it. Raises OSError."""
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        return cls(_map(None, size, access, mmap.MAP_SHARED, fd, 0), size)

    @classmethod
    def fresh(cls, size: int) -> Mapping:
        """Map ``size`` bytes of zeroed memory of this process. Raises OSError."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return cls(_map(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0), size)

    @classmethod
    def reserve(cls, size: int) -> Mapping:
        """Reserve addresses without memory: reading one faults until ``place`` puts a file there. Raises OSError."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return cls(_map(None, size, _PROT_NONE, flags, -1, 0), size)

    def place(self, at: int, fd: int, file_offset: int, size: int, *, private: bool) -> None:
        """Map ``size`` bytes of a file, from ``file_offset``, at offset ``at``, readable and writable. All three are in
        bytes, the offsets are whole pages. ``private``: this process's writes stay its own. Raises OSError."""
        kind = mmap.MAP_PRIVATE | _MAP_NORESERVE if private else mmap.MAP_SHARED  # few private pages are written
        access = mmap.PROT_READ | mmap.PROT_WRITE
        _map(self.address + at, size, access, kind | _MAP_FIXED, fd, file_offset)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """The bytes from ``offset`` on as a tensor: 1D, ``numel`` elements. Raises ValueError beyond the end."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self.keeper, dtype=dtype, count=numel, offset=offset)

    def populate(self, offset: int, size: int) -> None:
        """Fault in pages of a fresh file mapping, which are zero. Raises OSError if memory is short."""
        try:
            self._advise(offset, size, _POPULATE_WRITE)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            ctypes.memset(self.address + offset, 0, size)  # an older kernel: touch them

    def has_private(self, offset: int, size: int) -> bool:
        """Whether this process has its own pages there, because it wrote to a private mapping of a file. Reads 8 bytes
        a page; True if the system does not say."""
        first, pages = (self.address + offset) // PAGE, whole_pages(size) // PAGE
        try:
            pagemap = os.open("/proc/self/pagemap", os.O_RDONLY)  # Linux, admin-guide/mm/pagemap.rst
        except OSError:
            return True
        try:
            entries = os.pread(pagemap, 8 * pages, 8 * first)
        except OSError:
            return True
        finally:
            os.close(pagemap)
        highest = set(entries[_HIGHEST::8])  # one byte a page, few different ones
        return any(flags & (_PRESENT | _SWAPPED) and not flags & _OF_FILE for flags in highest)

    def drop_private(self, offset: int, size: int) -> None:
        """Discard what this process wrote into private pages: they show the file again."""
        self._advise(offset, size, mmap.MADV_DONTNEED)

    def place_nothing(self, at: int, size: int) -> None:
        """Map fresh memory of this process, which reads as zeros, at offset ``at``; whole pages, in bytes. What was
        there is given back. Raises OSError."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        _map(self.address + at, size, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, -1, 0)

    def _advise(self, offset: int, size: int, advice: int) -> None:
        _check(_libc().madvise(self.address + offset, size, advice))


def punch_hole(fd: int, offset: int, size: int) -> None:
    """Free the pages of a range of a shared memory file, which keeps its size. Raises OSError."""
    _check(_libc().fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, size))


def _map(address: int | None, size: int, access: int, flags: int, fd: int, offset: int) -> int:
    mapped = _libc().mmap(address, size, access, flags, fd, offset)
    _check(-1 if mapped == c_void_p(-1).value else 0)
    return int(mapped)


def _unmap(address: int, size: int) -> None:
    _check(_libc().munmap(address, size))


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@functools.cache
def _libc() -> Any:
    """The C library. Its calls release the interpreter lock: populating a gigabyte takes a quarter of a second."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = c_void_p
    libc.mmap.argtypes = (c_void_p, c_size_t, c_int, c_int, c_int, ctypes.c_int64)
    libc.fallocate.argtypes = (c_int, c_int, ctypes.c_int64, ctypes.c_int64)
    libc.munmap.argtypes = (c_void_p, c_size_t)
    libc.madvise.argtypes = (c_void_p, c_size_t, c_int)
    return libc
