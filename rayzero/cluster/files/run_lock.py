"""Lets one driver use a run directory: a lock that the kernel releases when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

from rayzero.cluster.files.run_record import DriverProcess
from rayzero.errors import ConfigError
from rayzero.files import read_bytes
from rayzero.records import parse_record

__all__ = ["LOCK", "RunLock"]

LOCK = ".lock"


class RunLock:
    """An exclusive flock on ``.lock`` in a run directory, held from :meth:`take` to :meth:`close`.

    The file stays after the run, because only the lock on it counts. Programs that the holder starts do not inherit the
    lock."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor  # freed by: close()

    @classmethod
    def take(cls, directory: Path) -> RunLock:
        """Lock ``directory``, which must exist. Raises ConfigError when another driver holds it or it cannot be
        locked."""
        try:
            descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"cannot write to {directory}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(
                f"{directory} is in use by a run that is still running ({_holder(directory)}); wait until it ends, "
                "stop it, or choose another run directory"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(f"cannot lock {directory / LOCK}: {error.strerror}; use another file system") from error
        return cls(descriptor)

    def sign(self) -> None:
        """Write who holds the lock, for the message of a driver that is refused."""
        assert self._descriptor is not None
        text = DriverProcess(pid=os.getpid(), host=socket.gethostname()).model_dump_json()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _holder(directory: Path) -> str:
    """Who holds the lock; a holder that has only just taken it has not signed yet."""
    try:
        holder = parse_record(read_bytes(directory / LOCK, at_most=1 << 16), DriverProcess)
        return f"pid {holder.pid} on {holder.host}"
    except (OSError, ValueError):
        return "a process that has only just begun"
