"""Keys that a run leaves in its folder for programs of its user alone: that of its followers, and what opens its
protected metrics."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rayzero.errors import ConfigError
from rayzero.records import load_record, record_text
from rayzero.security.credentials import Credentials
from rayzero.telemetry.scrape import Viewer

FOLLOWER_FILE, VIEWER_FILE = ".follower.json", ".metrics-viewer.json"

_MOST_BYTES = 1 << 20

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerKey:
    """What followers show to a run's owners."""

    token: str = field(repr=False)
    tls: Credentials | None = None  # None: connections are plain


def read_follower(run_dir: Path) -> FollowerKey | None:
    """What a run's owners want to see of a follower; None: the run has written no such file (yet, or any more). Raises
    as ``read_key``."""
    what, instead = "a key to a run's weights", "copy it again from the run"
    found = read_key(run_dir, FOLLOWER_FILE, FollowerKey, what, instead)
    if found is not None and not (found.token.isascii() and found.token.isalnum()):
        raise ConfigError(f"{run_dir / FOLLOWER_FILE} is not {what}, because its token is not hexadecimal; {instead}")
    return found


def write_key(run_dir: Path, name: str, key: Any) -> None:
    """Write a dataclass to a file with mode 0600, in the place of an older one. Raises ConfigError if it cannot be
    written."""
    path, new = run_dir / name, run_dir / f"{name}.new"
    try:
        new.unlink(missing_ok=True)  # of a run that was killed; its mode may be another
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(handle, "w") as file:
            file.write(record_text(key))
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another run.storage_path") from error


def read_key(run_dir: Path, name: str, kind: type[T], what: str, instead: str) -> T | None:
    """The dataclass in such a file; None: there is none. ``what``, ``instead``: see ``load_record``. Warns once of a
    file that others may read, as a copy easily is. Raises ConfigError if it is somebody else's or damaged."""
    path = run_dir / name
    try:
        found = load_record(path, kind, what, instead, at_most=_MOST_BYTES, follow_links=False)
        _look_at_mode(path, path.lstat().st_mode & 0o777, what)
        return found
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise ConfigError(f"cannot read {path}: only the user who started the run may use {what}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


@functools.cache
def _look_at_mode(path: Path, mode: int, what: str) -> None:
    """Not refused: some file systems show every file as open to all."""
    if mode & 0o077:
        log.warning("%s is %s, and its mode %o lets others read it: chmod 600 it", path, what, mode)


@contextmanager
def viewable(run_dir: Path, viewer: Viewer | None, follower: FollowerKey | None = None) -> Iterator[None]:
    """A context in which the files are there, with mode 0600. None: one is not. Raises ConfigError if they cannot be
    written."""
    keys = {VIEWER_FILE: viewer, FOLLOWER_FILE: follower}
    written = {name: key for name, key in keys.items() if key is not None}
    for name, key in written.items():
        write_key(run_dir, name, key)
    try:
        yield
    finally:
        for name in written:
            (run_dir / name).unlink(missing_ok=True)


def read_viewer(run_dir: Path) -> Viewer:
    """What a run's exporters want to see; nothing if the run has written no such file. Raises ConfigError if it is
    somebody else's or damaged."""
    instead = "delete it, and metrics are read without a key"
    return read_key(run_dir, VIEWER_FILE, Viewer, "a key to a run's metrics", instead) or Viewer()
