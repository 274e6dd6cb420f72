"""What opens a run's protected metrics to the tools of its user, in the run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayzero.cluster.files.key_files import FOLLOWER_FILE, FollowerKey, read_key, write_key
from rayzero.telemetry.scrape import Viewer

VIEWER_FILE = ".metrics-viewer.json"


@contextmanager
def viewable(run_dir: Path, viewer: Viewer | None, follower: FollowerKey | None = None) -> Iterator[None]:
    """A context in which the files are there, with mode 0600: this one, and that for followers. None: one is not.
    Raises ConfigError if they cannot be written."""
    keys = {VIEWER_FILE: viewer, FOLLOWER_FILE: follower}
    written = {name: key for name, key in keys.items() if key is not None}
    for name, key in written.items():
        write_key(run_dir, name, key)
    try:
        yield
    finally:
        for name in written:
            (run_dir / name).unlink(missing_ok=True)


def write_viewer(run_dir: Path, viewer: Viewer) -> None:
    """Write the file with mode 0600, in the place of an older one. Raises ConfigError if it cannot be written."""
    write_key(run_dir, VIEWER_FILE, viewer)


def read_viewer(run_dir: Path) -> Viewer:
    """What a run's exporters want to see; nothing if the run has written no such file. Raises ConfigError if it is
    somebody else's or damaged."""
    instead = "delete it, and metrics are read without a key"
    return read_key(run_dir, VIEWER_FILE, Viewer, "a key to a run's metrics", instead) or Viewer()
