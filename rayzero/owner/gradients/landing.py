"""The memory that gradients land in. It belongs to one rank, so that its pushes wait for no other rank.

[Note: whose memory] A rank on this host gathers and adds its gradients in its own memory, which the owner maps and only
reads; the rank announces what is there (``observe``). For a rank on another host the owner keeps that memory: a push
reserves it, copies its bytes in and reports them as ``landed``. Bytes that have to be added are staged first, so that
no reader sees half a sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto

import torch
from torch import Tensor

from rayzero.errors import StoreError
from rayzero.owner.memory import carve
from rayzero.owner.shard import OwnedShard
from rayzero.protocol.gradient_sum import GradientSum, gradient_dtype
from rayzero.protocol.messages import Contribution, Pushed
from rayzero.protocol.scattered import Gradient, ScatteredShard, ScatteredUnit


class Admission(Enum):
    """What happens to a push that asks for memory."""

    DROP = auto()  # stale, or a repeat of what has landed
    WAIT = auto()  # an earlier push of the same rank has not landed yet
    LAND = auto()  # write straight into the rank's memory
    STAGE = auto()  # write into staging, to be added


class Landing:
    """One rank's gradients of one shard.

    Knows which pushes of which attempt have landed; not other ranks, or when a step is decided. The holder of a
    reservation writes the memory; only ``Contributions`` writes everything else."""

    def __init__(self, owned: OwnedShard, memory: Tensor) -> None:
        self.owned = owned
        self.sum = GradientSum(owned.unit, memory, owned.slices)
        self.generation = 0  # grows whenever the memory may change, which invalidates norm parts of earlier generations
        self.staged: Tensor | None = None  # bytes being added to the sum. released by: complete(), _open()
        self.present: Sequence[bool] = (False,) * len(owned.slices)  # per slice: whether it has a gradient here
        self._adding = False
        self._scattered: ScatteredShard | None = None  # the gradients, instead of the memory. released by: free()

    @property
    def gradient(self) -> Gradient:
        """What has landed."""
        return self.sum.memory if self._scattered is None else self._scattered

    @property
    def is_scattered(self) -> bool:
        """Whether the gradients are not in the memory."""
        return self._scattered is not None

    def free(self) -> None:
        """The gradients have been read."""
        self._scattered = None

    def admit(self, push: Contribution) -> Admission:
        """What to do with a push of the open step. Raises AccumulationError for a push that cannot be added."""
        if self.sum.is_stale(push):
            return Admission.DROP
        if push.first > self.sum.count_of(push.step, push.attempt) or self._adding:
            return Admission.WAIT
        self.sum.require_room(push)
        return Admission.LAND if self.sum.lands(push) else Admission.STAGE

    def open(self, push: Contribution) -> None:
        """Note that ``push`` may write now. A higher attempt discards what was here."""
        self.sum.open(push)
        self._look()

    def begin(self, push: Contribution) -> bool:
        """The bytes of ``push`` are there. Returns False if they are not used (a repeat, or stale)."""
        here = self.sum.step, self.sum.attempt, self.sum.count
        if here != (push.step, push.attempt, push.first) or self._adding:
            return False
        self._adding = True
        self.generation += 1
        return True

    def absorb(self, push: Contribution, came: Tensor | None = None) -> None:
        """Add the landed bytes to the sum: ``came`` if given, else the staged bytes, else those already in the memory.
        Call it outside any lock, because it computes."""
        values = self.staged if came is None else came
        if values is not None:
            self.sum.add(push, values)
        else:
            self.sum.clear_padding()

    def complete(self, push: Contribution) -> Tensor | None:
        """Count ``push``; returns the staging memory that it frees."""
        self.sum.close(push)
        self._look()
        self._adding = False
        staged, self.staged = self.staged, None
        return staged

    def observe(self, pushed: Pushed, scattered: ScatteredUnit | None = None) -> bool:
        """Note what the rank has in its own memory, or scattered; returns False if that is already known."""
        if self.sum.is_older(pushed) or pushed.count <= self.sum.count_of(pushed.step, pushed.attempt):
            return False
        self.sum.replace(pushed)
        self._scattered = None if scattered is None else scattered.shard(self.owned.slices)
        self._look()
        return True

    def _look(self) -> None:
        slots = self.sum.presence
        self.present = [bool(slots >> part.slot & 1) for part in self.owned.slices]
        self.generation += 1


class RankGradients:
    """All gradient memory of one rank at one owner, with its staging.

    Knows the rank's shards and free staging entries; not steps or other ranks."""

    def __init__(
        self,
        rank: int,
        shards: Sequence[OwnedShard],
        *,
        accumulate: bool,
        own_memory: Mapping[int, Tensor] | None = None,
    ) -> None:
        """``accumulate``: a step may have several backwards. ``own_memory``: unit -> the rank's own flat gradients (1D,
        unit.numel elements of ``gradient_dtype``), read in place; None: allocate memory here."""
        self.rank = rank
        trained = [owned for owned in shards if owned.trainable]
        self._free: list[Tensor] = []
        self.landing_bytes = self.staging_bytes = 0  # bytes of memory allocated here
        if own_memory is not None:
            self.landings = {o.shard.index: Landing(o, _part(own_memory, o)) for o in trained}
            return
        buffers: dict[int, Tensor] = {}
        for dtype in {gradient_dtype(owned.unit, accumulate) for owned in trained}:
            sizes = [(o.shard.index, o.shard.numel) for o in trained if gradient_dtype(o.unit, accumulate) is dtype]
            buffers |= carve(sizes, dtype)
        self.landings = {o.shard.index: Landing(o, buffers[o.shard.index]) for o in trained}
        self.landing_bytes = sum(buffer.nbytes for buffer in buffers.values())
        entries, entry_bytes = staging_entries(trained, accumulate)
        self._free += [torch.zeros(entry_bytes, dtype=torch.uint8) for _ in range(entries)]
        self.staging_bytes = entries * entry_bytes

    def lease(self, owned: OwnedShard) -> Tensor | None:
        """Staging for one shard, 1D in the unit's dtype; None while all of it is in use."""
        if not self._free:
            return None
        return self._free.pop()[: owned.shard.numel * owned.unit.dtype.itemsize].view(owned.unit.dtype)

    def release(self, staged: Tensor | None) -> None:
        """Give a lease back."""
        if staged is not None:
            entry = staged.view(torch.uint8)
            self._free.append(entry.as_strided((entry.untyped_storage().nbytes(),), (1,), 0))


def _part(memory: Mapping[int, Tensor], owned: OwnedShard) -> Tensor:
    return memory[owned.unit.index][owned.shard.start : owned.shard.stop]


def staging_entries(trained: Sequence[OwnedShard], accumulate: bool) -> tuple[int, int]:
    """(a rank's staging entries, bytes of one): room for two of the largest units with accumulation, else for two
    shards if fp32 memory can add a second push."""
    if not trained or not (accumulate or any(o.unit.dtype is torch.float32 for o in trained)):
        return 0, 0
    per_unit: dict[int, int] = {}
    for owned in trained:
        per_unit[owned.unit.index] = per_unit.get(owned.unit.index, 0) + 1
    entries = 2 * max(per_unit.values()) if accumulate else 2
    return entries, max(o.shard.numel * o.unit.dtype.itemsize for o in trained)


def check_push(push: Contribution, owned: OwnedShard) -> None:
    """Raise StoreError if a push cannot belong to this shard."""
    expected = (len(owned.unit.slots) + 7) // 8
    if push.unit != owned.unit.index or not owned.trainable or len(push.presence) != expected:
        raise StoreError(
            f"rank {push.rank} pushed unit {push.unit} with {len(push.presence)} presence bytes to shard "
            f"{owned.shard.index} of {owned.unit.name!r}, which is "
            f"{'trained' if owned.trainable else 'frozen'}, is unit {owned.unit.index} and has {expected}"
        )
