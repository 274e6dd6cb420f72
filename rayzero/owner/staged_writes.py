"""A user's writes to parameters and optimizer states, at an owner: stages the values, then copies them into its
shards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext

import torch
from torch import Tensor

from rayzero.concurrency.futures import fail, failed, settle
from rayzero.errors import RayZeroError, StoreError
from rayzero.owner.changes import ChangeLog
from rayzero.owner.checkpoint import CheckpointWriter
from rayzero.owner.owned_model import OwnedModel
from rayzero.owner.rules import UpdateRule
from rayzero.owner.shard import OwnedShard, Updater
from rayzero.protocol.messages import COMPUTE, GROUP, MASTER, STEP, Write, same_bits

WriteListener = Callable[[int, bool], None]  # the shard, and whether a write of it begins or has ended


class StagedWrites:
    """Values that wait for their write, and the last write that was requested.

    Knows shards' memory; not who writes, or when a step is decided. Any thread may call it; the updater's thread
    changes the shards, after decisions that were queued earlier."""

    def __init__(
        self,
        model: OwnedModel,
        updater: Updater,
        checkpoints: CheckpointWriter,
        changes: ChangeLog,
        on_write: WriteListener,
    ) -> None:
        """``checkpoints``: keeps what a checkpoint still needs, before a shard changes. ``changes``: begins that
        shard's changes anew."""
        self._restaged = bool(model.former)  # a former life may have had values, which rank 0 stages again
        self._checkpoints, self._changes, self._on_write = checkpoints, changes, on_write
        self._waiting: tuple[Write, Future[None]] | None = None  # the last write, until its values are here
        self._shards, self._rule, self._updater = model.shards, model.rule, updater
        self._lock = threading.Lock()
        self._staged: dict[int, tuple[int, str, Tensor]] = {}  # shard -> version, kind, values. freed by: _make
        self._last: tuple[tuple[int, Write], Future[None]] | None = None  # with its number
        self._error: StoreError | None = None

    def stage(self, owned: OwnedShard, version: int, kind: str, values: Tensor) -> None:
        """Keep ``values`` (1D, the shard's elements) until they are written. A repeat replaces them."""
        if values.shape != (owned.shard.numel,):
            raise StoreError(
                f"shard {owned.shard.index} of {owned.unit.name!r} has {owned.shard.numel} elements, got "
                f"{tuple(values.shape)}"
            )
        with self._lock:
            self._staged[owned.shard.index] = version, kind, values
            self._begin()

    def write(self, number: int, write: Write) -> Future[None]:
        """Change the unit's shards. A repeat of ``number`` is the same write, unless what is written differs: a lead's
        successor that no rank has told of a version's writes counts them anew. Where a former life of this owner may
        have had the values, the write waits until they are staged again."""
        asked = number, write
        with self._lock:
            if self._error is not None:
                return failed(self._error)
            if self._last is not None and self._last[0] == asked:
                return self._last[1]
            future: Future[None] = Future()
            self._last = asked, future
            self._waiting = write, future
            self._begin()
        return future

    def _begin(self) -> None:
        """Begin the write that waits, if its values are here or never will be."""
        if self._waiting is None:
            return
        write, future = self._waiting
        wanted = [index for index, owned in self._shards.items() if owned.unit.index == write.unit]
        if self._restaged and any(self._staged.get(i, ())[:2] != (write.version, write.kind) for i in wanted):
            return
        self._waiting = None
        self._updater.submit(lambda: self._make_all(write, future))

    def _make_all(self, write: Write, future: Future[None]) -> None:
        try:
            for owned in self._shards.values():
                if owned.unit.index == write.unit:
                    self._make(write, owned)
        except BaseException as exc:  # whatever it is, the ranks wait for this future
            fail(future, exc)
            if not isinstance(exc, RayZeroError):
                raise
        else:
            settle(future, None)

    def _make(self, write: Write, owned: OwnedShard) -> None:
        with self._lock:
            version, kind, values = self._staged.pop(owned.shard.index, (-1, "", owned.params))
        if (version, kind) != (write.version, write.kind) or owned.published != version:
            raise StoreError(
                f"{owned.unit.name!r} is at v{owned.published}: a write of {write.kind} at v{write.version} has no "
                f"values for shard {owned.shard.index}"
            )
        self._checkpoints.protect(owned)
        stamps = owned.stamps(version)
        owned.writes += 1
        self._on_write(owned.shard.index, True)
        try:
            with stamps.writing(0, owned.shard.numel) if stamps is not None else nullcontext():
                overwrite(owned, self._rule, kind, values)
                owned.keep_slices()
        finally:
            owned.writes += 1
            self._on_write(owned.shard.index, False)
            if kind in (COMPUTE, MASTER):
                self._changes.rewritten(owned)

    def fail(self, error: StoreError) -> None:
        """Refuse further writes with ``error``; queued ones are still made."""
        with self._lock:
            self._error = error = self._error or error
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            fail(waiting[1], error)


def overwrite(owned: OwnedShard, rule: UpdateRule, kind: str, values: Tensor) -> None:
    """Replace what a shard has of ``kind`` by ``values`` (1D, the shard's elements; COMPUTE: the unit's dtype, else
    fp32). Raises StoreError for a kind that it does not have."""
    if kind == COMPUTE and owned.master is not None and owned.master is not owned.params:
        kept = same_bits(values, owned.read(COMPUTE))
        owned.fill(torch.where(kept, owned.masters(0, len(values)).cpu(), values.float()))
    elif kind == COMPUTE or (kind == MASTER and owned.master is not None):
        owned.fill(values)
    elif not owned.trainable:
        owned.read(kind)  # raises
    elif kind == GROUP:
        owned.groups = tuple(int(values[part.start]) for part in owned.slices)
        rule.regroup(owned)
    else:
        if kind == STEP:
            owned.steps = [int(values[part.start]) for part in owned.slices]
        rule.write(owned, kind, values)
