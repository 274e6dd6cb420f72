"""Which way leads from a rank to each owner: over gRPC, through the owner's memory, or through its host's copy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from torch import Tensor

from rayzero.codecs.record import codec_of, read_record, used_bytes
from rayzero.concurrency.gather import Gather
from rayzero.errors import RayZeroError, StoreClosedError
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.protocol.messages import COMPUTE
from rayzero.store.host.links.owner_link import OwnerLink
from rayzero.store.host.publish_board import PublishBoard
from rayzero.store.host.push_order import PushOrder
from rayzero.store.host.stall import Describe, StallWatch
from rayzero.store.host.transfers.fetches import TransferThreads
from rayzero.store.host.transfers.wire import WireTransfers
from rayzero.store.rank.connection import GradientSender, Transfers
from rayzero.store.rank.memory.shared_memory import SharedRank
from rayzero.store.traffic import count_bytes
from rayzero.telemetry.recorder import Recorder

_COPIERS = 2  # threads that copy one fetch


class SharedTransfers:
    """``Transfers`` for an owner of this host, or one whose parameters have a copy here.

    Knows where the owner's shards are mapped; not units of several owners, or pushes."""

    def __init__(
        self,
        owner: int,
        shared: SharedRank,
        wire: WireTransfers,
        *,
        board: PublishBoard,
        copies: ThreadPoolExecutor,
        recorder: Recorder,
        copied: bool = False,
    ) -> None:
        """``wire``: carries initial values, writes and states. ``copies``: the threads that copy. ``copied``: the owner
        is on another host."""
        self._board, self._counted = board, "host" if copied else "shm"
        self.transport = wire.transport if copied else "shm"
        self.owner, self._shared, self._wire, self._copies, self._recorder = owner, shared, wire, copies, recorder
        self.load, self.stage = wire.load, wire.stage
        self.content, self.published = wire.content, wire.published  # both know what the board has heard

    def fetch(
        self, gather: Gather, unit: UnitLayout, shards: list[Shard], version: int, kind: str, out: Tensor
    ) -> None:
        """See ``Transfers``."""
        if kind != COMPUTE:
            self._wire.fetch(gather, unit, shards, version, kind, out)
            return

        def begin(ready: Future[None]) -> None:
            error = ready.exception()
            if error is not None:
                gather.end(error)
            elif not self._board.are_at([shard.index for shard in shards], version):
                # the version is gone, or the owner is ending the run: only the owner knows which
                self._wire.fetch(gather, unit, shards, version, kind, out)
            else:
                self._copy_soon(gather, unit, shards, out)

        self.published(f"{unit.name} v{version}", shards, version).add_done_callback(begin)

    def _copy_soon(self, gather: Gather, unit: UnitLayout, shards: list[Shard], out: Tensor) -> None:
        """Copy, or decode, in several threads at once: on some machines one core does not reach the memory's speed."""
        if not gather.start():
            return
        pieces = [shards[i::_COPIERS] for i in range(_COPIERS) if shards[i::_COPIERS]]
        left = Gather(len(pieces))
        left.future.add_done_callback(lambda done: gather.end(done.exception()))
        for piece in pieces:
            try:
                self._copies.submit(left.run, partial(self._copy, unit, piece, out))
            except RuntimeError:  # the pool is shut down
                left.end(StoreClosedError("the store was closed"))

    def _copy(self, unit: UnitLayout, shards: list[Shard], out: Tensor) -> None:
        size = 0
        for shard in shards:
            kept, values = self._shared.shard(self.owner, shard.index), out[shard.start : shard.stop]
            if unit.is_coded:
                read_record(kept, unit, shard, values)
                size += used_bytes(kept)
            else:
                values.copy_(kept)
                size += kept.nbytes
        numel = sum(shard.numel for shard in shards)
        count_bytes(self._recorder, "fetch", self._counted, numel, out.dtype, size=size, codec=codec_of(unit))


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
        self._rank, self._board, self._watch, self._recorder = rank, board, watch, recorder
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
        self.transfers: list[Transfers] = list(self.wires)  # by owner
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
            self._read(owner, shared, copied=False)

    def mirror(self, owners: Iterable[int], shared: SharedRank) -> None:
        """Read what owners on other hosts publish in this host's copy."""
        for owner in owners:
            self._read(owner, shared, copied=True)

    def _read(self, owner: int, shared: SharedRank, *, copied: bool) -> None:
        self.transfers[owner] = SharedTransfers(
            owner,
            shared,
            self.wires[owner],
            board=self._board,
            copies=self.threads.fetches,
            recorder=self._recorder,
            copied=copied,
        )

    @property
    def transport(self) -> str:
        """The run's transport, as metrics call it: "shm", "grpc", or "shm+grpc"."""
        return "+".join(sorted({way.transport for way in self.transfers if way.owner in self._used}, reverse=True))

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
