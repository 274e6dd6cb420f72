"""Which way leads from a rank to each owner: over gRPC, through the owner's memory, or through its host's copy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from rayzero.errors import RayZeroError
from rayzero.store.host.links.owner_link import OwnerLink
from rayzero.store.host.publish_board import PublishBoard
from rayzero.store.host.push_order import PushOrder
from rayzero.store.host.stall import Describe, StallWatch
from rayzero.store.host.transfers.batches import TransferThreads
from rayzero.store.host.transfers.wire import WireTransfers
from rayzero.store.rank.connection import GradientSender
from rayzero.store.rank.memory.shared_memory import SharedRank
from rayzero.telemetry.recorder import Recorder


class Ways:
    """The ways from one rank to the owners of an epoch, and the threads that move bytes. All lead over gRPC at first.

    Knows which way leads to which owner; not why, or what travels."""

    def __init__(
        self,
        rank: int,
        links: Sequence[OwnerLink],
        compression: str,
        *,
        board: PublishBoard,
        watch: StallWatch,
        lead_says: Describe,
        recorder: Recorder,
    ) -> None:
        """``links``: by owner. ``compression``: see ``WireTransfers``. ``lead_says``: asks the lead whom the step waits
        for."""
        self.threads = TransferThreads(len(links), f"rank {rank}")  # freed by: close()
        self.order = PushOrder()
        self.wires = [
            WireTransfers(
                link,
                self.threads,
                board=board,
                order=self.order,
                watch=watch,
                lead_says=lead_says,
                compression=compression,
                recorder=recorder,
            )
            for link in links
        ]
        self.senders: dict[int, GradientSender] = {wire.owner: wire for wire in self.wires}
        self._used = set(self.senders)

    def use(self, owners: Collection[int]) -> None:
        """Only these owners have shards, so that bytes travel to them and from them."""
        self._used = set(owners)
        self.senders = {owner: sender for owner, sender in self.senders.items() if owner in self._used}

    def share(self, owners: Iterable[int], shared: SharedRank) -> None:
        """Reach owners of this host, whose files are mapped, through shared memory."""
        for owner in owners:
            self.senders.pop(owner, None)
            self.wires[owner].read_in(partial(shared.shard, owner), copied=False)

    def mirror(self, owners: Iterable[int], shared: SharedRank) -> None:
        """Read what owners on other hosts publish in this host's copy."""
        for owner in owners:
            self.wires[owner].read_in(partial(shared.shard, owner), copied=True)

    @property
    def transport(self) -> str:
        """The run's transport, as metrics call it: "shm", "grpc", or "shm+grpc"."""
        return "+".join(sorted({way.transport for way in self.wires if way.owner in self._used}, reverse=True))

    def give_up(self) -> None:
        """Repeat nothing any more after a pause."""
        self.threads.closing.set()

    def end(self, error: RayZeroError) -> None:
        """End every wait for a turn with ``error``. Idempotent."""
        self.give_up()
        self.order.fail(error)

    def close(self) -> None:
        """End every transfer and thread, after ``end`` and once the links are closed. Idempotent."""
        self.threads.close()
