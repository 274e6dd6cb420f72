"""Imports torch and RayZero once for a host's share of a job, and forks its Ray workers; see ``worker_fork``.

It computes nothing and starts no thread, so a forked worker is what a new interpreter would be.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rayzero.cluster.nodes.worker_fork import LENGTH, READ_ONCE, peer_is_us
from rayzero.concurrency.processes import uncollected

with uncollected():
    import numpy.random

    import rayzero.engine.prepare
    import rayzero.telemetry.http  # noqa: F401  what workers import, but for Ray

_ASKS_S = 10.0  # how long a process may take to say what it asks for


@dataclass(frozen=True)
class _ForkRequest:
    """A worker that is to be forked."""

    connection: socket.socket  # the process that asks; the worker holds it to its end
    streams: list[int]  # its standard streams
    request: dict[str, Any]  # see worker_fork._ask

    def close(self) -> None:
        """Close what belongs to the worker alone."""
        self.connection.close()
        for stream in self.streams:
            os.close(stream)


class ForkServer:
    """Forks a worker for each connection.

    Knows processes; not what they do."""

    def __init__(self, listener: socket.socket, lives_with: int, idle_s: float | None) -> None:
        """``listener``: what workers connect to. ``lives_with``, ``idle_s``: see ``start_server``."""
        self._listener = listener
        self._idle_ms = None if idle_s is None else 1000 * idle_s
        self._workers: set[int] = set()
        self._poll = select.poll()
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that a worker's end wakes the poll
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._other = os.pidfd_open(lives_with)
        for file in (listener.fileno(), self._woken, self._other):
            self._poll.register(file, select.POLLIN)

    def serve(self) -> _ForkRequest | None:
        """Fork until no worker is needed any more: None. In a forked worker: what it is to be."""
        while True:
            ready = dict(self._poll.poll(None if self._workers else self._idle_ms))
            if not ready or self._other in ready:
                return None
            if self._woken in ready:
                os.read(self._woken, 1024)
                self._reap()
            if self._listener.fileno() in ready and (asked := self._accept()) is not None:
                if "ray" not in sys.modules:
                    _import_ray(asked.request["environment"])
                if (pid := os.fork()) == 0:
                    self._leave()
                    return asked
                self._workers.add(pid)
                asked.close()

    def _accept(self) -> _ForkRequest | None:
        connection, _ = self._listener.accept()
        connection.settimeout(_ASKS_S)
        streams: list[int] = []
        try:
            if not peer_is_us(connection):
                raise PermissionError
            head, streams, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
            with connection.makefile("rb") as file:
                request = json.loads(file.read(LENGTH.unpack(head)[0]))
            if not _is_of_this_ray(request["environment"]):
                raise PermissionError
            connection.sendall(b"1")  # it is forked next
            return _ForkRequest(connection, streams, request)
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            struct.error,
        ):  # a process that ended, or was stopped, while it asked
            _ForkRequest(connection, streams, {}).close()
            return None

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self._workers.discard(pid)

    def _leave(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._listener.close()
        for file in (self._woken, self._wake, self._other):
            os.close(file)


def _is_of_this_ray(environment: dict[str, str]) -> bool:
    """Whether Ray's library, if it is imported, has read what it would read in a worker's environment."""
    return "ray" not in sys.modules or all(environment.get(name) == os.environ.get(name) for name in READ_ONCE)


def _import_ray(environment: dict[str, str]) -> None:
    """Import what is left for workers. Ray reads its settings from the environment as it is imported, and a driver's
    own server was started before Ray."""
    os.environ.update(environment)
    with uncollected():
        for name in ("coordinator", "owner_process", "rank_worker"):
            import_module(f"rayzero.cluster.processes.{name}")
    gc.freeze()  # no worker's collection writes to what is shared


def become(asked: _ForkRequest) -> None:
    """Make this process, which was just forked, what a new interpreter would be."""
    request = asked.request
    os.setpgid(0, 0)
    for number, stream in enumerate(asked.streams):
        os.dup2(stream, number)
        os.close(stream)
    asked.connection.detach()  # open until this process ends
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.sched_setaffinity(0, request["cpus"])
    with suppress(ValueError):  # only root may raise what the server itself has
        resource.setrlimit(resource.RLIMIT_NOFILE, request["files"])
    with suppress(PermissionError), open("/proc/self/oom_score_adj", "w") as file:  # likewise: lower it
        file.write(request["oom"])
    numpy.random.seed()  # a fork has its parent's; Python's own generator sees to itself
    sys.argv = request["arguments"]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(sys.argv[0])


def main() -> None:
    """Serve as the command line says (see ``start_server``); a forked worker goes on as what it is."""
    file, lives_with, *idle_s = sys.argv[1:]
    listener = socket.socket(fileno=int(file))
    try:
        server = ForkServer(listener, int(lives_with), float(idle_s[0]) if idle_s else None)
    except ProcessLookupError:  # it has ended
        return
    asked = server.serve()
    if asked is not None:
        become(asked)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
