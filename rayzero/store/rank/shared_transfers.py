"""Reads the parameters of an owner whose memory, or a copy of it, is mapped in this process."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from torch import Tensor

from rayzero.codecs.record import codec_of, read_record, used_bytes
from rayzero.concurrency.futures import Gather
from rayzero.errors import StoreClosedError
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.protocol.messages import COMPUTE
from rayzero.store.host.publish_board import PublishBoard
from rayzero.store.rank.connection import Transfers
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
        wire: Transfers,
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
