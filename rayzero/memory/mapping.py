"""Maps ranges of virtual memory through the C library, and unmaps them once nothing uses them any more; page-locks host
memory by registering it with the CUDA driver, so that CUDA can copy from and to it by itself.

[Note: torch's own] ``pin_memory=True`` takes the next power of two, up to twice what was asked for, and keeps what is
freed. A range that this module maps and registers takes whole pages, and goes back when its last tensor does.

[Note: huge pages] Adam's kernel takes 0.86, a sum of squares 0.6 of the time over huge pages (2 MiB) that it takes over
pages of 4 KiB, and Linux makes none for shared memory by itself: shmem_enabled is "never" on most systems. It makes
them for a program that asks for a range (MADV_COLLAPSE, Linux 6.1), whatever the setting but "deny". A block of which
one page is there takes a third of the time that its small pages would take. A process has the use of huge pages where
addresses and offsets in the file are alike, so files and pieces of files are mapped that way.

[Note: CUDA's last error] CUDA keeps a refusal as the thread's last error, and torch reads it after each kernel launch:
the next one, whatever it computes, would raise it as its own. torch does not offer cudaGetLastError, which clears it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from ctypes import c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayzero.concurrency.threads import on_device, with_index
from rayzero.errors import MemoryPlanError
from rayzero.quantities import PAGE, format_bytes, whole_pages

_MAP_FIXED = 0x10  # not in the mmap module; the same on Linux and macOS
_PROT_NONE = 0  # not in the mmap module either
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_HIGHEST = 7 if sys.byteorder == "little" else 0  # the byte of a pagemap entry that has these flags (bits 63, 62, 61)
_PRESENT, _SWAPPED, _OF_FILE = 0x80, 0x40, 0x20
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2), Linux
_HUGEPAGE = 14  # MADV_HUGEPAGE, Linux
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1


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
        found = cls.reserve(size)
        _map(found.address, size, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
        return found

    @classmethod
    def fresh(cls, size: int) -> Mapping:
        """Map ``size`` bytes of zeroed memory of this process, in huge pages where the system has them. Raises
        OSError."""
        found, flags = cls.reserve(size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _map(found.address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        with suppress(OSError):  # a kernel without them
            found._advise(0, size, _HUGEPAGE)
        return found

    @classmethod
    def reserve(cls, size: int, file_offset: int = 0) -> Mapping:
        """Reserve addresses without memory: reading one faults until ``place`` puts a file there. ``file_offset``:
        where the bytes begin in their file, in whole pages. [Note: huge pages] Raises OSError."""
        huge, room, flags = huge_page(), whole_pages(size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if size < huge:
            return cls(_map(None, size, _PROT_NONE, flags, -1, 0), size)
        first = _map(None, room + huge, _PROT_NONE, flags, -1, 0)
        address = first + (file_offset - first) % huge
        for at, rest in ((first, address - first), (address + room, first + huge - address)):
            if rest:
                _unmap(at, rest)
        return cls(address, size)

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

    def allocate(self, fd: int, offset: int, size: int) -> None:
        """Give a range of the file that is mapped here pages, huge ones where the system has them. [Note: huge pages]
        The bytes of pages that are there stay. Raises OSError if memory is short: without this, a later write would be
        a SIGBUS."""
        huge = huge_page()
        start, stop = -(-offset // huge) * huge, (offset + size) // huge * huge
        for block in range(start, stop, huge):
            os.posix_fallocate(fd, block, PAGE)
        if start < stop:
            self.make_huge(start, stop - start)  # or the next call makes small pages, or says that there is no room
        os.posix_fallocate(fd, offset, size)

    def make_huge(self, offset: int, size: int) -> bool:
        """Make huge pages of a range of a file, each block of which has a page; whether the system did."""
        try:
            self._advise(offset, size, _COLLAPSE)
        except OSError:
            return False
        return True

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


@functools.cache
def huge_page() -> int:
    """Bytes of a huge page; a size that nothing reaches where the system has none."""
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except OSError:
        return sys.maxsize


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


_PORTABLE = 1  # cudaHostRegisterPortable: CUDA runtime API, cudaHostRegister

log = logging.getLogger(__name__)

_locked: dict[int, int] = {}  # of this process: address -> bytes


def locked_bytes() -> int:
    """How many bytes this process has registered now."""
    return sum(list(_locked.values()))


def host_zeros(numel: int, dtype: torch.dtype, *, pinned_for: torch.device | None) -> Tensor:
    """Zeroed host memory, 1D. ``pinned_for``: page-locked, for copies to and from this CUDA device; None: it is not.
    [Note: torch's own] Pages that are not take no memory before they are written; torch.zeros would write them. Raises
    MemoryPlanError if the driver refuses. Freed with its last tensor, and if it is page-locked, once that device has
    ended what is queued."""
    if not numel:
        return torch.zeros(0, dtype=dtype, device="cpu")
    mapping = Mapping.fresh(whole_pages(numel * dtype.itemsize))
    if pinned_for is None:
        return mapping.tensor(0, numel, dtype)
    device = with_index(pinned_for)
    runtime = _register(mapping.address, mapping.size, device)
    last = weakref.finalize(mapping.keeper, _unregister_idle, runtime, mapping.address, device)  # before it is unmapped
    last.atexit = False
    return mapping.tensor(0, numel, dtype)


def beyond_limit(params: int, gradients: int, limit: int) -> str | None:
    """Why page-locking a rank's shared memory may fail, with the sum; None if ``limit`` allows it. All are in bytes;
    ``limit`` is RLIMIT_MEMLOCK, and a negative one is no limit.

    This is a warning and not a refusal, because the driver decides whether registered memory counts. NVIDIA's driver
    pins it without charging it, even in containers with the usual limit of 64 KiB or 8 MiB. If it does count,
    ``PageLock`` fails."""
    needed = params + gradients
    if limit < 0 or needed <= limit:
        return None
    return (
        f"page-locking needs {format_bytes(needed)} = parameters {format_bytes(params)} + gradients "
        f"{format_bytes(gradients)}, but RLIMIT_MEMLOCK is {format_bytes(limit)}; if CUDA refuses, raise it (ulimit "
        "-l, docker --ulimit memlock=-1), or set pin_cpu_memory=False"
    )


class PageLock:
    """Registered ranges of memory. They stay registered until ``release()``, or until nothing refers to this object."""

    def __init__(self, ranges: Sequence[tuple[int, int]], keeper: object, *, device: torch.device) -> None:
        """``ranges``: (address, bytes) of each part. ``keeper``: keeps them mapped. ``device``: the CUDA device
        that copies from and to them. Raises MemoryPlanError if the driver refuses; then none is registered."""
        done: list[tuple[Any, int]] = []
        device = with_index(device)
        try:
            for address, size in ranges:
                done.append((_register(address, size, device), address))
        except MemoryPlanError:
            _unregister_all(done, device, keeper)
            raise
        self._release = weakref.finalize(self, _unregister_all, done, device, keeper)

    def release(self) -> None:
        """Unregister it. Call it after the last copy. Idempotent."""
        self._release()


def _register(address: int, size: int, device: torch.device) -> Any:
    """Register a range; returns CUDA's runtime. [Note: a thread's device] in threads.py: this makes a context, if
    there is none."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with on_device(device):
        status = runtime.cudaHostRegister(address, size, _PORTABLE)
    if int(status) != 0:
        with suppress(RuntimeError):
            _launch(device)  # takes the refusal. [Note: CUDA's last error]
        raise MemoryPlanError(
            f"CUDA refused to page-lock {format_bytes(size)} of host memory (error {int(status)}); "
            "raise the limit (ulimit -l), or set pin_cpu_memory=False"
        )
    _locked[address] = size
    return runtime


def _launch(device: torch.device) -> None:
    torch.zeros(1, device=device, dtype=torch.float32)


def _unregister_idle(runtime: Any, address: int, device: torch.device) -> None:
    """Unregister a range whose last tensor is gone; a copy that is queued may still use it.

    The thread spins meanwhile: an event, for which it could sleep, is of one stream, and who used the range is not
    known here."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:  # in a capture, which refuses it, or after a fault of the device
        log.exception("could not wait for %s before giving back page-locked memory at %#x", device, address)
    finally:  # it is unmapped next, and must not be registered then
        _unregister(runtime, address, device)


def _unregister_all(ranges: Sequence[tuple[Any, int]], device: torch.device, keeper: object) -> None:
    """``keeper`` is held until here, because a registered range must not be unmapped."""
    for runtime, address in ranges:
        _unregister(runtime, address, device)


def _unregister(runtime: Any, address: int, device: torch.device) -> None:
    _locked.pop(address, None)
    with on_device(device):
        status = int(runtime.cudaHostUnregister(address))
    if status != 0:
        with suppress(RuntimeError):
            _launch(device)  # [Note: CUDA's last error]
        log.warning("CUDA did not unregister host memory at %#x: error %d", address, status)
