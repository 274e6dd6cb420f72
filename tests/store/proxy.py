"""A TCP proxy in front of an owner that misbehaves on command, as networks do."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

_READ_BYTES = 1 << 14


class Proxy:
    """Passes bytes on between its own port and ``target``.

    ``cut`` closes all connections, ``reset`` makes them end with RST, ``refuse`` also listens no more for a while,
    ``black_hole`` accepts and passes nothing on for a while, ``delay`` holds all bytes back once. One thread a
    direction; ``at`` runs an action once so many bytes have passed."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self.target = (host, int(port))
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._open = threading.Event()  # bytes may pass
        self._open.set()
        self._refusing = threading.Lock()
        self._closed = False
        self.passed = 0  # bytes, both directions
        self._at: list[tuple[int, Callable[[], None]]] = []
        self._cuts: list[int] = []
        self._uncut = 0  # bytes since the last cut, or since ``cut_after``
        self._threads: list[threading.Thread] = []
        self._place = socket.socket()  # has the port also while nothing listens: no other process gets it
        self._place.bind(("127.0.0.1", 0))
        self.port = self._place.getsockname()[1]
        self._listener = self._listen()
        self.address = f"127.0.0.1:{self.port}"
        self._start(self._accept)

    def _listen(self) -> socket.socket:
        listener = socket.socket()
        for each in (self._place, listener):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        return listener

    def _start(self, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                ours, _ = self._listener.accept()
            except OSError:  # it refuses, or is closed
                time.sleep(0.002)
                continue
            try:
                theirs = socket.create_connection(self.target, 5)
                theirs.settimeout(None)
            except OSError:
                ours.close()
                continue
            for each in (ours, theirs):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append((ours, theirs))
            self._start(self._pass_on, ours, theirs)
            self._start(self._pass_on, theirs, ours)

    def _reader(self, source: socket.socket) -> Callable[[], bytes]:
        """What reads the next piece to pass on; no bytes: the connection has ended."""
        return lambda: source.recv(_READ_BYTES)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        read = self._reader(source)
        try:
            while data := read():
                self._count(len(data))
                if self._is_cut(len(data)):
                    self.cut()
                    break
                self._open.wait()
                sink.sendall(data)
        except OSError:  # it was cut
            pass
        self._open.wait()
        for each in (source, sink):
            _shut(each)
        sink.close()  # the other direction's thread closes ``source``

    def _count(self, size: int) -> None:
        with self._lock:
            self.passed += size
            due = [action for at, action in self._at if at <= self.passed]
            self._at = [(at, action) for at, action in self._at if at > self.passed]
        for action in due:
            self._start(action)

    def _is_cut(self, size: int) -> bool:
        with self._lock:
            self._uncut += size
            if not self._cuts or self._uncut < self._cuts[0]:
                return False
            self._cuts.pop(0)
            self._uncut = 0
            return True

    def cut_after(self, *sizes: int) -> None:
        """Close every connection once so many bytes more have come, each time counted from the cut before; the last of
        them are lost."""
        with self._lock:
            self._uncut, self._cuts = 0, list(sizes)

    def at(self, passed: int, action: Callable[[], None]) -> None:
        """Run ``action`` in a thread of its own once ``passed`` bytes have passed."""
        with self._lock:
            self._at.append((passed, action))

    def cut(self) -> None:
        """Close every connection."""
        self._drop(reset=False)

    def reset(self) -> None:
        """End every connection by RST: what its ends have not read yet is lost."""
        self._drop(reset=True)

    def _drop(self, *, reset: bool) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for each in pair:
                if reset:
                    _reset(each)
                _shut(each)

    @contextmanager
    def down(self) -> Iterator[None]:
        """Cut, and refuse connections until this context ends."""
        with self._refusing:
            _shut(self._listener)
            self._listener.close()
            self.cut()
            try:
                yield
            finally:
                if not self._closed:
                    self._listener = self._listen()

    def refuse(self, seconds: float) -> None:
        """Cut, and refuse connections for a while."""
        with self.down():
            time.sleep(seconds)

    def freeze(self) -> None:
        """Pass nothing on any more, not even the end of a connection."""
        self._open.clear()

    def come_back(self, target: str) -> None:
        """The machine that was frozen comes back with another process: its kernel knows none of the connections that
        were open."""
        host, port = target.rsplit(":", 1)
        self.target = (host, int(port))
        self.reset()
        self._open.set()

    def black_hole(self, seconds: float) -> None:
        """Accept, and pass nothing on for a while."""
        self._open.clear()
        time.sleep(seconds)
        self._open.set()

    def stop(self) -> None:
        """End everything; the port stays this proxy's until ``close``."""
        self._closed = True
        self._open.set()
        _shut(self._listener)
        self._listener.close()
        self.cut()
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(10)

    def close(self) -> None:
        """End everything, and give the port back."""
        self.stop()
        self._place.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _shut(each: socket.socket) -> None:
    with suppress(OSError):  # the other side was first
        each.shutdown(socket.SHUT_RDWR)


def _reset(each: socket.socket) -> None:
    """Send RST now. (close() with SO_LINGER 0 sends it only once no thread waits in recv().)"""
    nowhere = b"\0" * 16  # AF_UNSPEC
    ctypes.CDLL(None).connect(each.fileno(), nowhere, len(nowhere))


def all_of(proxies: Sequence[Proxy], act: Callable[[Proxy], None]) -> Callable[[], None]:
    """An action that does ``act`` to every proxy at once."""

    def run() -> None:
        threads = [threading.Thread(target=act, args=(proxy,)) for proxy in proxies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run
