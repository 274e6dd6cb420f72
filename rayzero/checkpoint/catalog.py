"""Finds the checkpoints in a folder and the newest of them, by their manifests and not by their names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rayzero.checkpoint.manifest import MANIFEST
from rayzero.checkpoint.reader import CheckpointReader
from rayzero.checkpoint.writer import checkpoint_folders
from rayzero.errors import CheckpointError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint whose manifest is sound and whose files are there in their sizes. No hash was compared."""

    path: Path
    step: int


@dataclass(frozen=True, slots=True)
class Catalog:
    """The checkpoints of a folder."""

    sound: tuple[SavedCheckpoint, ...]  # lowest step first; of equal steps, the one written last comes last
    damaged: Mapping[Path, str]  # folder -> why it cannot be used

    @classmethod
    def of(cls, folder: Path, further: Iterable[Path] = ()) -> Catalog:
        """Read the manifest of every checkpoint in ``folder``. A folder that does not exist has none.

        ``further``: checkpoints in other places; those that no longer exist are left out."""
        sound: list[tuple[int, int, SavedCheckpoint]] = []
        damaged: dict[Path, str] = {}
        for path in [*checkpoint_folders(folder), *(path for path in further if (path / MANIFEST).exists())]:
            try:
                with CheckpointReader(path) as checkpoint:
                    written_ns = (path / MANIFEST).stat().st_mtime_ns
                    sound.append((checkpoint.step, written_ns, SavedCheckpoint(path, checkpoint.step)))
            except (CheckpointError, OSError) as error:
                damaged[path] = str(error)
        return cls(sound=tuple(one for _, _, one in sorted(sound, key=lambda found: found[:2])), damaged=damaged)

    def newest(self) -> Path | None:
        """The checkpoint of the highest step, or None. Skips each damaged one with a warning that names it."""
        for why in self.damaged.values():
            log.warning("skipping a checkpoint: %s", why)
        return self.sound[-1].path if self.sound else None
