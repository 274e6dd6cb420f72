"""The memory that gradients land in. It belongs to one rank, so that its pushes wait for no other rank.

[Note: sums of a host] Ranks of another host that add their gradients before they travel share one landing. It takes a
sum as it comes, and a newer one in its place: one with later attempts or more pushes of one of the ranks. It serves a
decision if it has exactly the pushes that all of them counted.

[Note: whose memory] A rank on this host gathers and adds its gradients in its own memory, which the owner maps and only
reads; the rank announces what is there (``observe``). For a rank on another host the owner keeps that memory: a push
reserves it, copies its bytes in and reports them as ``landed``. Bytes that have to be added are staged first, so that
no reader sees half a sum. Where there are totals (protocol/gradient_sum.py), memory is a push's own until its gradients
are in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto

import torch
from torch import Tensor

from rayzero.errors import StepMismatchError, StoreError
from rayzero.owner.memory import carve
from rayzero.owner.shard import OwnedShard
from rayzero.protocol.gradient_sum import GradientMemory, GradientSum, gradient_dtype
from rayzero.protocol.messages import Contribution, FinishReport, Pushed, Summand
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

    def __init__(self, owned: OwnedShard, memory: Tensor | None, dtype: torch.dtype) -> None:
        """``memory``: 1D, the shard's elements, ``dtype``; None: each push brings, or is given, its own."""
        self.owned = owned
        self.sum = GradientSum(owned.unit, memory, owned.slices, dtype=dtype, is_single=owned.total is not None)
        self.generation = 0  # grows whenever the memory may change, which invalidates norm parts of earlier generations
        self.staged: Tensor | None = None  # bytes being added to the sum. released by: complete(), _open()
        self.present: Sequence[bool] = (False,) * len(owned.slices)  # per slice: whether it has a gradient here
        self._adding = False
        self._scattered: ScatteredShard | None = None  # the gradients, instead of the memory. released by: free()

    @property
    def gradient(self) -> Gradient:
        """What has landed and ``is_here``."""
        return self.sum.memory if self._scattered is None else self._scattered

    @property
    def is_here(self) -> bool:
        """Whether there is anything to read: not after it went into the total."""
        return self.sum.has_memory or self._scattered is not None

    def leave(self) -> Tensor | None:
        """What has landed is in the total. Returns the memory that this frees; the pushes still count as landed."""
        memory = self.sum.memory if self.sum.has_memory else None
        self.sum.move(None)
        self._scattered = None
        return memory

    @property
    def is_scattered(self) -> bool:
        """Whether the gradients are not in the memory."""
        return self._scattered is not None

    def free(self) -> None:
        """The gradients have been read."""
        self._scattered = None

    def counted(self, rank: int, step: int) -> int:
        """How many pushes of ``rank`` in an attempt at ``step`` are here."""
        return self.sum.count_of(step, self.sum.attempt)

    def attempt_of(self, rank: int) -> int:
        """The attempt of ``rank`` whose pushes are here."""
        return self.sum.attempt

    def is_there(self, rank: int, reports: Mapping[int, FinishReport]) -> bool:
        """Whether the pushes that ``rank`` counted are here. ``reports``: by rank. Raises StepMismatchError if there
        are more than it counted."""
        report = reports[rank]
        return self._landed(report, self.sum.count_of(report.step, report.attempt))

    def _landed(self, report: FinishReport, landed: int) -> bool:
        counted = report.counts[self.owned.unit.index]
        if landed > counted:
            raise StepMismatchError(
                f"rank {report.rank} finished step {report.step} with {counted} pushes of {self.owned.unit.name!r}, "
                f"but {landed} arrived; every push must be issued before finish"
            )
        return landed == counted

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

    def observe(self, pushed: Pushed, memory: Tensor | None, scattered: ScatteredUnit | None = None) -> bool:
        """Note what the rank has in its own ``memory`` (1D, the shard's elements; None: no more), or scattered; returns
        False if that is already known."""
        if self.sum.is_older(pushed) or pushed.count <= self.sum.count_of(pushed.step, pushed.attempt):
            return False
        self.sum.replace(pushed)
        self.sum.move(memory)
        self._scattered = None if scattered is None else scattered.shard(self.owned.slices)
        self._look()
        return True

    def _look(self) -> None:
        slots = self.sum.presence
        self.present = [bool(slots >> part.slot & 1) for part in self.owned.slices]
        self.generation += 1


class HostLanding(Landing):
    """The sum of several ranks' gradients of one shard, which are added on their host. See [Note: sums of a host]."""

    def __init__(self, owned: OwnedShard, memory: Tensor | None, ranks: Sequence[int]) -> None:
        """``memory``: 1D, the shard's elements, fp32; None: see ``Landing``. ``ranks``: ascending."""
        super().__init__(owned, memory, torch.float32)
        self.ranks = tuple(ranks)
        self._step = -1
        self._has: dict[int, Summand] = {}  # by rank, what is here of that step; empty: nothing that is whole
        self._coming: tuple[int, tuple[Summand, ...]] | None = None  # (step, summands) that may be written

    def admit(self, push: Contribution) -> Admission:
        """See ``Landing.admit``."""
        if push.step < self._step or (push.step == self._step and self._is_old(push)):
            return Admission.DROP
        return Admission.WAIT if self._adding else Admission.LAND

    def _is_old(self, push: Contribution) -> bool:
        """Whether a sum of the same step has nothing that is not here, or is coming already. One that is coming may be
        sent again, because its first try may have been cut."""
        if self._coming is not None:
            coming = self._coming[1]
            return push.summands != coming and not _is_newer(push.summands, coming)
        return bool(self._has) and not _is_newer(push.summands, tuple(self._has.values()))

    def open(self, push: Contribution) -> None:
        """See ``Landing.open``."""
        self._step, self._has, self._coming = push.step, {}, (push.step, push.summands)
        self.sum.presence = 0
        self._look()

    def begin(self, push: Contribution) -> bool:
        """See ``Landing.begin``."""
        if self._coming != (push.step, push.summands) or self._adding:
            return False
        self._adding = True
        self.generation += 1
        return True

    def complete(self, push: Contribution) -> Tensor | None:
        """See ``Landing.complete``."""
        self._has, self._coming = {each.rank: each for each in push.summands}, None
        self.sum.presence = int.from_bytes(push.presence, "little")
        self._look()
        self._adding = False
        return None

    def counted(self, rank: int, step: int) -> int:
        """See ``Landing.counted``."""
        return self._has[rank].pushes if self._has and self._step == step else 0

    def attempt_of(self, rank: int) -> int:
        """See ``Landing.attempt_of``."""
        return self._has[rank].attempt

    def is_there(self, rank: int, reports: Mapping[int, FinishReport]) -> bool:
        """See ``Landing.is_there``. Nothing comes of a unit that none of the ranks has pushed."""
        mine, unit = [reports[each] for each in self.ranks], self.owned.unit.index
        if not any(report.counts[unit] for report in mine):
            return True
        report = reports[rank]
        if self._step != report.step or not self._has:
            return False
        if self._has[rank].attempt == report.attempt:
            self._landed(report, self._has[rank].pushes)
        return all(self._fits(each) for each in mine)

    def _fits(self, report: FinishReport) -> bool:
        """Whether exactly the pushes that a rank counted are in the sum."""
        has, counted = self._has[report.rank], report.counts[self.owned.unit.index]
        return has.pushes == counted and (not counted or has.attempt == report.attempt)


def _is_newer(summands: Sequence[Summand], before: Sequence[Summand]) -> bool:
    """Whether a sum has a later attempt, or more pushes, of any rank than another sum of the same ranks."""
    return any(now[1:] > then[1:] for now, then in zip(summands, before, strict=True))


class RankGradients:
    """All gradient memory of one rank, or of ranks that come as one sum, at one owner, with its staging.

    Knows the shards and free staging entries; not steps or other ranks."""

    def __init__(
        self,
        rank: int,
        shards: Sequence[OwnedShard],
        *,
        accumulate: bool,
        own_memory: GradientMemory | None = None,
        summed: Sequence[int] = (),
    ) -> None:
        """``accumulate``: a step may have several backwards. ``own_memory``: the rank's own, read in place; None:
        allocate memory here, or for each push where there are totals. ``summed``: the ranks whose sum comes, ``rank``
        the first of them; empty: the gradients of ``rank`` alone."""
        self.rank, self.summed, self._own = rank, tuple(summed), own_memory
        trained = {owned.shard.index: owned for owned in shards if owned.trainable}
        dtypes = {at: gradient_dtype(o.unit, accumulate) if not summed else torch.float32 for at, o in trained.items()}
        self._free: list[Tensor] = []
        self.landing_bytes = self.staging_bytes = 0  # bytes of memory allocated here
        buffers: dict[int, Tensor] = {}
        for dtype in set(dtypes.values()) if own_memory is None else ():
            sizes = [(at, o.shard.numel) for at, o in trained.items() if dtypes[at] is dtype and o.total is None]
            buffers |= carve(sizes, dtype)
        self.landings: dict[int, Landing] = {
            at: HostLanding(o, buffers.get(at), summed) if summed else Landing(o, buffers.get(at), dtypes[at])
            for at, o in trained.items()
        }
        self.landing_bytes = sum(buffer.nbytes for buffer in buffers.values())
        if own_memory is not None or summed or len(buffers) < len(trained):
            return
        entries, entry_bytes = staging_entries(list(trained.values()), accumulate)
        self._free += [torch.zeros(entry_bytes, dtype=torch.uint8, device="cpu") for _ in range(entries)]
        self.staging_bytes = entries * entry_bytes

    @property
    def keeps(self) -> bool:
        """Whether the memory is this owner's."""
        return self._own is None

    def own(self, owned: OwnedShard, place: int) -> Tensor | None:
        """What the rank has of a shard at a place in its own memory; None: it is in totals alone."""
        assert self._own is not None
        memory = self._own.at(owned.unit.index, place)
        return None if memory is None else memory[owned.shard.start : owned.shard.stop]

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


class SpareMemory:
    """Memory for what ranks on other hosts push. A push has it until its gradients are in the total."""

    def __init__(self) -> None:
        self._spare: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self.bytes = 0  # allocated so far

    def take(self, owned: OwnedShard, dtype: torch.dtype) -> Tensor:
        """1D, the shard's elements."""
        spare = self._spare.get((owned.shard.numel, dtype))
        if spare:
            return spare.pop()
        self.bytes += owned.shard.numel * dtype.itemsize
        return torch.zeros(owned.shard.numel, dtype=dtype, device="cpu")

    def give_back(self, memory: Tensor) -> None:
        """Nothing reads or writes it any more."""
        self._spare.setdefault((memory.numel(), memory.dtype), []).append(memory)


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


def check_summands(push: Contribution, gradients: RankGradients) -> None:
    """Raise StoreError if a push is not of the ranks that share ``gradients``."""
    ranks = tuple(each.rank for each in push.summands)
    if ranks != gradients.summed:
        came = f"the sum of ranks {list(ranks)}" if ranks else f"gradients of rank {push.rank} alone"
        named = f"the sum of ranks {list(gradients.summed)}" if gradients.summed else "a push of each rank"
        raise StoreError(f"{came} came where {named} is taken; start every rank with the same zero.host_push")
