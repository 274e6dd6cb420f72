"""The memory of the gradients that one rank has pushed, the sum of a single rank's pushes, and what is in a total.

Both ends of the store use it: a rank in its own memory, which owners of its host read; an owner in the memory that it
keeps for a rank on another host.

[Note: gradient memory] A push lands in memory of the unit's dtype as it is. Only a single rank for which several
backwards a step are planned has fp32 memory, in which its pushes are added, in order and whatever their dtype. fp32
memory of a single rank takes more pushes than were planned; all other memory refuses the one that is too many with an
error that names the setting.

[Note: totals] With several ranks, an owner adds up the gradients of a shard in *rounds*: the kth round has the kth push
of every rank that has one. As soon as every rank has made it, or has said with its finish that it has none, the round
is added up, and that sum is added to the shard's total, fp32, which the update reads. From then on the step needs no
rank's own gradients of that round, and their memory is free for others. So a host has one total where it had as many
gradients as ranks. What is in a total cannot be taken back by one rank alone: all ranks discard, or none.

[Note: scattered gradients] Owners in a rank's own process read gradients where autograd has left them: a tensor a
parameter, instead of one tensor a unit. Nothing is copied, and they take memory only
until their update, as plain PyTorch's do until ``zero_grad``: owners hold them, the rank does not.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import xxhash
from torch import Tensor

from rayzero.errors import AccumulationError
from rayzero.layout.model_layout import ALIGN, ModelLayout, SlotSlice, UnitLayout, aligned
from rayzero.protocol.messages import AT_HOME, ATTEMPTS, IN_TOTAL, Contribution, ModelSpec, Pushed

POOL_ALIGN = 256  # bytes: a range of a pool begins at a multiple
_LEAST_POOL = 16 << 20  # bytes
_WIDE = 1 << 16  # elements
T = TypeVar("T")
WORD_STEP, _WORD_ATTEMPT = 32, 16  # bits of a word below them
MOST_ROUNDS = (1 << _WORD_ATTEMPT - 1) - 1
# (rank, attempt as any life of the rank counts it, how many of its pushes), ascending
Summands = tuple[tuple[int, int, int], ...]


class ScatteredUnit:
    """One push's gradients of a unit.

    Knows parameters' tensors; not shards' owners, or how long it is needed."""

    def __init__(self, unit: UnitLayout, grads: Sequence[Tensor | None]) -> None:
        """``grads``: by slot, contiguous, the unit's dtype, host memory; None: no gradient. Nobody writes to them any
        more. The unit has no padding."""
        self.dtype = unit.dtype
        self.flats = [None if grad is None else grad.detach().flatten() for grad in grads]  # views

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(flat.nbytes for flat in self.flats if flat is not None)

    def shard(self, slices: Sequence[SlotSlice]) -> ScatteredShard:
        """The part that lies in a shard of these slices."""
        return ScatteredShard(self, slices)

    def copy_to(self, memory: Tensor, unit: UnitLayout) -> None:
        """Fill the parameters' ranges of ``memory`` (1D, unit.numel elements); absent ones keep their bytes."""
        for slot, flat in zip(unit.slots, self.flats, strict=True):
            if flat is not None:
                memory[slot.start : slot.stop].copy_(flat)


class ScatteredShard:
    """One rank's gradients of a shard: read as a 1D tensor of the shard's elements, but within one parameter at a
    time."""

    def __init__(self, unit: ScatteredUnit, slices: Sequence[SlotSlice]) -> None:
        self._unit = unit  # keeps the tensors
        self._slices = [part for part in slices if part.numel]
        self._starts = [part.start for part in self._slices]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every element."""
        return self._unit.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def __getitem__(self, elements: slice) -> Tensor:
        """The elements ``[start, stop)``, a view. They lie in one parameter that has a gradient."""
        part = self._slices[bisect_right(self._starts, elements.start) - 1]
        flat = self._unit.flats[part.slot]
        assert flat is not None, part
        assert elements.stop <= part.stop, (elements, part)
        first = part.param_start - part.start
        return flat[first + elements.start : first + elements.stop]


Gradient = Tensor | ScatteredShard  # of one rank and shard


class NewestAttempt:
    """Which pushes of one rank's newest attempt are there: the first ``count``."""

    step, attempt = -1, 0
    count = 0

    def is_older(self, push: Contribution | Pushed) -> bool:
        """Whether ``push`` belongs to an attempt before the current one."""
        return (push.step, push.attempt) < (self.step, self.attempt)

    def count_of(self, step: int, attempt: int) -> int:
        """How many pushes of that attempt are there."""
        return self.count if (self.step, self.attempt) == (step, attempt) else 0

    def is_stale(self, push: Contribution) -> bool:
        """Whether ``push`` is a repeat or from an older attempt, so that it is dropped."""
        return self.is_older(push) or push.seq < self.count_of(push.step, push.attempt)


class Rounds(NewestAttempt, Generic[T]):
    """What is there of each push of one rank, of a unit or a shard, in its newest attempt.

    Knows which pushes are there; not memory. Calls must not overlap."""

    def __init__(self) -> None:
        self.each: list[T] = []  # by sequence number

    @property
    def count(self) -> int:  # type: ignore[override]  # it follows from ``each``, and nothing else sets it
        """How many pushes of that attempt are there."""
        return len(self.each)

    def open(self, push: Contribution | Pushed) -> list[T]:
        """Begin the attempt of ``push``, unless it is the current one; returns what was there of another one."""
        if (push.step, push.attempt) == (self.step, self.attempt):
            return []
        self.step, self.attempt = push.step, push.attempt
        dropped, self.each = self.each, []
        return dropped


@dataclass(frozen=True, slots=True)
class GradientMemory:
    """The memory of one rank's gradients: places for each unit, its homes, and a pool in which units lie that are soon
    in totals."""

    homes: Mapping[int, Tensor]  # by trained unit, the first home: 1D, unit.numel elements of ``gradient_dtype``
    pool: Tensor | None = None  # 1D uint8
    more: Callable[[int, int], Tensor] | None = None  # the nth home of a unit after the first

    def at(self, unit: int, place: int) -> Tensor | None:
        """A unit's gradients at a ``Pushed.place``; None: they are in totals alone."""
        if place == IN_TOTAL:
            return None
        home = self.homes[unit]
        if place == AT_HOME:
            return home
        if place < AT_HOME:
            assert self.more is not None
            return self.more(unit, AT_HOME - place)
        assert self.pool is not None
        return self.pool[place : place + home.nbytes].view(home.dtype)


@dataclass(frozen=True, slots=True)
class FormerRank:
    """What a dead rank has left in its own memory, read-only."""

    memory: GradientMemory
    pushed: Sequence[tuple[int, Pushed]]  # by unit, in its order


NOTHING_LEFT = FormerRank(GradientMemory({}), ())


def has_totals(world_size: int) -> bool:
    """Whether owners keep totals. See [Note: totals]."""
    return world_size > 1


def adds_up(world_size: int, accumulation_steps: int) -> bool:
    """Whether a rank's pushes are added in its memory. See [Note: gradient memory]."""
    return world_size == 1 and accumulation_steps > 1


def most_rounds(accumulation_steps: int) -> int:
    """The most pushes of a unit in an attempt, where there are totals: one of each backward, and with several of them
    one of what ``step()`` itself finds, such as gradients that were set by hand."""
    return 1 if accumulation_steps == 1 else accumulation_steps + 1


def gradient_dtype(unit: UnitLayout, adds: bool) -> torch.dtype:
    """The dtype of the memory for a rank's gradients of a unit. ``adds``: whether its pushes are added there."""
    return torch.float32 if adds else unit.dtype


def gradient_sizes(spec: ModelSpec) -> dict[torch.dtype, list[tuple[int, int]]]:
    """The sizes of the memory for a rank's gradients: by dtype, (unit, elements) of every trained unit."""
    sizes: dict[torch.dtype, list[tuple[int, int]]] = {}
    adds = adds_up(spec.world_size, spec.accumulation_steps)
    for unit in spec.layout.units:
        if unit.trainable:
            sizes.setdefault(gradient_dtype(unit, adds), []).append((unit.index, unit.numel))
    return sizes


def pool_room(size: int) -> int:
    """Bytes of a pool that ``size`` bytes take."""
    return -(-size // POOL_ALIGN) * POOL_ALIGN


def pool_bytes(layout: ModelLayout, accumulation_steps: int) -> int:
    """The size of a rank's pool: room for the two largest trained units, of which one is written while the other is
    added up. Of small units it has room for more, up to all pushes of a step: owners add up several of them at a time,
    and the pages of a home take longer to come than its gradients."""
    rooms = sorted(pool_room(unit.numel * unit.dtype.itemsize) for unit in layout.units if unit.trainable)
    return min(max(sum(rooms[-2:]), _LEAST_POOL), most_rounds(accumulation_steps) * sum(rooms))


class GradientSum(NewestAttempt):
    """The sum of one rank's pushes in one attempt at a step, over a whole unit or a shard of it.

    Knows pushes, their order and which parameters have a gradient; not who reads the memory, or when it is free.
    Calls must not overlap."""

    def __init__(
        self,
        unit: UnitLayout,
        memory: Tensor,
        slices: Sequence[SlotSlice],
    ) -> None:
        """``memory``: 1D, the range's elements. ``slices``: the parameters that lie in it."""
        self.unit, self.memory, self.dtype = unit, memory, memory.dtype
        self.presence = 0  # bit i set: slot i of the unit has a gradient here
        self._slices = slices
        self._all = sum(1 << part.slot for part in slices)
        self._padding = [(s.stop, s.start + aligned(s.numel)) for s in slices if s.numel % ALIGN]

    @classmethod
    def of_unit(cls, unit: UnitLayout, memory: Tensor) -> GradientSum:
        """The sum over a whole unit: ``memory`` has unit.numel elements."""
        slices = [SlotSlice(slot=i, start=s.start, stop=s.stop, param_start=0) for i, s in enumerate(unit.slots)]
        return cls(unit, memory, slices)

    def lands(self, push: Contribution) -> bool:
        """Whether the bytes of ``push`` may go into the memory as they are, because there is nothing to add them to."""
        return push.first == 0 and self.dtype is self.dtype_of(push)

    def dtype_of(self, push: Contribution) -> torch.dtype:
        """The dtype in which the bytes of ``push`` come."""
        return self.dtype if push.sum_of else self.unit.dtype

    def holds(self, values: Tensor) -> bool:
        """Whether ``values`` is the memory itself."""
        return values.data_ptr() == self.memory.data_ptr()

    def require_room(self, push: Contribution) -> None:
        """Raise AccumulationError for a second push where there is room for one."""
        if push.first > 0 and self.dtype is not torch.float32:
            raise too_many(push, self.unit, 1, str(self.dtype).removeprefix("torch."))

    def open(self, push: Contribution) -> None:
        """Prepare to write ``push``. A newer attempt discards what is here, and so does a sum."""
        if (push.step, push.attempt) != (self.step, self.attempt) or push.first < self.count:
            self.step, self.attempt, self.count, self.presence = push.step, push.attempt, 0, 0

    def add(self, push: Contribution, values: Tensor) -> None:
        """Add the next push of the open attempt. ``values``: 1D, the range's elements, any floating dtype. Nothing is
        copied if they are the memory itself; its padding must be zero then."""
        if self.holds(values):
            return
        now = int.from_bytes(push.presence, "little") & self._all
        if push.seq == 0:
            self.memory.copy_(values)  # including absent slots, which are never read
        elif now == self._all == self.presence & self._all:
            add_widened(self.memory, values)
        else:
            self._add_some(values, now)
        self.clear_padding()

    def _add_some(self, values: Tensor, now: int) -> None:
        for part in self._slices:
            if not now >> part.slot & 1:
                continue
            ours, theirs = self.memory[part.start : part.stop], values[part.start : part.stop]
            add_widened(ours, theirs) if self.presence >> part.slot & 1 else ours.copy_(theirs)

    def clear_padding(self) -> None:
        """Zero the elements between parameters."""
        for start, stop in self._padding:
            self.memory[start:stop].zero_()

    def close(self, push: Contribution) -> Pushed:
        """Count ``push``, whose bytes have been added. Returns what is here now."""
        self.count = push.seq + 1
        self.presence |= int.from_bytes(push.presence, "little")
        return self._now()

    def pushed(self) -> Pushed | None:
        """What is here; None while that is nothing."""
        return self._now() if self.count else None

    def _now(self) -> Pushed:
        bits = self.presence.to_bytes((len(self.unit.slots) + 7) // 8, "little")
        return Pushed(step=self.step, attempt=self.attempt, count=self.count, presence=bits)

    def replace(self, pushed: Pushed) -> None:
        """Take over what the rank that owns this memory says is here."""
        self.step, self.attempt, self.count = pushed.step, pushed.attempt, pushed.count
        self.presence = int.from_bytes(pushed.presence, "little")


def too_many(push: Contribution, unit: UnitLayout, planned: int, kept: str) -> AccumulationError:
    """The error for a push more than can be taken. ``kept``: what the memory is."""
    backwards = "one backward a step was" if planned == 1 else f"{planned} backwards a step were"
    holds = (
        "holds one push" if planned == 1 else f"takes no more than one push of each and one of step(): {planned + 1}"
    )
    return AccumulationError(
        f"rank {push.rank} pushed {unit.name!r} {push.seq + 1} times in step {push.step}, but {backwards} planned and "
        f"gradient memory ({kept}) {holds}: set gradient_accumulation_steps to the number of backwards between two "
        "optimizer.step()"
    )


def require_round(push: Contribution, unit: UnitLayout, accumulation_steps: int) -> None:
    """Raise AccumulationError for a push after the last round that there can be."""
    if push.seq >= most_rounds(accumulation_steps):
        raise too_many(push, unit, accumulation_steps, "that of several ranks")


class _Wide(threading.local):
    """Each thread's fp32 scratch for adding 16-bit gradients, made at its first use: ``add_`` of mixed dtypes would
    allocate every time."""

    def __init__(self) -> None:
        self.values = torch.empty(_WIDE, dtype=torch.float32, device="cpu")


_wide = _Wide()


def add_widened(total: Tensor, values: Tensor) -> None:
    """``total += values``, both 1D and of one size. ``total`` is fp32; 16-bit values are widened a block at a time,
    without allocating."""
    if values.dtype is torch.float32:
        total.add_(values)
        return
    for start in range(0, values.numel(), _WIDE):
        block = values[start : start + _WIDE]
        total[start : start + _WIDE].add_(_wide.values[: block.numel()].copy_(block))


@dataclass(frozen=True, slots=True)
class Total:
    """What is in a shard's total."""

    step: int
    rounds: int  # how many
    summands: Summands | int  # whose gradients; or their digest, if a former life has added them
    present: tuple[bool, ...]  # per slice: whether any has a gradient for it

    @property
    def word(self) -> int:
        """See ``total_word``."""
        assert not isinstance(self.summands, int)
        return total_word(self.step, min((attempt for _, attempt, _ in self.summands), default=0), self.rounds)

    def covers(self, step: int, pushes: Mapping[int, int]) -> int:
        """How many of their pushes ranks need not bring again, because they are in it. ``pushes``: by rank, its
        attempt at ``step``. What a former life has added is taken for theirs: they have been told of it."""
        if self.step != step:
            return 0
        if isinstance(self.summands, int):
            return self.rounds
        there = {rank: attempt for rank, attempt, _ in self.summands}
        return self.rounds if all(there.get(rank) == tried % ATTEMPTS for rank, tried in pushes.items()) else 0

    def is_of(self, step: int, summands: Summands) -> bool:
        """Whether exactly these gradients of a step are in it."""
        mine = digest_of(summands) if isinstance(self.summands, int) else summands
        return (self.step, self.summands) == (step, mine)


def summands_of(pushes: Mapping[int, tuple[int, int]], rounds: int) -> Summands:
    """What is in a total after some rounds. ``pushes``: by rank that has any, its attempt and how many."""
    return tuple((rank, attempt, min(count, rounds)) for rank, (attempt, count) in sorted(pushes.items()))


def total_word(step: int, attempt: int, rounds: int) -> int:
    """63 bits and a 0 for what a rank needs to know of a total, or for what it has pushed: the total has that if its
    word is not less. ``attempt``: of a total the lowest one, of ``rounds`` pushes theirs."""
    return (step + 1) << WORD_STEP | attempt % ATTEMPTS << _WORD_ATTEMPT | rounds << 1


def has_pushed(word: int, pushed: Pushed) -> bool:
    """Whether a total with this ``total_word`` has what a rank has pushed."""
    return word >= total_word(pushed.step, pushed.attempt, pushed.count)


def digest_of(summands: Summands) -> int:
    """63 bits that tell summands apart."""
    return xxhash.xxh3_64_intdigest(repr(summands).encode()) >> 1


@dataclass(frozen=True, slots=True)
class KeptTotal:
    """What a total was before a round is added to it: in memory that outlives the process, beginning with its first
    element. It is filled little by little, just before the total changes there, while both are in a core's cache."""

    values: Tensor  # 1D fp32, the total's elements
    count: Tensor  # int64, 1 element: the first so many are there

    def keep(self, total: Tensor, end: int) -> None:
        """The elements of ``total`` before ``end`` are about to change."""
        there = int(self.count)
        if there < end:
            self.values[there:end].copy_(total[there:end])
            self.count.fill_(end)


class TotalLine:
    """What is noted of a total in memory that outlives the process; here nothing, where no memory does."""

    def write(self, made: Total) -> None:
        """The total is whole: from now on, ranks give back what is in it."""

    def hold(self) -> None:
        """A rank comes back: what its former life had in the total, ranks give back no more in this step."""

    def clear(self) -> None:
        """The total's bytes are about to change, and the ranks still have everything that was in it."""

    def keeps(self, total: Tensor) -> KeptTotal | None:
        """The total's bytes are about to change by one more round. Returns what takes them first; until ``write``,
        ``read`` brings back those that are in it."""
        return None

    def read(self, total: Tensor) -> Total | None:
        """What a former life of the owner has left there; None: nothing."""
        return None
