"""How the lead reaches an owner on its host: through a mailbox within a step, over gRPC for all else."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rayzero.concurrency.futures import settled, then
from rayzero.errors import StoreError
from rayzero.protocol.messages import Decision, FileEntry, FinishReport, NormParts, Record, Write
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.memory.shared_owner import SharedOwner
from rayzero.store.owner.peers.orders import apply_request, collect_request
from rayzero.store.owner.peers.wire_peer import RemotePeer
from rayzero.store.wire import translate


class SharedPeer:
    """One owner on the lead's host. An ``OwnerPeer`` (protocol/owner.py).

    Knows both transports; within a step it uses the mailbox where there is one."""

    def __init__(self, shared: SharedOwner, remote: RemotePeer) -> None:
        """``shared``: the lead's own end of shared memory; ``remote``: the other owner."""
        self._shared, self._remote = shared, remote
        self._applied: Future[None] = settled(None)  # the last decision handed over

    def collect(self, step: int, reports: tuple[FinishReport, ...]) -> Future[NormParts]:
        """Ask for the step's norm parts, which come once every counted push is there."""
        asked = self._ask("Collect", collect_request(reports))
        if asked is None:
            return self._remote.collect(step, reports)
        return then(asked, lambda answer: translate.parts_from_pb(step, pb.CollectResponse.FromString(answer)))

    def apply(self, decision: Decision) -> Future[None]:
        """Act on the decision; done when the owner has queued it."""
        asked = self._ask("Apply", apply_request(decision))
        self._applied = self._remote.apply(decision) if asked is None else then(asked, lambda _: None)
        return self._applied

    def redo(self, record: Record) -> Future[None]:
        """Act on a recorded decision, over gRPC."""
        return self._remote.redo(record)

    def _ask(self, method: str, request: Any) -> Future[bytes] | None:
        return self._shared.ask(self._remote.owner, method, request.SerializeToString())

    def begin_checkpoint(self, step: int, directory: Path) -> Future[None]:
        """Begin to write the owner's shards of version ``step``, over gRPC; decisions must wait for the answer."""
        return self._remote.begin_checkpoint(step, directory)

    def write_checkpoint(self, step: int, directory: Path) -> Future[FileEntry]:
        """Write the owner's shards of version ``step``."""
        return self._remote.write_checkpoint(step, directory)

    def write(self, number: int, write: Write) -> Future[None]:
        """Change the owner's shards of a unit. It goes over gRPC and must not overtake a decision in the mailbox."""
        return self._remote.write(number, write)

    def trouble(self) -> str | None:
        """Why its link is down, if it is."""
        return self._remote.trouble()

    def abort(self, error: StoreError) -> None:
        """Fail what waits at the owner, once it has the last decision: the abort goes over gRPC and must not overtake a
        decision in the mailbox."""
        self._applied.add_done_callback(lambda _: self._remote.abort(error))
