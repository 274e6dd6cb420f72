"""Files of versions that a run asks an owner for: each is written once its version is there, before a later update."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from rayzero.concurrency.futures import fail, settle
from rayzero.errors import RayZeroError
from rayzero.owner.updater import Task
from rayzero.protocol.messages import FileEntry
from rayzero.telemetry.names import (
    CHECKPOINT_BYTES,
    CHECKPOINT_FAILURES,
    CHECKPOINT_SECONDS,
    CHECKPOINT_STALL_SECONDS,
)
from rayzero.telemetry.recorder import Recorder

WriteFile = Callable[[int, Path], FileEntry]  # version, directory


class SnapshotRequests:
    """What is asked for and not written yet.

    Knows versions and directories; not shards or decisions. ``# locked``: under the service's lock."""

    def __init__(
        self, lock: threading.RLock, submit: Callable[[Task], None], write_file: WriteFile, recorder: Recorder
    ) -> None:
        """``submit``: hands a task to the updater thread, where ``write_file`` is called."""
        self._lock = lock
        self._submit = submit
        self._write_file = write_file
        self._recorder = recorder
        self._later: dict[int, list[tuple[Path, Future[FileEntry]]]] = {}  # version -> asked for before its decision

    def ask(self, version: int, directory: Path, *, decided: bool) -> Future[FileEntry]:  # locked
        """``decided``: the version's update is done or queued; else ``version_decided`` comes."""
        future: Future[FileEntry] = Future()
        if decided:
            self._submit(lambda: self._write(version, directory, future))
        else:
            self._later.setdefault(version, []).append((directory, future))
        return future

    def version_decided(self, version: int) -> None:  # locked
        """Its update was queued just now."""
        for directory, future in self._later.pop(version, []):
            self._submit(partial(self._write, version, directory, future))

    def _write(self, version: int, directory: Path, future: Future[FileEntry]) -> None:
        started = time.perf_counter()
        over = self._recorder.spans.begin("checkpoint", directory.name, version - 1)
        try:
            entry = self._write_file(version, directory)
        except (OSError, RayZeroError) as exc:
            self._recorder.add(CHECKPOINT_FAILURES)
            fail(future, exc)
        else:
            self._recorder.observe(CHECKPOINT_SECONDS, time.perf_counter() - started, phase="write")
            self._recorder.set(CHECKPOINT_BYTES, entry.size_bytes)
            settle(future, entry)
        over()
        self._recorder.add(CHECKPOINT_STALL_SECONDS, time.perf_counter() - started)

    def fail(self, error: RayZeroError) -> None:
        """What waits for a decision will not be written."""
        with self._lock:
            futures = [future for asked in self._later.values() for _, future in asked]
            self._later.clear()
        for future in futures:
            fail(future, error)
