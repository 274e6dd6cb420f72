"""What opens a run's protected metrics to the tools of its user, in the run's folder, for its user alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rayzero.errors import ConfigError
from rayzero.files import to_json
from rayzero.records import load_record
from rayzero.telemetry.scrape import Viewer

VIEWER_FILE = ".metrics-viewer.json"

_MOST_BYTES = 1 << 20


@contextmanager
def viewable(run_dir: Path, viewer: Viewer | None) -> Iterator[None]:
    """A context in which the file is there, with mode 0600. ``viewer``: None: nothing is served. Raises ConfigError if
    it cannot be written."""
    if viewer is None:
        yield
        return
    write_viewer(run_dir, viewer)
    try:
        yield
    finally:
        (run_dir / VIEWER_FILE).unlink(missing_ok=True)


def write_viewer(run_dir: Path, viewer: Viewer) -> None:
    """Write the file with mode 0600, in the place of an older one. Raises ConfigError if it cannot be written."""
    path, new = run_dir / VIEWER_FILE, run_dir / f"{VIEWER_FILE}.new"
    try:
        new.unlink(missing_ok=True)  # of a run that was killed; its mode may be another
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(handle, "w") as file:
            file.write(to_json(asdict(viewer)))
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another run.storage_path") from error


def read_viewer(run_dir: Path) -> Viewer:
    """What a run's exporters want to see; nothing if the run has written no such file. Raises ConfigError if it is
    somebody else's or damaged."""
    path = run_dir / VIEWER_FILE
    try:
        what, instead = "a key to a run's metrics", "delete it, and metrics are read without a key"
        return load_record(path, Viewer, what, instead, at_most=_MOST_BYTES, follow_links=False)
    except FileNotFoundError:
        return Viewer()
    except PermissionError as error:
        raise ConfigError(
            f"cannot read {path}: only the user who started the run may read its metrics with it"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
