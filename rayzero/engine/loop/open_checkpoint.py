"""A checkpoint that is being written while its loop trains on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

from rayzero.concurrency.futures import fail, failed, settle
from rayzero.errors import CheckpointError
from rayzero.protocol.messages import CheckpointInfo

log = logging.getLogger(__name__)

End = Callable[["Future[CheckpointInfo]"], CheckpointInfo | None]


class OpenCheckpoint:
    """What ``begin_checkpoint`` returns: ``result()`` is what ``save_checkpoint`` would have returned or raised.

    Knows when the checkpoint ends, and that something follows; a thread of its own does that. Thread-safe."""

    @classmethod
    def skipped(cls, directory: Path) -> OpenCheckpoint:
        """One that this rank does not take part in: its result is None."""
        return cls(directory, failed(CheckpointError(f"{directory} is not saved")), lambda _: None)

    def __init__(self, directory: Path, saved: Future[CheckpointInfo], end: End) -> None:
        """``saved``: done when the checkpoint is complete, or was given up. ``end``: called with it then, once;
        returns or raises the result."""
        self.directory = directory
        self._outcome: Future[CheckpointInfo | None] = Future()
        self._heard = False  # somebody has had the result
        threading.Thread(target=self._run, args=(saved, end), name="checkpoint-end", daemon=True).start()

    def _run(self, saved: Future[CheckpointInfo], end: End) -> None:
        wait([saved])
        try:
            settle(self._outcome, end(saved))
        except BaseException as error:  # raised where the result is asked for
            fail(self._outcome, error)

    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        return self._outcome.done()

    def result(self) -> CheckpointInfo | None:
        """Wait until the checkpoint is complete; what ``save_checkpoint`` returns. None also if a process died while it
        was written: it is abandoned then, with a warning, and nothing of it is left."""
        self._heard = True
        return self._outcome.result()

    def finish(self) -> None:
        """Wait until it is over. Raises an error that nobody has had."""
        if not self._heard:
            self.result()
        wait([self._outcome])

    def settle(self) -> None:
        """Wait until it is over. An error that nobody has had is logged."""
        error = self._outcome.exception()
        if error is not None and not self._heard:
            log.error("CHECKPOINT NOT SAVED: %s: %s", self.directory, error)
