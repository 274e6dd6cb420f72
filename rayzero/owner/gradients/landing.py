"""The memory that gradients land in. It belongs to one rank, so that its pushes wait for no other rank.

[Note: sums of a host] Ranks of another host that add their gradients before they travel share one landing, a sum for
each round. It takes a sum as it comes. The first one with a later attempt of one of the ranks drops all that were
there. It serves a decision if it has exactly the pushes that all of them counted.

[Note: whose memory] A rank on this host gathers gradients in its own memory, which the owner maps and only reads; the
rank announces what is there (``observe``). For a rank on another host the owner keeps that memory: a push reserves it,
copies its bytes in and reports them as ``landed``. Where there are totals (protocol/gradient_sum.py), memory is a
push's own until its round is in one. A single rank's pushes are added in one place: bytes that have to be added are
staged first, so that no reader sees half a sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from rayzero.errors import StepMismatchError, StoreError
from rayzero.layout.model_layout import UnitLayout
from rayzero.memory.planner import staging_entries
from rayzero.owner.memory import carve
from rayzero.owner.shard import OwnedShard
from rayzero.protocol.gradient_sum import (
    Gradient,
    GradientMemory,
    GradientSum,
    Rounds,
    ScatteredShard,
    ScatteredUnit,
    adds_up,
    gradient_dtype,
    require_round,
)
from rayzero.protocol.messages import AT_HOME, IN_TOTAL, Contribution, FinishReport, ModelSpec, Pushed, Summand


class Admission(Enum):
    """What happens to a push that asks for memory."""

    DROP = auto()  # stale, or a repeat of what has landed
    WAIT = auto()  # an earlier push of the same rank has not landed yet
    LAND = auto()  # write straight into the rank's memory
    STAGE = auto()  # write into staging, to be added


class Landing:
    """A single rank's gradients of one shard: the sum of its pushes.

    Knows which pushes of which attempt have landed; not when a step is decided. The holder of a reservation writes the
    memory; only ``Contributions`` writes everything else."""

    def __init__(self, owned: OwnedShard, memory: Tensor) -> None:
        """``memory``: 1D, the shard's elements; replaced where the rank has its own."""
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

    def counted(self, rank: int, step: int) -> int:
        """How many pushes of ``rank`` in an attempt at ``step`` are here."""
        return self.sum.count_of(step, self.sum.attempt)

    def is_there(self, rank: int, reports: Mapping[int, FinishReport]) -> bool:
        """Whether the pushes that ``rank`` counted are here. ``reports``: by rank. Raises StepMismatchError if there
        are more than it counted."""
        report = reports[rank]
        return _landed(self.owned.unit, report, self.sum.count_of(report.step, report.attempt))

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

    def knows(self, pushed: Pushed) -> bool:
        """Whether that is here, or outdated."""
        return self.sum.is_older(pushed) or pushed.count <= self.sum.count_of(pushed.step, pushed.attempt)

    def observe(self, pushed: Pushed, memory: Tensor | None, scattered: ScatteredUnit | None = None) -> bool:
        """Note what the rank has in its own ``memory`` (1D, the shard's elements), or scattered; returns False if that
        is already known."""
        if self.knows(pushed):
            return False
        self.sum.replace(pushed)
        if memory is not None:
            self.sum.memory = memory
        self._scattered = None if scattered is None else scattered.shard(self.owned.slices)
        self._look()
        return True

    def _look(self) -> None:
        slots = self.sum.presence
        self.present = [bool(slots >> part.slot & 1) for part in self.owned.slices]
        self.generation += 1


def _landed(unit: UnitLayout, report: FinishReport, landed: int) -> bool:
    """Whether as many pushes have landed as a rank counted. Raises StepMismatchError if there are more."""
    counted = report.counts[unit.index]
    if landed > counted:
        raise StepMismatchError(
            f"rank {report.rank} finished step {report.step} with {counted} pushes of {unit.name!r}, "
            f"but {landed} arrived; every push must be issued before finish"
        )
    return landed == counted


@dataclass(eq=False, slots=True)
class Round:
    """What a rank has in one round of a shard's total."""

    present: Sequence[bool]  # per slice: whether it has a gradient
    gradient: Gradient | None  # None: it is in the total


class RoundLanding:
    """One of several ranks' gradients of one shard, push by push: see [Note: totals] in protocol/gradient_sum.py.

    Knows which pushes of which attempt have landed; not other ranks, or what is in the total. The holder of a
    reservation writes its memory; only ``Contributions`` and ``ShardSums`` write everything else."""

    def __init__(self, owned: OwnedShard, accumulation_steps: int) -> None:
        self.owned, self._planned = owned, accumulation_steps
        self.dtype = owned.unit.dtype
        self.pushes = Rounds[Round]()
        self.generation = 0  # grows with each attempt: those of the last one count no more
        self.covered = 0  # rounds of the attempt that is being asked for that are in the total, and need not come
        self._left = 0  # rounds of this attempt that are in the total, and gone from here
        self._coming: Tensor | None = None  # what the next push may write
        self._adding = False

    @property
    def is_scattered(self) -> bool:
        """Whether gradients are not in the memory of rank or owner."""
        return bool(self.pushes.each) and isinstance(self.pushes.each[-1].gradient, ScatteredShard)

    def counted(self, rank: int, step: int) -> int:
        """How many pushes of ``rank`` in an attempt at ``step`` are here, or in the total."""
        return self.pushes.count_of(step, self.pushes.attempt)

    def attempt_of(self, rank: int) -> int:
        """The attempt of ``rank`` whose pushes are here."""
        return self.pushes.attempt

    def has(self, number: int) -> bool:
        """Whether the gradients of a round are here."""
        each = self.pushes.each
        return number < len(each) and each[number].gradient is not None

    def is_there(self, rank: int, reports: Mapping[int, FinishReport]) -> bool:
        """See ``Landing.is_there``."""
        report = reports[rank]
        return _landed(self.owned.unit, report, self.pushes.count_of(report.step, report.attempt))

    def leave(self, rounds: int) -> list[Tensor]:
        """The first ``rounds`` are in the total. Returns the memory that this frees; the pushes still count."""
        gone = self.pushes.each[self._left : rounds]
        freed = [each.gradient for each in gone if isinstance(each.gradient, Tensor)]
        for each in gone:
            each.gradient = None
        self._left = max(self._left, rounds)
        return freed

    def admit(self, push: Contribution) -> Admission:
        """What to do with a push of the open step. Raises AccumulationError for one too many."""
        if self.pushes.is_stale(push):
            return Admission.DROP
        if push.seq > max(self.covered, self.pushes.count_of(push.step, push.attempt)) or self._adding:
            return Admission.WAIT
        require_round(push, self.owned.unit, self._planned)
        return Admission.LAND

    def open(self, push: Contribution, spare: SpareMemory) -> Tensor:
        """Memory for ``push``, the same one for another try of it. A higher attempt drops what was here: a pass that
        reads it may go on."""
        if (push.step, push.attempt) != (self.pushes.step, self.pushes.attempt):
            spare.lose(self._drop(self.pushes.open(push)))
        return self._next(push, spare)

    def _next(self, push: Contribution, spare: SpareMemory) -> Tensor:
        self._pad(push.seq)
        if self._coming is None:
            self._coming = spare.take(self.owned, self.dtype)
        return self._coming

    def _pad(self, count: int) -> None:
        """Of the first ``count`` pushes, those that are not here are in the total alone."""
        self.pushes.each += [Round((), None) for _ in range(self.pushes.count, count)]

    def _drop(self, dropped: Sequence[Round]) -> list[Tensor]:
        """Those of an earlier attempt are ``dropped``; returns their memory, with that of a push that has not
        landed."""
        memory = [each.gradient for each in dropped if isinstance(each.gradient, Tensor)]
        memory += [] if self._coming is None else [self._coming]
        self._coming, self._left = None, 0
        self.generation += 1
        return memory

    def begin(self, push: Contribution) -> bool:
        """See ``Landing.begin``."""
        here = self.pushes.step, self.pushes.attempt, self.pushes.count
        if here != (push.step, push.attempt, push.seq) or self._adding or self._coming is None:
            return False
        self._adding = True
        return True

    def absorb(self, push: Contribution, came: Tensor | None = None) -> None:
        """Copy ``came``, if given, to where the push may write."""
        if came is not None:
            assert self._coming is not None
            self._coming.copy_(came)

    def complete(self, push: Contribution) -> Tensor | None:
        """Count ``push``; see ``Landing.complete``: nothing was staged."""
        self.pushes.each.append(Round(self._present(push.presence), self._coming))
        self._coming, self._adding = None, False
        return None

    def knows(self, pushed: Pushed) -> bool:
        """Whether that is here, or outdated."""
        return self.pushes.is_older(pushed) or pushed.count <= self.pushes.count_of(pushed.step, pushed.attempt)

    def observe(self, pushed: Pushed, memory: Tensor | None, scattered: ScatteredUnit | None = None) -> bool:
        """Note the next push that the rank has in its own ``memory`` (1D, the shard's elements; None: no more), or
        scattered; returns False if that is already known."""
        if self.knows(pushed):
            return False
        if (pushed.step, pushed.attempt) != (self.pushes.step, self.pushes.attempt):
            self._drop(self.pushes.open(pushed))
        self._pad(pushed.count - 1)
        gradient = memory if scattered is None else scattered.shard(self.owned.slices)
        self.pushes.each.append(Round(self._present(pushed.presence), gradient))
        return True

    def _present(self, presence: bytes) -> Sequence[bool]:
        slots = int.from_bytes(presence, "little")
        return [bool(slots >> part.slot & 1) for part in self.owned.slices]


class HostLanding(RoundLanding):
    """The sums of several ranks' gradients of one shard, which are added on their host. See [Note: sums of a host]."""

    def __init__(self, owned: OwnedShard, accumulation_steps: int, ranks: Sequence[int]) -> None:
        """``ranks``: ascending."""
        super().__init__(owned, accumulation_steps)
        self.ranks, self.dtype = tuple(ranks), torch.float32
        self._attempts: tuple[int, ...] = ()  # of the ranks, in the sums that are here, or that may be written
        self._has: dict[int, Summand] = {}  # by rank, what is here of it; empty: nothing that is whole

    def admit(self, push: Contribution) -> Admission:
        if push.step < self.pushes.step:
            return Admission.DROP
        if push.step == self.pushes.step and not self._is_newer(push):
            if _attempts_of(push) != self._attempts or push.seq < self.pushes.count:
                return Admission.DROP
            there = self.pushes.count
        else:
            there = 0
        require_round(push, self.owned.unit, self._planned)
        return Admission.WAIT if push.seq > max(self.covered, there) or self._adding else Admission.LAND

    def _is_newer(self, push: Contribution) -> bool:
        """Whether a sum has a later attempt of any rank than those that are here."""
        return any(now > then for now, then in zip(_attempts_of(push), self._attempts, strict=True))

    def open(self, push: Contribution, spare: SpareMemory) -> Tensor:
        if push.step != self.pushes.step or _attempts_of(push) != self._attempts:
            dropped, self.pushes.each = self.pushes.each, []
            self.pushes.step, self._attempts, self._has = push.step, _attempts_of(push), {}
            spare.lose(self._drop(dropped))
        return self._next(push, spare)

    def begin(self, push: Contribution) -> bool:
        """See ``Landing.begin``."""
        return self._attempts == _attempts_of(push) and super().begin(push)

    def complete(self, push: Contribution) -> Tensor | None:
        self._has = {each.rank: each for each in push.summands}
        return super().complete(push)

    def counted(self, rank: int, step: int) -> int:
        return self._has[rank].pushes if self._has and self.pushes.step == step else 0

    def attempt_of(self, rank: int) -> int:
        return self._has[rank].attempt

    def is_there(self, rank: int, reports: Mapping[int, FinishReport]) -> bool:
        """See ``Landing.is_there``. Nothing comes of a unit that none of the ranks has pushed."""
        mine, unit = [reports[each] for each in self.ranks], self.owned.unit.index
        if not any(report.counts[unit] for report in mine):
            return True
        report = reports[rank]
        if self.pushes.step != report.step or not self._has:
            return False
        if self._has[rank].attempt == report.attempt:
            _landed(self.owned.unit, report, self._has[rank].pushes)
        return all(self._fits(each) for each in mine)

    def _fits(self, report: FinishReport) -> bool:
        """Whether exactly the pushes that a rank counted are in the sums."""
        has, counted = self._has[report.rank], report.counts[self.owned.unit.index]
        return has.pushes == counted and (not counted or has.attempt == report.attempt)


def _attempts_of(push: Contribution) -> tuple[int, ...]:
    return tuple(each.attempt for each in push.summands)


class RankGradients:
    """All gradient memory of one rank, or of ranks that come as one sum, at one owner, with its staging.

    Knows the shards and free staging entries; not steps or other ranks."""

    def __init__(
        self,
        rank: int,
        shards: Sequence[OwnedShard],
        spec: ModelSpec,
        *,
        own_memory: GradientMemory | None = None,
        summed: Sequence[int] = (),
    ) -> None:
        """``own_memory``: the rank's own, read in place; None: allocate memory here, or for each push where there are
        totals. ``summed``: the ranks whose sums come, ``rank`` the first of them; empty: the gradients of ``rank``
        alone."""
        self.rank, self.summed, self._own = rank, tuple(summed), own_memory
        trained = {owned.shard.index: owned for owned in shards if owned.trainable}
        self._free: list[Tensor] = []
        self.landing_bytes = self.staging_bytes = 0  # bytes of memory allocated here
        self.landings: dict[int, Landing | RoundLanding] = {}
        if any(owned.total is not None for owned in trained.values()):
            for at, owned in trained.items():
                planned = spec.accumulation_steps
                self.landings[at] = HostLanding(owned, planned, summed) if summed else RoundLanding(owned, planned)
            return
        adds = adds_up(spec.world_size, spec.accumulation_steps)
        dtypes = {at: gradient_dtype(owned.unit, adds) for at, owned in trained.items()}
        for dtype in set(dtypes.values()):
            here = [owned for at, owned in trained.items() if dtypes[at] is dtype]
            if own_memory is None:
                buffers = carve([(owned.shard.index, owned.shard.numel) for owned in here], dtype)
                self.landing_bytes += sum(buffer.nbytes for buffer in buffers.values())
            else:
                buffers = {owned.shard.index: self._own_of(owned, AT_HOME) for owned in here}
            self.landings |= {owned.shard.index: Landing(owned, buffers[owned.shard.index]) for owned in here}
        if own_memory is None:
            mine = [(owned.shard, owned.unit) for owned in trained.values()]
            entries, entry_bytes = staging_entries(mine, adds=adds)
            self._free += [torch.zeros(entry_bytes, dtype=torch.uint8, device="cpu") for _ in range(entries)]
            self.staging_bytes = entries * entry_bytes

    @property
    def keeps(self) -> bool:
        """Whether the memory is this owner's."""
        return self._own is None

    def own(self, owned: OwnedShard, place: int) -> Tensor | None:
        """What the rank has of a shard at a place in its own memory; None: it is in totals alone."""
        return None if place == IN_TOTAL else self._own_of(owned, place)

    def _own_of(self, owned: OwnedShard, place: int) -> Tensor:
        assert self._own is not None
        memory = self._own.at(owned.unit.index, place)
        assert memory is not None
        return memory[owned.shard.start : owned.shard.stop]

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

    def lose(self, memory: Sequence[Tensor]) -> None:
        """The pushes that had this memory are dropped. A thread may still read or write it: no other push gets it."""
        self.bytes -= sum(each.nbytes for each in memory)

    def give_back(self, memory: Tensor) -> None:
        """Nothing reads or writes it any more."""
        self._spare.setdefault((memory.numel(), memory.dtype), []).append(memory)


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
