"""Deletes a run's old checkpoints when it keeps only its newest ones, or those and every n-th step's."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from rayzero.checkpoint.reader import Catalog, SavedCheckpoint
from rayzero.checkpoint.writer import holds_nothing_else, taken_path

_LAST_NUMBER = re.compile(r"(.*?)\d+(\D*)", re.DOTALL)

log = logging.getLogger(__name__)


def delete_older(directory: Path, keep: int, keep_every: int | None = None, busy: Collection[Path] = ()) -> list[Path]:
    """Delete the oldest checkpoints beside ``directory``, a complete checkpoint, until ``keep`` are left, counting
    ``directory`` itself. Returns those that were deleted.

    keep_every: those of steps that it divides stay, beside the newest ``keep``. busy: those that somebody reads stay
    this time.

    Only its own series counts: checkpoints of earlier steps whose names differ from its name in the last number alone.
    Beside ``step-000100``, ``best`` and ``other-1`` are never touched; nor are links, folders that hold other files,
    and damaged checkpoints. If one cannot be deleted, there is a warning, because the new checkpoint is good all the
    same."""
    found = _LAST_NUMBER.fullmatch(directory.name)
    if found is None:
        return []
    series = re.compile(re.escape(found[1]) + r"\d+" + re.escape(found[2]))
    sound = [
        saved
        for saved in Catalog.of(directory.parent).sound
        if series.fullmatch(saved.path.name) and holds_nothing_else(saved.path)
    ]
    step = next((saved.step for saved in sound if saved.path.name == directory.name), 0)
    older = [saved for saved in sound if saved.step < step]
    deleted, kept = [], {path.absolute() for path in busy}
    for path in (saved.path for saved in too_old(older, keep - 1, keep_every) if saved.path.absolute() not in kept):
        try:
            _delete(path)
        except OSError as error:
            log.warning("an old checkpoint could not be deleted: %s: %s", path, error.strerror or error)
        else:
            deleted.append(path)
    return deleted


def too_old(older: Sequence[SavedCheckpoint], keep: int, keep_every: int | None) -> list[SavedCheckpoint]:
    """Those of ``older``, lowest step first, not among the last ``keep`` nor of a step that ``keep_every`` divides."""
    return [saved for saved in older[: max(0, len(older) - keep)] if keep_every is None or saved.step % keep_every]


def _delete(path: Path) -> None:
    """Delete a checkpoint, all at once as readers see it: the name goes first. If the process is killed before the
    rest has gone, a sweep removes it."""
    taken = taken_path(path)
    shutil.rmtree(taken, ignore_errors=True)
    path.rename(taken)
    shutil.rmtree(taken)
