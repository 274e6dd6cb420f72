"""An owner of this process as the lead sees it."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

from rayzero.concurrency.futures import failed, settled
from rayzero.errors import StoreError
from rayzero.owner.service import ShardService
from rayzero.protocol.messages import Decision, FileEntry, FinishReport, NormParts, Write


class LocalPeer:
    """A ``ShardService`` of this process, as an ``OwnerPeer`` (protocol/owner.py).

    Knows the service; not what a step is."""

    def __init__(self, service: ShardService) -> None:
        self._service = service

    def collect(self, step: int, reports: tuple[FinishReport, ...]) -> Future[NormParts]:
        """Norm parts of the step, once every counted push is there."""
        return self._service.collect(step, reports)

    def apply(self, decision: Decision) -> Future[None]:
        """Queue the decision's update."""
        try:
            self._service.apply(decision)
        except StoreError as exc:
            return failed(exc)
        return settled(None)

    def write_checkpoint(self, step: int, directory: Path) -> Future[FileEntry]:
        """Write the owner's shards of version ``step``."""
        return self._service.write_checkpoint(step, directory)

    def write(self, number: int, write: Write) -> Future[None]:
        """Change the owner's shards of a unit."""
        return self._service.write(number, write)

    def abort(self, error: StoreError) -> None:
        """Fail what waits for the owner."""
        self._service.abort(error)
