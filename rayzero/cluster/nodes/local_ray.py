"""A Ray on this machine that belongs to this process, which goes on while it starts.

Imports no Ray, so that it can begin first of all. Ray itself is in a process of its own (local_ray_process.py): it
imports and starts on another core, it can be ended at any moment of its start, and no thread of this process has to
outlive its processes, which the kernel kills with the thread that started them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from types import TracebackType

from rayzero.cluster.forks.worker_fork import fork_token
from rayzero.cluster.interrupts import delayed, shielded
from rayzero.concurrency.survivor import with_own_path
from rayzero.errors import RunFailedError

END = signal.SIGUSR1  # what ends Ray and its process
# which a terminal, a shell or a service manager sends to everyone: Ray ends when the driver says so, or has ended
NOT_FOR_RAY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_END_S = 60.0  # how long that may take


class LocalRay:
    """Begins to start a Ray when it is made; leaving the ``with`` block ends it, also while it starts."""

    def __init__(self) -> None:
        """Raises OSError."""
        module = "rayzero.cluster.nodes.local_ray_process"
        # -P: a folder called rayzero in the current one is not imported; the driver refuses it by name
        command = [sys.executable, "-P", "-m", module, str(os.getpid()), fork_token()]
        try:
            with delayed():  # a signal, which any thread may be given, ends what has begun
                before = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_RAY)  # until it can ignore them
                try:
                    self._process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=with_own_path()
                    )
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except BaseException:
            if hasattr(self, "_process"):
                self.close()
            raise

    def address(self) -> str | None:
        """Wait for Ray; its address. None: another Ray was there to be joined, and none is started. Call it once.

        Sets what a process needs to join it. Raises RunFailedError if it does not start."""
        assert self._process.stdout is not None
        mark = fork_token().encode()  # Python's own start may print lines, too (sitecustomize)
        answer = next((line.removeprefix(mark) for line in self._process.stdout if line.startswith(mark)), None)
        if answer is None:
            raise RunFailedError(f"cannot start Ray on this machine: its process ended ({self._process.wait()})")
        said = json.loads(answer)
        if said["error"] is not None:
            raise RunFailedError(f"cannot start Ray on this machine: {said['error']}")
        if said["auth_mode"] is not None:
            os.environ["RAY_AUTH_MODE"] = said["auth_mode"]
        address: str | None = said["address"]
        return address

    def close(self) -> None:
        """End Ray; returns once nothing of it is left. Idempotent."""
        with shielded():
            with suppress(ProcessLookupError):
                self._process.send_signal(END)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:  # the kernel kills Ray's processes with it
                self._process.kill()
                self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def __enter__(self) -> LocalRay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def begin_ray() -> LocalRay | None:
    """Begin to start the Ray that a run will need; None if its environment names one to join."""
    return LocalRay() if os.environ.get("RAY_ADDRESS", "") in ("", "local") else None
