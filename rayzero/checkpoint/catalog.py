"""Finds the checkpoints in a folder and the newest of them, by their manifests and not by their names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rayzero.checkpoint.manifest import MANIFEST
from rayzero.checkpoint.reader import CheckpointReader
from rayzero.checkpoint.remote import is_url, local_checkpoint, newest_url
from rayzero.checkpoint.writer import checkpoint_folders
from rayzero.errors import CheckpointError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint whose manifest is sound and whose files are there in their sizes. No hash was compared."""

    path: Path
    step: int


@dataclass(frozen=True, slots=True)
class Catalog:
    """The checkpoints of a folder."""

    sound: tuple[Saved, ...]  # lowest step first; of equal steps, the one written last comes last
    damaged: Mapping[Path, str]  # folder -> why it cannot be used

    @classmethod
    def of(cls, folder: Path, further: Iterable[Path] = ()) -> Catalog:
        """Read the manifest of every checkpoint in ``folder``. A folder that does not exist has none.

        ``further``: checkpoints in other places; those that no longer exist are left out."""
        sound: list[tuple[int, int, Saved]] = []
        damaged: dict[Path, str] = {}
        for path in [*checkpoint_folders(folder), *(path for path in further if (path / MANIFEST).exists())]:
            try:
                with CheckpointReader(path) as checkpoint:
                    written_ns = (path / MANIFEST).stat().st_mtime_ns
                    sound.append((checkpoint.step, written_ns, Saved(path, checkpoint.step)))
            except (CheckpointError, OSError) as error:
                damaged[path] = str(error)
        return cls(sound=tuple(one for _, _, one in sorted(sound, key=lambda found: found[:2])), damaged=damaged)

    def newest(self) -> Path | None:
        """The checkpoint of the highest step, or None. Skips each damaged one with a warning that names it."""
        for why in self.damaged.values():
            log.warning("skipping a checkpoint: %s", why)
        return self.sound[-1].path if self.sound else None


def newest_checkpoint(folder: Path | str) -> Path | None:
    """The checkpoint of the highest step in ``folder`` or, if it has none, in ``folder / "checkpoints"``.

    ``folder``: may be a URL such as ``"s3://bucket/run"``; the checkpoint is then copied into the folder
    ``$RAYZERO_CACHE`` (``~/.cache/rayzero``), unless it is there, and the copy is returned.

    None if there is no checkpoint or no such folder yet. Raises CheckpointError if ``folder`` is a file.

    The step comes from the manifest, so a checkpoint may have any name. If its manifest is damaged or one of its files
    is missing or has the wrong size, the checkpoint is skipped with a warning that names it. Hashes are only compared
    when the content is read."""
    if isinstance(folder, str) and is_url(folder):
        newest = newest_url(folder)
        return None if newest is None else local_checkpoint(newest)
    folder = Path(folder)
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file, not a folder of checkpoints")
    return Catalog.of(folder).newest() or Catalog.of(folder / "checkpoints").newest()
