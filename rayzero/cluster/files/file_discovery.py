"""One file a running run, in a directory that Prometheus watches (file_sd): configured once, it finds every run."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from rayzero.errors import ConfigError
from rayzero.files import replace_file

__all__ = ["announced", "sweep_announcements"]


@contextmanager
def announced(directory: Path, run: str, targets: bytes) -> Iterator[Path]:
    """Have a file with ``targets`` there; taken away at the end; where this process is killed, by its
    janitor or the next run's start. Raises ConfigError where it cannot be written."""
    path = directory / f"{run}.{socket.gethostname()}.{os.getpid()}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        sweep_announcements(directory)
        replace_file(path, targets)
    except OSError as error:
        raise ConfigError(
            f"run.telemetry.discovery_dir: cannot write {path}: {error.strerror}; choose another directory"
        ) from error
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def sweep_announcements(directory: Path) -> list[Path]:
    """Remove the files of this host's drivers that are gone; which."""
    gone = [path for path in sorted(directory.glob(f"*.{socket.gethostname()}.*.json")) if not _driver_lives(path)]
    for path in gone:
        path.unlink(missing_ok=True)
    return gone


def _driver_lives(path: Path) -> bool:
    pid = path.stem.rpartition(".")[2]
    if not pid.isdigit():
        return True
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
