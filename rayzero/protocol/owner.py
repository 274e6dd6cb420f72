"""What the lead may ask of an owner."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from rayzero.errors import StoreError
from rayzero.protocol.messages import Decision, FileEntry, FinishReport, NormParts, Record, Write


class OwnerPeer(Protocol):
    """An owner as the lead sees it: the lead's own service, or one behind a transport."""

    def collect(self, step: int, reports: tuple[FinishReport, ...]) -> Future[NormParts]:
        """See ``ShardService.collect``."""
        ...

    def apply(self, decision: Decision) -> Future[None]:
        """See ``ShardService.apply``; done when the owner has accepted the decision, not when it has updated."""
        ...

    def redo(self, record: Record) -> Future[None]:
        """See ``ShardService.redo``."""
        ...

    def begin_checkpoint(self, step: int, directory: Path) -> Future[None]:
        """See ``ShardService.begin_checkpoint``."""
        ...

    def write_checkpoint(self, step: int, directory: Path) -> Future[FileEntry]:
        """See ``ShardService.write_checkpoint``."""
        ...

    def write(self, number: int, write: Write) -> Future[None]:
        """See ``ShardService.write``."""
        ...

    def trouble(self) -> str | None:
        """Why the owner cannot be asked anything now, for errors about waits; None: nothing is known to be wrong."""
        ...

    def abort(self, error: StoreError) -> None:
        """See ``ShardService.abort``."""
        ...
