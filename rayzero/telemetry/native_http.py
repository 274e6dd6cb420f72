"""The page server in C (``native/pages.c``): answers without the interpreter lock."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import socket
import sysconfig
import threading
from collections.abc import Mapping
from ctypes import c_char_p, c_double, c_int32, c_int64, c_void_p
from pathlib import Path

from rayzero.telemetry import pages as limits
from rayzero.telemetry.pages import REFUSED, Page, end, head_of, unknown

LIBRARY = Path(__file__).parent / f"_pages.{sysconfig.get_platform()}.so"  # built by hatch_build.py, never here

log = logging.getLogger(__name__)


class PagesLibrary:
    """The loaded C library. ``serve`` leaves the interpreter lock to others; the rest takes microseconds."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where it does not load, AttributeError where it is of another rayzero or machine."""
        quick, slow = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path), use_errno=True)
        self.open, self.name, self.set = quick.rz_pages_open, quick.rz_pages_name, quick.rz_pages_set
        self.serve, self.close, source = slow.rz_pages_serve, quick.rz_pages_close, quick.rz_pages_source
        self.open.restype, source.restype, self.close.restype = c_void_p, c_char_p, None
        self.open.argtypes = (c_int32, c_int32, c_int32, c_double, c_double, c_double)
        self.name.argtypes = (c_void_p, c_int32, c_char_p)
        self.set.argtypes = (c_void_p, c_int32, c_char_p, c_int64, c_int64, c_int32, c_int32)
        self.serve.argtypes = self.close.argtypes = (c_void_p,)
        self.source: str = source().decode()  # digest of the C source: hatch_build.py


@functools.cache
def load() -> PagesLibrary | str:
    """The library built with this package, or why there is none."""
    try:
        return PagesLibrary(LIBRARY)
    except (OSError, AttributeError) as error:
        return str(error)


class NativeServer:
    """Serves pages until ``close``. Its thread is in C but when a page is to be made."""

    def __init__(self, listening: socket.socket, pages: Mapping[str, Page], library: PagesLibrary) -> None:
        """``listening``: the server's from now on. Raises MemoryError."""
        self._library, self._pages, self._socket = library, list(pages.items()), listening
        listening.setblocking(False)
        self._awake, self._wake = socket.socketpair()
        args = (listening.fileno(), self._awake.fileno(), len(pages))
        self._server = library.open(*args, limits.REFRESH_S, limits.IDLE_S, limits.WRITE_S)
        if not self._server:
            raise MemoryError("no memory for a page server")
        for index, path in enumerate(pages):
            if library.name(self._server, index, path.encode()):
                raise ValueError(f"the path {path!r} is too long for a page")
        self._set(len(pages), unknown(pages), lasting=True)
        self._set(len(pages) + 1, REFUSED, lasting=True, last=True)
        name = f"rayzero-exporter-{listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while (index := self._library.serve(self._server)) >= 0:
                path, page = self._pages[index]
                self._set(index, page.answer(path))
            if index != -1:
                log.error("the exporter's server ended: %s", os.strerror(ctypes.get_errno()))
        finally:
            self._library.close(self._server)
            end(self._socket)
            for held in (self._socket, self._awake):
                held.close()

    def _set(self, index: int, answer: bytes, *, lasting: bool = False, last: bool = False) -> None:
        if self._library.set(self._server, index, answer, len(answer), len(head_of(answer)), lasting, last):
            raise MemoryError(f"no memory for a page of {len(answer):,} bytes")

    def close(self) -> None:
        """Cut every connection and free the port. Idempotent."""
        if self._thread.is_alive():  # a process forked off has the object and not the thread
            end(self._wake)
            self._thread.join()
        self._wake.close()
