"""Writes of users into parameters and optimizer states, at an owner: values are staged, then put into its shards."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext

import torch
from torch import Tensor

from rayzero.concurrency.futures import fail, settle
from rayzero.errors import StoreError
from rayzero.owner.shard import OwnedShard
from rayzero.owner.update.rules import UpdateRule
from rayzero.protocol.bits import same_bits
from rayzero.protocol.messages import COMPUTE, GROUP, MASTER, STEP, Write


class StagedWrites:
    """Values that wait for their write, and the writes that were made.

    Knows shards' memory; not who asked. ``make`` is called by the updater thread."""

    def __init__(self) -> None:
        self._staged: dict[int, tuple[int, str, Tensor]] = {}  # shard -> version, kind, values. freed by: make
        self._last: tuple[int, Future[None]] | None = None

    def stage(self, owned: OwnedShard, version: int, kind: str, values: Tensor) -> None:
        """Keep ``values`` (1D, the shard's elements) until they are written; a repeat replaces them."""
        if values.shape != owned.params.shape:
            raise StoreError(
                f"shard {owned.shard.index} of {owned.unit.name!r} has {owned.shard.numel} elements, got "
                f"{tuple(values.shape)}"
            )
        self._staged[owned.shard.index] = version, kind, values

    def once(self, number: int) -> tuple[Future[None], bool]:
        """The future of the write with this number, and whether it is new: a repeat is the same write."""
        if self._last is None or self._last[0] != number:
            self._last = number, Future()
            return self._last[1], True
        return self._last[1], False

    def make(self, write: Write, shards: Sequence[OwnedShard], rule: UpdateRule, future: Future[None]) -> None:
        """Change the unit's shards."""
        try:
            for owned in shards:
                self._make(write, owned, rule)
        except StoreError as exc:
            fail(future, exc)
        else:
            settle(future, None)

    def _make(self, write: Write, owned: OwnedShard, rule: UpdateRule) -> None:
        version, kind, values = self._staged.pop(owned.shard.index, (-1, "", owned.params))
        if (version, kind) != (write.version, write.kind) or owned.published != version:
            raise StoreError(
                f"{owned.unit.name!r} is at v{owned.published}: a write of {write.kind} at v{write.version} has no "
                f"values for shard {owned.shard.index}"
            )
        stamps = owned.stamps(version)
        with stamps.writing(0, owned.shard.numel) if stamps is not None else nullcontext():
            overwrite(owned, rule, kind, values)


def overwrite(owned: OwnedShard, rule: UpdateRule, kind: str, values: Tensor) -> None:
    """Put ``values`` (1D, the shard's elements; COMPUTE: the unit's dtype, else fp32) in place of what a shard has of
    ``kind``. Raises StoreError for a kind that it does not have."""
    if kind == COMPUTE and owned.master is not None and owned.master is not owned.params:
        kept = same_bits(values, owned.params)
        owned.fill(torch.where(kept, owned.master.cpu(), values.float()))
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
