"""One shard of an owner: its memory, its version and its state. And the thread that changes shards: it runs
one task after the other, in the order of submission."""

from __future__ import annotations

import atexit
import math
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from rayzero.codecs.record import kept_bytes, read_record, used_bytes, write_record
from rayzero.concurrency.threads import use_torch_threads
from rayzero.errors import StoreError
from rayzero.kernels.moments import BLOCK, CODED, CodedMoment, Moment, PlainMoment
from rayzero.kernels.split_master import SignedSquares, SplitMaster
from rayzero.kernels.stamps import TileStamps
from rayzero.layout.model_layout import ALIGN, Shard, SlotSlice, UnitLayout, aligned, runs
from rayzero.owner.memory import DeviceStates, HostMemory, ShardJournal, ShardRoom, Sizes
from rayzero.protocol.gradient_sum import Gradient, TotalLine, has_totals
from rayzero.protocol.messages import COMPUTE, MASTER, STORED, Decision, FormerShard, Hyper, ModelSpec, NormParts

Task = Callable[[], None]


class Updater:
    """One thread with its own torch thread count.

    Knows tasks and their order; not what they do. If a task raises, the thread goes on, and ``on_error`` gets the
    error."""

    def __init__(self, name: str, threads: int, on_error: Callable[[BaseException], None]) -> None:
        """``threads``: torch threads of each task, at least 1."""
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._on_error = on_error
        self._abandoned = False
        self._idle: tuple[float, Task] | None = None
        self._thread = threading.Thread(target=self._run, args=(threads,), name=name, daemon=True)
        self._thread.start()
        _running.add(self)

    @property
    def queued(self) -> int:
        """Tasks that wait behind the running one."""
        return self._tasks.qsize()

    def submit(self, task: Task) -> None:
        """Queue a task. Tasks submitted after ``close`` do not run."""
        self._tasks.put(task)

    def when_idle(self, seconds: float, task: Task) -> None:
        """Whenever there was nothing to run for so long, run ``task`` once. It takes the place of the last one."""
        self._idle = seconds, task

    def close(self) -> None:
        """Run the queued tasks, then end the thread. Idempotent; must not be called from a task."""
        self._tasks.put(None)
        self._thread.join()

    def abandon(self) -> None:
        """Wait for the running task and start no other. Idempotent; must not be called from a task."""
        self._abandoned = True
        self._tasks.put(None)
        self._thread.join()

    def _run(self, threads: int) -> None:
        rests = False  # since a task ran
        while (task := self._next(rests)) is not None and not self._abandoned:
            rests = self._idle is not None and task is self._idle[1]
            use_torch_threads(threads)
            try:
                task()
            except Exception as exc:  # the supervision loop of everything an owner computes
                self._on_error(exc)
            del task  # it may hold gradients, and the next one may come late

    def _next(self, rests: bool) -> Task | None:
        idle = None if rests else self._idle
        try:
            return self._tasks.get(timeout=None if idle is None else idle[0])
        except queue.Empty:
            return None if idle is None else idle[1]


_running: weakref.WeakSet[Updater] = weakref.WeakSet()


@atexit.register
def _abandon_all() -> None:
    """A program may end without closing anything, and the process dies with "terminate called" if a daemon thread is in
    torch's C++ while the interpreter ends. So threads end before that."""
    for updater in list(_running):
        updater.abandon()


Contributors = tuple[tuple[int, ...], ...]  # per slice: the ranks with a gradient for it, ascending


class ShardState(Enum):
    """What a shard's memory holds."""

    EMPTY = auto()  # allocated, no values yet
    PUBLISHED = auto()  # version `published`, readable; ranks land gradients of the open step
    DECIDED = auto()  # still readable; decisions wait in the updater's queue, so its gradients are fixed
    UPDATING = auto()  # tiles are being overwritten: nobody reads


S = ShardState
_MOVES = {
    S.EMPTY: {S.PUBLISHED},
    S.PUBLISHED: {S.DECIDED},
    S.DECIDED: {S.UPDATING, S.PUBLISHED},  # straight to PUBLISHED if the content does not change
    S.UPDATING: {S.PUBLISHED},
}


@dataclass(eq=False, kw_only=True)
class OwnedShard:
    """A shard of this owner.

    Knows its memory, version and state; not gradients, other shards, or who computes the update. Only ``Publisher``
    writes its state and version; only the updater's thread writes its tensors, ``steps`` and ``groups``."""

    shard: Shard
    unit: UnitLayout
    slices: tuple[SlotSlice, ...]
    groups: tuple[int, ...]  # group number of each slice: [Note: group numbers] in protocol/messages.py
    params: Tensor  # 1D, unit dtype: what COMPUTE reads; of a coded unit its record, uint8
    # 1D fp32; the same memory as params in a trained fp32 unit on the host; int16 if it is split; frozen: may be None
    master: Tensor | None
    states: dict[str, Moment]  # by kind; on a device where the master is
    class_states: Tensor | None = None  # 1D uint8: what a torch class keeps (classes/); where the master is
    total: Tensor | None = None  # 1D fp32: the ranks' gradients, added up; None: ranks' own memory is read
    total_line: TotalLine = field(default_factory=TotalLine)  # where the total is noted
    total_room: ShardRoom | None = None  # of the total, if its memory can be given back
    total_there: bool = field(default=True, init=False)  # the total's memory can be written
    room: ShardRoom | None = None  # of a record whose memory can be given back
    journal: ShardJournal | None = None  # only for a trained shard in memory that outlives the process
    filled: int = field(init=False)  # elements that are not padding
    steps: list[int] = field(init=False)  # per slice: how often its parameter was updated
    padding: tuple[tuple[int, int], ...] = field(init=False)  # ranges from a slice's end to a multiple of 64 elements
    state: ShardState = field(default=S.EMPTY, init=False)
    published: int = field(default=-1, init=False)
    content: int = field(default=-1, init=False)  # the version at which the published parameters last changed
    newest: int = field(default=-1, init=False)  # the newest version of which every byte is there, published or not
    pending: int = field(default=0, init=False)  # decisions queued or being worked on
    writes: int = field(default=0, init=False)  # of the user's, begun and ended: odd during one
    changed: Tensor | None = field(default=None, init=False)  # where the update in progress notes what it changes

    def __post_init__(self) -> None:
        self.filled = sum(part.numel for part in self.slices)
        self.steps = [0] * len(self.slices)
        self.padding = tuple((s.stop, s.start + aligned(s.numel)) for s in self.slices if s.numel % ALIGN)

    @property
    def trainable(self) -> bool:
        """True when the shard has gradients, states and a master."""
        return self.unit.trainable

    @property
    def split(self) -> SplitMaster | None:
        """The masters, if they are kept split."""
        if self.master is None or self.master.dtype is not torch.int16:
            return None
        return SplitMaster(self.master, self.params, self.states["exp_avg_sq"].tensors[0])

    def masters(self, start: int, stop: int) -> Tensor:
        """Masters start..stop, 1D fp32: the memory itself, or a copy of split ones."""
        assert self.master is not None
        split = self.split
        return self.master[start:stop] if split is None else split.read(start, stop)

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Kind -> bytes; published parameters that share the master's memory count as the master, a record as much as
        it uses."""
        published = used_bytes(self.params) if self.unit.is_coded else self.params.nbytes
        apart = {} if self.params is self.master else {"param": published}
        master = {} if self.master is None else {"master": self.master.nbytes}
        of_class = {} if self.class_states is None else {"states": self.class_states.nbytes}
        return {**apart, **master, **{kind: moment.nbytes for kind, moment in self.states.items()}, **of_class}

    @property
    def spare_bytes(self) -> int:
        """The room of a record that it does not need; 0 before it is written."""
        used = used_bytes(self.params) if self.unit.is_coded else 0
        return self.params.nbytes - used if used else 0

    @property
    def original_bytes(self) -> dict[str, int]:
        """Kind -> bytes that ``memory_bytes`` would be if nothing were encoded."""
        wide = dict.fromkeys(self.states, self.shard.numel * torch.float32.itemsize)
        return (
            self.memory_bytes
            | wide
            | ({"param": self.shard.numel * self.unit.dtype.itemsize} if self.unit.is_coded else {})
        )

    def move(self, state: ShardState) -> None:
        """Change state; raises StoreError when the table does not allow it."""
        if state not in _MOVES[self.state]:
            raise StoreError(f"shard {self.shard.index} of {self.unit.name!r} cannot go {self.state} -> {state}")
        self.state = state

    def stamps(self, version: int) -> TileStamps | None:
        """The tile stamps for the update that makes ``version``; None if nothing outlives the process."""
        return self.journal.stamps(version) if self.journal is not None else None

    def take_over(self, left: FormerShard) -> None:
        """Continue what a former life of the owner has left in this memory."""
        self.published, self.content, self.newest = left.published, left.content, left.applied
        if self.total_room is not None:
            self.total_room.restore()  # a former life may have given it back
        if left.slices:
            self.steps = [count for count, _ in left.slices]
            self.groups = tuple(group for _, group in left.slices)

    def left(self) -> FormerShard:
        """What ``take_over`` continues in the next epoch, where this process has kept the tensors."""
        slices = tuple(self._journaled()) if self.trainable else ()
        return FormerShard(published=self.published, content=self.content, applied=self.newest, slices=slices)

    def keep_slices(self) -> None:
        """``steps`` or ``groups`` were written: let them outlive the process."""
        if self.journal is not None:
            self.journal.keep(self._journaled())

    def applied(self, version: int, updated: Sequence[int]) -> None:
        """Every byte is of ``version``; the slices ``updated`` (indices) were updated once more."""
        for index in updated:
            self.steps[index] += 1
        self.newest = version
        if self.journal is not None:
            self.journal.applied(version, self._journaled())

    def _journaled(self) -> list[tuple[int, int]]:
        return list(zip(self.steps, self.groups, strict=True))

    def fill(self, values: Tensor) -> None:
        """Take initial values (1D, the shard's elements, any floating dtype) as the master, and round the published
        parameters from it."""
        widest = self.widest()
        widest.copy_(values)
        for start, stop in self.padding:
            widest[start:stop].zero_()
        self.publish(widest)

    def widest(self) -> Tensor:
        """The memory of the values in the widest form that is kept, to be filled and then passed to ``publish``: the
        master or the published parameters; for a record or split masters zeros beside them."""
        if self.split is not None:
            return torch.zeros(self.shard.numel, dtype=torch.float32, device="cpu")
        if self.master is not None:
            return self.master
        return torch.zeros(self.shard.numel, dtype=self.unit.dtype, device="cpu") if self.unit.is_coded else self.params

    def publish(self, values: Tensor) -> None:
        """Round ``values`` (1D, the shard's elements, zeros as padding) into the published parameters, if these are
        separate memory; split masters become them. Raises StoreError if the unit's codec cannot hold them."""
        if self.split is not None:
            self.split.write(0, self.shard.numel, values)
            return
        if not self.unit.is_coded:
            if values is not self.params:
                self.params.copy_(values)
            return
        if self.room is not None:
            self.room.restore()
        write_record(self.params, self.unit, self.shard, values.to(device="cpu", dtype=self.unit.dtype))
        self.give_back_spare()

    def give_back_spare(self) -> None:
        """Give the room back that a record, which has just been written or has come from another owner, does not
        need."""
        if self.room is not None:
            self.room.give_back(used_bytes(self.params))

    def step_counts(self) -> Tensor:
        """Each slice's count of updates, repeated over its range: 1D fp32, the shard's elements."""
        counts = torch.zeros(self.shard.numel, dtype=torch.float32, device="cpu")
        for part, steps in zip(self.slices, self.steps, strict=True):
            counts[part.start : part.stop] = steps
        return counts

    def read(self, kind: str) -> Tensor:
        """The memory that holds ``kind`` (1D, the shard's elements), or a host copy if it is on a device or in codes.
        Raises StoreError, naming the kinds that exist."""
        if kind == COMPUTE and self.unit.is_coded:
            values = torch.empty(self.shard.numel, dtype=self.unit.dtype, device="cpu")
            read_record(self.params, self.unit, self.shard, values)
            return values
        if kind == COMPUTE:
            return self.params
        if kind == STORED and self.unit.is_coded:
            return self.params[: used_bytes(self.params)]
        state = self.states.get(kind)
        found = None if state is None else state.read(0, self.shard.numel)
        if kind == MASTER and self.master is not None:
            found = self.masters(0, self.shard.numel)
        if found is None:
            kinds = [COMPUTE, *([STORED] if self.unit.is_coded else [])]
            kinds += [*([MASTER] if self.master is not None else []), *self.states]
            raise StoreError(f"{self.unit.name!r} has no {kind!r} to fetch; it has {', '.join(kinds)}")
        return found.cpu()


@dataclass(frozen=True, kw_only=True)
class ShardWork:
    """What one decision does to a shard whose content changes."""

    gradients: Sequence[Gradient]  # per rank: 1D, the shard's elements
    version: int  # the version that it makes
    contributors: Contributors
    scale: float
    limit: float = math.inf  # every element of the scaled gradient is clamped to within +- this
    hyper: tuple[Hyper, ...]  # per parameter group


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What one decision does to an owner's shards."""

    decision: Decision
    shards: Mapping[int, ShardWork | None]  # by shard; None: its content does not change
    parts: Future[NormParts]  # of the step's gradients; done

    @property
    def version(self) -> int:
        """The version that it makes."""
        return self.decision.step + 1


def allocate(
    spec: ModelSpec,
    shards: Sequence[int],
    kinds: Sequence[str],
    memory: HostMemory,
    *,
    room: Callable[[Shard], int] | None,
    splits: bool,
    device: DeviceStates | None = None,
) -> dict[int, OwnedShard]:
    """Allocate the tensors of an owner's shards (ascending), one block per dtype and kind.

    ``kinds``, ``room``, ``splits``: ``UpdateRule.state_kinds``, and what it calls so. ``device``: where masters and
    moments lie; None: in ``memory``."""
    kept, layout, group_of = memory if device is None else device, spec.layout, spec.group_of
    owned = [layout.shards[index] for index in shards]
    trained = [shard for shard in owned if layout.units[shard.unit].trainable]
    params: dict[int, Tensor] = {}
    coded = [shard for shard in owned if layout.units[shard.unit].is_coded]
    plain = [shard for shard in owned if not layout.units[shard.unit].is_coded]
    for dtype in {layout.units[shard.unit].dtype for shard in plain}:
        alike = [shard for shard in plain if layout.units[shard.unit].dtype is dtype]
        params |= memory.params([_sizes(run) for run in runs(alike)], dtype)
    records = [[(s.index, kept_bytes(layout.units[s.unit], s)) for s in run] for run in runs(coded)]
    params |= memory.params(records, torch.uint8)
    mastered = [shard for shard in owned if layout.units[shard.unit].has_master]
    divided = {s.index for s in trained if splits and layout.units[s.unit].can_split}
    apart = [s for s in mastered if kept.apart or layout.units[s.unit].dtype is not torch.float32]
    master = {shard.index: params[shard.index] for shard in mastered}  # what an fp32 unit publishes is its master
    master |= kept.state(_sizes([s for s in apart if s.index not in divided]), torch.float32)
    master |= kept.state(_sizes([s for s in apart if s.index in divided]), torch.int16)
    states = {kind: _moments(kind, _sizes(trained), spec.moments, kept) for kind in kinds}
    for index in divided:
        states["exp_avg_sq"][index] = SignedSquares(*states["exp_avg_sq"][index].tensors)
    of_class = {} if room is None else kept.state([(shard.index, room(shard)) for shard in trained], torch.uint8)
    found = {}
    for shard in owned:
        unit, slices, index = layout.units[shard.unit], layout.slices(shard), shard.index
        found[index] = OwnedShard(
            shard=shard,
            unit=unit,
            slices=slices,
            groups=tuple(group_of[shard.unit][part.slot] for part in slices) if unit.trainable else (),
            params=params[index],
            master=master.get(index),
            states={kind: region[index] for kind, region in states.items()} if unit.trainable else {},
            class_states=of_class.get(index),
            room=memory.room(index) if unit.is_coded else None,
            journal=kept.journal(index) if unit.trainable else None,
        )
    for index, total in (memory.state(_sizes(trained), torch.float32) if has_totals(spec.world_size) else {}).items():
        found[index].total, found[index].total_line = total, memory.total_line(index)
        found[index].total_room = memory.total_room(index)
    return found


def _moments(kind: str, sizes: Sizes, moments: str, memory: HostMemory | DeviceStates) -> dict[int, Moment]:
    if moments not in CODED:
        return {key: PlainMoment(values) for key, values in memory.state(sizes, torch.float32).items()}
    codes = memory.state(sizes, CODED[moments])
    scales = memory.state([(key, numel // BLOCK) for key, numel in sizes], torch.float32)
    return {key: CodedMoment(codes[key], scales[key], is_root=kind == "exp_avg_sq") for key, _ in sizes}


def _sizes(shards: Sequence[Shard]) -> Sizes:
    return [(shard.index, shard.numel) for shard in shards]
