"""Moves bytes between a rank and an owner elsewhere, whose parameters come here once for all ranks of the host."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from torch import Tensor

from rayzero.codecs.record import codec_of, read_record, used_bytes
from rayzero.concurrency.futures import chain, fail, then, when_all
from rayzero.concurrency.gather import Gather
from rayzero.errors import StoreClosedError
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.protocol.messages import COMPUTE
from rayzero.store.host.publish_board import PublishBoard
from rayzero.store.host.transfers.wire import WireTransfers
from rayzero.store.rank.memory.unit_windows import UnitWindows
from rayzero.store.rank.transfers.host_fetches import HostFetches
from rayzero.store.traffic import count_bytes
from rayzero.telemetry.recorder import Recorder


class RelayedTransfers:
    """``Transfers`` for an owner of another host, of whose shards this host has a copy.

    Knows which of them the host has memory for, and which units a rank has mapped; not who fetches what."""

    def __init__(
        self,
        wire: WireTransfers,
        units: Sequence[UnitLayout],
        fetches: HostFetches,
        windows: UnitWindows | None,
        *,
        board: PublishBoard,
        copies: ThreadPoolExecutor,
        recorder: Recorder,
    ) -> None:
        """``wire``: carries all else, and what comes for the host. ``windows``: over the host's memory. ``copies``:
        the threads that copy."""
        self.owner, self.transport = wire.owner, wire.transport
        self._wire, self._units, self._fetches, self._windows = wire, units, fetches, windows
        self._board, self._copies, self._recorder = board, copies, recorder

    def load(self, gather: Gather, unit: int, shards: list[Shard], values: Tensor) -> None:
        """See ``Transfers``."""
        self._wire.load(gather, unit, shards, values)

    def stage(
        self,
        gather: Gather,
        unit: int,
        shards: list[Shard],
        version: int,
        kind: str,
        values: Tensor,
        made: Future[None],
    ) -> None:
        """See ``Transfers``."""
        self._wire.stage(gather, unit, shards, version, kind, values, made)

    def content(self, shards: Sequence[Shard], version: int) -> int | None:
        """See ``Transfers``; None also while mapped shards are not in the host's memory yet."""
        content = self._wire.content(shards, version)
        if content is None or not self._is_mapped(shards) or self._fetches.are_here(shards, version, content):
            return content
        return None

    def published(self, awaited: str, shards: Sequence[Shard], version: int) -> Future[None]:
        """See ``Transfers``. Mapped shards are in the host's memory then, also if the owner is ending the run."""
        there = self._wire.published(awaited, shards, version)
        if not self._is_mapped(shards):
            return there
        here = Future[None]()

        def bring(_: object) -> None:
            content = self._wire.content(shards, version)
            brought = self._bring(shards, version, version if content is None else content, passes=False)
            chain(then(brought, lambda _: None), here)

        when_all([there], bring, partial(fail, here))
        return here

    def _is_mapped(self, shards: Sequence[Shard]) -> bool:
        return self._windows is not None and self._windows.tensor(shards[0].unit) is not None

    def _bring(self, shards: Sequence[Shard], version: int, content: int, *, passes: bool) -> Future[list[Shard]]:
        unit = self._units[shards[0].unit]
        return self._fetches.bring(self._wire, unit, shards, version, content, passes=passes)

    # ---- fetching

    def fetch(
        self, gather: Gather, unit: UnitLayout, shards: list[Shard], version: int, kind: str, out: Tensor
    ) -> None:
        """See ``Transfers``."""
        has = self._fetches.memory.has
        if kind != COMPUTE or not all(has(shard.index) for shard in shards):
            self._wire.fetch(gather, unit, shards, version, kind, out)
            return

        def begin(_: object) -> None:
            content = self._wire.content(shards, version)
            if content is None or not self._board.are_at([shard.index for shard in shards], version):
                # the version is gone, or the owner is ending the run: only the owner knows which
                self._wire.fetch(gather, unit, shards, version, kind, out)
                return
            brought = self._bring(shards, version, content, passes=True)
            when_all([brought], lambda results: copy(results[0]), gather.end)

        def copy(passed: list[Shard]) -> None:
            if not gather.start():
                return
            here = [shard for shard in shards if shard not in passed]
            left = Gather((len(here) > 0) + (len(passed) > 0))
            left.future.add_done_callback(lambda done: gather.end(done.exception()))
            if passed:
                self._wire.fetch(left, unit, passed, version, kind, out)
            if here:
                self._copy_soon(left, unit, here, out)

        when_all([self._wire.published(f"{unit.name} v{version}", shards, version)], begin, gather.end)

    def _copy_soon(self, gather: Gather, unit: UnitLayout, shards: list[Shard], out: Tensor) -> None:
        try:
            self._copies.submit(gather.run, partial(self._copy, unit, shards, out))
        except RuntimeError:  # the pool is shut down
            gather.end(StoreClosedError("the store was closed"))

    def _copy(self, unit: UnitLayout, shards: list[Shard], out: Tensor) -> None:
        size = 0
        for shard in shards:
            kept, values = self._fetches.memory.tensor(shard.index), out[shard.start : shard.stop]
            if unit.is_coded:
                read_record(kept, unit, shard, values)
                size += used_bytes(kept)
            else:
                values.copy_(kept)
                size += kept.nbytes
        numel = sum(shard.numel for shard in shards)
        count_bytes(self._recorder, "fetch", "host", numel, out.dtype, size=size, codec=codec_of(unit))
