"""Announces a run by a file in a directory that Prometheus watches (file_sd), so that Prometheus, configured once,
finds every run."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from rayzero.errors import ConfigError
from rayzero.files import replace_file


@contextmanager
def announced(directory: Path, run: str, targets: bytes) -> Iterator[Path]:
    """A context in which a file with ``targets`` is there. If this process is killed, its janitor or the next run's
    start removes the file. Raises ConfigError if it cannot be written."""
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
    """Remove the files of drivers of this host that are gone; returns them."""
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
