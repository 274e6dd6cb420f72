"""One driver to a run directory: a lock that the kernel lets go when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from types import TracebackType

from rayzero.errors import ConfigError
from rayzero.files import parse_json, read_text

__all__ = ["LOCK", "RunLock"]

LOCK = ".lock"


class RunLock:
    """An exclusive flock on ``.lock`` in a run directory, held from :meth:`take` to :meth:`close`.

    The file stays behind, for it is the lock on it that counts, not its being there. It is not inherited by programs
    that the holder starts."""

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
                f"{directory} is in use by a run that is going on ({_holder(directory)}); wait for its end or stop "
                "it, or choose another run directory"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(f"cannot lock {directory / LOCK}: {error.strerror}; use another file system") from error
        return cls(descriptor)

    def sign(self) -> None:
        """Write who holds it, for the one who is refused."""
        assert self._descriptor is not None
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def close(self) -> None:
        """Let it go. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _holder(directory: Path) -> str:
    """Who signed the lock; a holder that has only just taken it has not yet."""
    try:
        found = parse_json(read_text(directory / LOCK, at_most=1 << 16))
        return f"pid {found['pid']} on {found['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that has only just begun"
