"""The lock of a directory, which processes hold while they make, find or remove shared memory together."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayzero.concurrency.backoff import backoff
from rayzero.errors import StallError


@contextmanager
def locked(directory: Path, patience_s: float) -> Iterator[None]:
    """Hold the lock of a directory, without a file of its own that somebody would have to remove. Raises StallError
    after ``patience_s`` seconds."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + patience_s
        for pause in backoff():
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as exc:
                if time.monotonic() > deadline:
                    raise StallError(f"another process has held the lock of {directory} for {patience_s:g} s") from exc
                time.sleep(pause)
        yield
    finally:
        os.close(fd)
