"""A run's checkpoints: those in its folder ``checkpoints/``, and those that it reported from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rayzero.checkpoint import Catalog, checkpoint_folders, stale_folders, sweep_stale
from rayzero.checkpoint.manifest import MANIFEST

__all__ = ["RunCheckpoints"]

_FOLDER = "checkpoints"


class RunCheckpoints:
    """Knows where a run's checkpoints are: what reports have named counts, wherever it lies.

    Knows paths; not what a run does with them."""

    def __init__(self, run_dir: Path, elsewhere: Iterable[Path] = ()) -> None:
        """``elsewhere``: checkpoints of the run that are not in its folder."""
        self.folder = run_dir / _FOLDER
        self.latest: Path | None = None  # the last one that the run started from or reported
        self._elsewhere = dict.fromkeys(elsewhere)  # in the order of their first reports

    @property
    def elsewhere(self) -> tuple[Path, ...]:
        """The checkpoints outside of ``folder``, for the record."""
        return tuple(self._elsewhere)

    def note(self, checkpoint: Path | str | None) -> None:
        """Take one that the run starts from or reports; that of a further model is a part of the first one's."""
        if checkpoint is None:
            return
        path = Path(checkpoint)
        whole = path.parent if (path.parent / MANIFEST).exists() else path
        self.latest = whole
        if whole.parent != self.folder:
            self._elsewhere[whole] = None

    def catalog(self) -> Catalog:
        """Read the manifests of all of them."""
        return Catalog.of(self.folder, self._elsewhere)

    def folders(self) -> list[Path]:
        """All of them, sound or not; no manifest is read."""
        return [*checkpoint_folders(self.folder), *(path for path in self._elsewhere if (path / MANIFEST).exists())]

    def __contains__(self, checkpoint: Path) -> bool:
        """Whether ``checkpoint`` is the run's own."""
        return checkpoint.is_relative_to(self.folder.parent) or checkpoint in self._elsewhere

    def anything_stale(self) -> bool:
        """Whether an interrupted save left anything in the folder."""
        return bool(stale_folders(self.folder))

    def sweep(self) -> None:
        """Put right what interrupted saves left. Call while the run is locked."""
        sweep_stale(self.folder)
        for path in self._elsewhere:
            sweep_stale(path.parent, path.name)

    def name_of(self, checkpoint: Path) -> str:
        """Its name in the folder, or its path where it lies elsewhere."""
        return checkpoint.name if checkpoint.parent == self.folder else str(checkpoint)
