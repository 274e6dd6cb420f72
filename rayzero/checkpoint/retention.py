"""Which old checkpoints a run deletes, when it keeps only its newest ones."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

from rayzero.checkpoint.catalog import Catalog
from rayzero.checkpoint.writer import holds_nothing_else, taken_path

_LAST_NUMBER = re.compile(r"(.*?)\d+(\D*)", re.DOTALL)

log = logging.getLogger(__name__)


def delete_older(directory: Path, keep: int) -> list[Path]:
    """Delete the oldest of the checkpoints beside ``directory``, a complete one, until ``keep`` are left with it.

    Only those of its own series count: names that differ from its name in nothing but the last number, and earlier
    steps. ``best`` or ``other-1`` beside ``step-000100`` are never touched, nor are links, folders with files of others
    in them, and what is damaged. Returns what was deleted. One that cannot be deleted causes a warning: the new
    checkpoint is good all the same."""
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
    older = [saved.path for saved in sound if saved.step < step]
    deleted = []
    for path in older[: max(0, len(older) - (keep - 1))]:
        try:
            _delete(path)
        except OSError as error:
            log.warning("an old checkpoint could not be deleted: %s: %s", path, error.strerror or error)
        else:
            deleted.append(path)
    return deleted


def _delete(path: Path) -> None:
    """At once for readers: the name goes first, and a sweep removes what a kill leaves of the rest."""
    taken = taken_path(path)
    shutil.rmtree(taken, ignore_errors=True)
    path.rename(taken)
    shutil.rmtree(taken)
