"""Uploads complete checkpoints beside the training, one at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from rayzero.convert.remote.copies import upload_checkpoint

log = logging.getLogger(__name__)


class Uploads:
    """The checkpoints that one rank copies to remote storage, in a thread of its own.

    While one is copied, the newest that came since waits; one between them is left out, with a warning, so that a slow
    link never holds more than two. Knows folders and URLs; not what else happens to the folders. Thread-safe."""

    def __init__(self, upload: Callable[[Path, str], str] = upload_checkpoint) -> None:
        self._upload = upload
        self._lock = threading.Condition()
        self._now: Path | None = None
        self._next: tuple[Path, str] | None = None
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> frozenset[Path]:
        """The folders that are being read or will be: nobody may delete them."""
        with self._lock:
            return frozenset({self._now, self._next and self._next[0]} - {None})  # type: ignore[arg-type]

    def add(self, directory: Path, url: str) -> None:
        """Upload a complete checkpoint once the one before is there."""
        with self._lock:
            if self._next is not None:
                log.warning("CHECKPOINT NOT UPLOADED: %s: a newer one came before its turn", self._next[0])
            self._next = directory, url
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint-upload")
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._now = None
                if self._next is None:
                    self._thread = None
                    self._lock.notify_all()
                    return
                (self._now, url), self._next = self._next, None
            try:
                log.info("checkpoint uploaded: %s", self._upload(self._now, url))
            except Exception as error:  # a storage may raise anything; who waits must hear that it is over
                log.warning("CHECKPOINT NOT UPLOADED: %s: %s. It stays in %s", url, error, self._now)

    def wait(self) -> None:
        """Return when nothing is left to upload."""
        with self._lock:
            self._lock.wait_for(lambda: self._thread is None)
