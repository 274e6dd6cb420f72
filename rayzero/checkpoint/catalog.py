"""Which checkpoints a folder holds, and which is the newest: by what their manifests say, whatever their names."""

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
class Saved:
    """A checkpoint that can be resumed from, as far as the sizes of its files tell."""

    path: Path
    step: int


@dataclass(frozen=True, slots=True)
class Catalog:
    """The checkpoints of a folder."""

    sound: tuple[Saved, ...]  # lowest step first; of equal steps, the one written last comes last
    damaged: Mapping[Path, str]  # and why each cannot be used

    @classmethod
    def of(cls, folder: Path, further: Iterable[Path] = ()) -> Catalog:
        """Read the manifest of every checkpoint in ``folder``; empty where the folder is not there.

        ``further``: checkpoints that lie elsewhere; those that are gone are left out."""
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
        """The checkpoint of the highest step, or None. Each damaged one is skipped with a warning that names it."""
        for why in self.damaged.values():
            log.warning("a checkpoint is skipped: %s", why)
        return self.sound[-1].path if self.sound else None


def newest_checkpoint(folder: Path | str) -> Path | None:
    """The checkpoint of the highest step in ``folder``, or in the ``checkpoints`` of a run's folder.

    None where there is none, or no such folder yet. Raises CheckpointError where ``folder`` is a file.

    Its step is the one that its manifest says; its name may be any. A checkpoint whose manifest or files are missing
    or damaged is skipped with a warning that names it: sizes are checked here, hashes when the content is read."""
    folder = Path(folder)
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file, not a folder of checkpoints")
    return Catalog.of(folder).newest() or Catalog.of(folder / "checkpoints").newest()
