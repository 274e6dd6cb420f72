"""Where gradients land: memory that belongs to one rank, so that its pushes wait for nobody else.

[Note: whose memory] A rank on this host gathers and adds its gradients in memory of its own that the owner maps and
only reads; it tells what is there (``observe``). For a rank on another host the owner keeps that memory: bytes are
reserved for, copied in and ``landed``.

[Note: landing and accumulator] With one planned backward a step, a push lands in the unit's dtype and the owner
reads it there. With more, each rank has an fp32 accumulator per shard: bytes are staged, then added in the rank's
push order. fp32 memory takes further pushes either way; 16-bit landings refuse them, naming the setting.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from rayzero.errors import AccumulationError, StoreError
from rayzero.layout.model_layout import UnitLayout
from rayzero.owner.memory import carve
from rayzero.owner.shard import OwnedShard
from rayzero.protocol.messages import Contribution, Pushed, unpack_presence


class Admission(Enum):
    """What happens to a push that asks for memory."""

    DROP = auto()  # stale, or a repeat of what has landed
    WAIT = auto()  # an earlier push of the same rank is not there yet
    LAND = auto()  # straight into the rank's buffer
    STAGE = auto()  # into staging, to be added


@dataclass(frozen=True, slots=True)
class _Key:
    step: int
    attempt: int

    def __lt__(self, other: _Key) -> bool:
        return (self.step, self.attempt) < (other.step, other.attempt)


class Landing:
    """One rank's gradients of one shard.

    Knows what has landed of which attempt; not other ranks, or when a step is decided. Fields are written under
    the service's lock, the buffer by whoever holds the reservation."""

    def __init__(self, owned: OwnedShard, buffer: Tensor) -> None:
        self.owned = owned
        self.buffer = buffer  # 1D, unit dtype or fp32. freed with the owner, reused when its shard is published
        self.generation = 0  # grows whenever the buffer may change: a norm part of another generation is void
        self.staged: Tensor | None = None  # bytes on their way into the buffer. released by: complete(), _reopen()
        self._key = _Key(-1, 0)
        self._landed = 0
        self._adding = False
        self._present = [False] * len(owned.slices)

    def count(self, step: int, attempt: int) -> int:
        """Pushes of (step, attempt) that are completely there."""
        return self._landed if self._key == _Key(step, attempt) else 0

    @property
    def attempt(self) -> int:
        """The attempt of what is here."""
        return self._key.attempt

    @property
    def present(self) -> Sequence[bool]:
        """Per slice of the shard, whether it has a gradient here."""
        return self._present

    def admit(self, push: Contribution) -> Admission:
        """What to do with a push of the open step. Raises AccumulationError for one that does not fit."""
        key = _Key(push.step, push.attempt)
        landed = self._landed if key == self._key else 0
        if key < self._key or push.seq < landed:
            return Admission.DROP
        if push.seq > landed or self._adding:
            return Admission.WAIT
        if push.seq > 0 and self.buffer.dtype is not torch.float32:
            raise AccumulationError(unplanned(self.owned.unit, push))
        direct = push.seq == 0 and self.buffer.dtype is self.owned.unit.dtype
        return Admission.LAND if direct else Admission.STAGE

    def open(self, push: Contribution) -> None:
        """Take note that ``push`` may now write: a higher attempt voids what was here."""
        key = _Key(push.step, push.attempt)
        if key != self._key:
            self._key, self._landed = key, 0
            self._present = [False] * len(self._present)
        self.generation += 1

    def begin(self, push: Contribution) -> bool:
        """The bytes of ``push`` are there; False when they are of no use (a repeat, or stale)."""
        if self._key != _Key(push.step, push.attempt) or push.seq != self._landed or self._adding:
            return False
        self._adding = True
        self.generation += 1
        return True

    def absorb(self, push: Contribution, came: Tensor | None = None) -> None:
        """Put the landed bytes in their final form: copy what ``came`` elsewhere, add what was staged, zero the
        padding. Outside any lock."""
        present = self._slices_present(push)
        if came is not None:
            (self.buffer if self.staged is None else self.staged).copy_(came)
        for index, part in enumerate(self.owned.slices if self.staged is not None else ()):
            assert self.staged is not None
            buffer, staged = self.buffer[part.start : part.stop], self.staged[part.start : part.stop]
            if present[index] and self._present[index]:
                add_widened(buffer, staged)
            elif present[index]:
                buffer.copy_(staged)
        for start, stop in self.owned.padding:
            self.buffer[start:stop].zero_()

    def complete(self, push: Contribution) -> Tensor | None:
        """Count ``push``; returns the staging memory that is free now."""
        present = self._slices_present(push)
        self._present = [was or now for was, now in zip(self._present, present, strict=True)]
        self._landed += 1
        self._adding = False
        self.generation += 1
        staged, self.staged = self.staged, None
        return staged

    def observe(self, pushed: Pushed) -> bool:
        """Take note of what the rank has in its own memory; False where that is no news."""
        key = _Key(pushed.step, pushed.attempt)
        if key < self._key or pushed.count <= self.count(pushed.step, pushed.attempt):
            return False
        self._key, self._landed = key, pushed.count
        self._present = self._slices_present(pushed)
        self.generation += 1
        return True

    def _slices_present(self, push: Contribution | Pushed) -> list[bool]:
        slots = unpack_presence(push.presence, len(self.owned.unit.slots))
        return [slots[part.slot] for part in self.owned.slices]


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
        """``accumulate``: more than one backward a step is planned. ``own_memory``: per unit, the rank's own flat
        gradients (1D, unit.numel elements of the landing dtype), which are read in place; None: allocate."""
        self.rank = rank
        trained = [owned for owned in shards if owned.trainable]
        self._free: list[Tensor] = []
        self.landing_bytes = self.staging_bytes = 0  # of memory that was allocated here
        if own_memory is not None:
            self.landings = {o.shard.index: Landing(o, _part(own_memory, o)) for o in trained}
            return
        buffers: dict[int, Tensor] = {}
        for dtype in {landing_dtype(owned.unit, accumulate) for owned in trained}:
            sizes = [(o.shard.index, o.shard.numel) for o in trained if landing_dtype(o.unit, accumulate) is dtype]
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


class _Wide(threading.local):
    """fp32 scratch of a thread that adds 16-bit gradients, made at its first use: ``add_`` of mixed dtypes would
    allocate at every one."""

    def __init__(self) -> None:
        self.values = torch.zeros(_WIDE)


_WIDE = 1 << 16  # elements
_wide = _Wide()


def add_widened(total: Tensor, values: Tensor) -> None:
    """``total += values`` in fp32; 16-bit values are widened piece by piece, without allocating."""
    if values.dtype is torch.float32:
        total.add_(values)
        return
    for start in range(0, values.numel(), _WIDE):
        piece = values[start : start + _WIDE]
        total[start : start + _WIDE].add_(_wide.values[: piece.numel()].copy_(piece))


def landing_dtype(unit: UnitLayout, accumulate: bool) -> torch.dtype:
    """fp32 where a rank's pushes are added up, the unit's dtype where there is one."""
    return torch.float32 if accumulate else unit.dtype


def staging_entries(trained: Sequence[OwnedShard], accumulate: bool) -> tuple[int, int]:
    """Staging entries of a rank and the bytes of one: two largest units with accumulation, else two shards where
    fp32 memory can add a second push."""
    if not trained or not (accumulate or any(o.unit.dtype is torch.float32 for o in trained)):
        return 0, 0
    per_unit: dict[int, int] = {}
    for owned in trained:
        per_unit[owned.unit.index] = per_unit.get(owned.unit.index, 0) + 1
    entries = 2 * max(per_unit.values()) if accumulate else 2
    return entries, max(o.shard.numel * o.unit.dtype.itemsize for o in trained)


def check_push(push: Contribution, owned: OwnedShard) -> None:
    """Raise StoreError when a push cannot belong to this shard."""
    expected = (len(owned.unit.slots) + 7) // 8
    if push.unit != owned.unit.index or not owned.trainable or len(push.presence) != expected:
        raise StoreError(
            f"rank {push.rank} pushed unit {push.unit} with {len(push.presence)} presence bytes to shard "
            f"{owned.shard.index} of {owned.unit.name!r}, which is "
            f"{'trained' if owned.trainable else 'frozen'}, is unit {owned.unit.index} and has {expected}"
        )


def unplanned(unit: UnitLayout, push: Contribution) -> str:
    """What to say of a second push where one was planned."""
    return (
        f"rank {push.rank} pushed {unit.name!r} a {push.seq + 1}. time in step {push.step}, but one backward "
        f"a step was planned and its {str(unit.dtype).removeprefix('torch.')} gradient memory holds one: set "
        "gradient_accumulation_steps to the number of backwards between two optimizer.step()"
    )
