"""Groups of saved tensors, the chunks they belong to, how many bytes of a chunk leave, and which chunk's backward comes
next: as in the last step, or by a rule if the step has not been seen before. And the settings: what may leave the
device, how much of it, and how far ahead it comes back.

A chunk is one forward of one model part (a virtual pipeline stage) on one microbatch. The prediction only decides when
copies come back: a wrong one costs a wait, never a wrong number.

[Note: the rule] A step's forwards begin with ``g`` microbatches through the first part; without virtual stages, these
are all of them. Backward then takes ``g`` microbatches at a time, from the highest part to the lowest, and in each part
first in, first out. That covers 1F1B, interleaved 1F1B and all-forward-all-backward. If the first backward of a step is
that of its newest chunk while older chunks of the same part wait, the step runs last in, first out (several forwards,
one backward).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Self

from rayzero.activations.entry import Entry, Saved
from rayzero.config import ZeroConfig
from rayzero.errors import ConfigError
from rayzero.lanes import Event

COMPRESSIONS = ("none", "fp16", "bf16", "int8", "quantization")  # codecs that encode on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPolicy:
    """Settings of one ``ActivationOffload``; every size is in bytes.

    A chunk is one forward of one model part. Of its ``total`` eligible bytes, exactly
    ``round(fraction * (total - margin bytes - rank * delta_bytes))`` leave, the earliest first; one tensor is split if
    necessary. The first time a chunk runs, its total is not known. Then whole tensors leave, so that the share is never
    more than one tensor off. With ``device_budget_bytes``, cost decides instead (``cost.py``).

    Raises ConfigError if a value is out of range."""

    min_bytes: int = 1 << 20
    """Saved tensors smaller than this stay on the device."""
    fraction: float = 1.0
    """Share of the eligible bytes that leaves, 0 to 1."""
    rank: int = 0
    """This rank's number, for ``delta_bytes`` and for the summary."""
    delta_bytes: int = 0
    """Bytes that each rank keeps on its device more than the rank before it (late pipeline ranks hold fewer
    microbatches)."""
    margin: int = 1
    """How many of a chunk's last groups stay if its own backward comes next."""
    prefetch: int = 1
    """How many groups come back ahead of the one whose backward runs."""
    max_in_flight: int | None = None
    """How many groups may be on their way out before the forward waits. 0 waits for each, None never waits. With a
    number, the device holds at most ``1 + max(max_in_flight, prefetch)`` groups, besides what stays by choice, as long
    as groups come back in the reverse order; in any other order, ``1 + max_in_flight + prefetch``."""
    view_coverage: float = 0.5
    """A strided view that covers at least this share of its storage is stored as the whole storage."""
    compress: str = "none"
    """"none" is exact; "fp16", "bf16", "int8" and "quantization" (4 bits) round what leaves. Their codec states the
    error (``rayzero/codecs``)."""
    device_budget_bytes: int | None = None
    """Bytes of saved activations to hold on the device. Measured cost decides which groups are kept, offloaded or
    recomputed. None: ``fraction`` decides what leaves."""
    host_cap_bytes: int | None = None
    """The most bytes of host buffers; beyond them, tensors stay on the device. None: no bound."""
    pinned_cap_bytes: int | None = None
    """The most bytes of page-locked host buffers; beyond them, buffers are pageable. None: no bound. CUDA only."""
    poison: bool = False
    """For tests: fill buffers with 0xFF (NaN) before and after use, so that a read at the wrong time shows."""

    @classmethod
    def of(cls, config: ZeroConfig, *, rank: int = 0, poison: bool = False) -> Self:
        """The policy of a rank's config."""
        return cls(
            min_bytes=config.activation_min_bytes,
            fraction=config.activation_fraction,
            device_budget_bytes=config.activation_device_budget,
            host_cap_bytes=config.activation_host_budget,
            rank=rank,
            poison=poison,
        )

    def __post_init__(self) -> None:
        for name in ("min_bytes", "rank", "delta_bytes", "margin", "prefetch"):
            _at_least_zero(name, getattr(self, name))
        for name in ("max_in_flight", "device_budget_bytes", "host_cap_bytes", "pinned_cap_bytes"):
            if getattr(self, name) is not None:
                _at_least_zero(name, getattr(self, name))
        if not 0.0 <= self.fraction <= 1.0:
            raise ConfigError(f"fraction must be between 0 and 1, got {self.fraction}")
        if not 0.0 < self.view_coverage <= 1.0:
            raise ConfigError(f"view_coverage must be above 0 and at most 1, got {self.view_coverage}")
        if self.compress not in COMPRESSIONS:
            raise ConfigError(f"compress must be one of {', '.join(COMPRESSIONS)}, got {self.compress!r}")


def _at_least_zero(name: str, value: int) -> None:
    if value < 0:
        raise ConfigError(f"{name} must be >= 0, got {value}")


@dataclass(frozen=True, slots=True, order=True)
class ChunkKey:
    """The ``ordinal``-th forward of model part ``stage`` in a step, both from 0."""

    stage: int
    ordinal: int


@dataclass(slots=True)
class _Step:
    """What has happened since the last time that no chunk was live."""

    forwards: list[ChunkKey] = field(default_factory=list)  # in the order they began
    ended: set[ChunkKey] = field(default_factory=set)  # forward is over
    backwards: list[ChunkKey] = field(default_factory=list)  # in the order they began
    live: set[ChunkKey] = field(default_factory=set)  # still has saved tensors
    newest_first: bool = False
    as_learned: bool = True


class ChunkOrder:
    """Follows forwards and backwards of chunks and predicts the next backward.

    Knows keys and their order in this step and the last; not tensors. A step begins with its first chunk and ends when
    no chunk is live any more. Not thread-safe."""

    def __init__(self) -> None:
        self._step = _Step()
        self.learned: tuple[ChunkKey, ...] = ()  # the backward order of the last whole step

    def forward_began(self, stage: int) -> ChunkKey:
        """A new chunk of part ``stage``."""
        key = ChunkKey(stage, sum(other.stage == stage for other in self._step.forwards))
        self._step.forwards.append(key)
        self._step.live.add(key)
        return key

    def forward_ended(self, key: ChunkKey) -> None:
        """A chunk's forward is over: all its groups are known."""
        self._step.ended.add(key)

    def backward_began(self, key: ChunkKey) -> None:
        """A chunk's first saved tensor was read. Later calls for the same chunk change nothing."""
        step = self._step
        if key in step.backwards:
            return
        if not step.backwards:
            step.newest_first = self._newest_with_older(key)
        place = len(step.backwards)
        step.as_learned &= place < len(self.learned) and self.learned[place] == key
        step.backwards.append(key)

    def gone(self, key: ChunkKey) -> None:
        """Nothing that a chunk saved is left, after its backward or without one."""
        step = self._step
        step.live.discard(key)
        if not step.live:
            if step.backwards:
                self.learned = tuple(step.backwards)
            self._step = _Step()

    def expected_after(self, key: ChunkKey) -> ChunkKey | None:
        """The chunk whose backward should follow ``key``'s; None if it is unknown or its forward is not over."""
        follower = self._learned_after(key)
        if follower is None:
            follower = self._ruled_after(key)
        return follower if follower is not None and self._ready(follower) else None

    def comes_next(self, key: ChunkKey) -> bool:
        """Whether no other chunk's backward is expected before ``key``'s."""
        step = self._step
        place = len(step.backwards)
        if step.as_learned and place < len(self.learned):
            return self.learned[place] == key
        waiting = [other for other in step.live if other not in step.backwards]
        return key == min(waiting, key=self._rank_of, default=key)

    def _ready(self, key: ChunkKey) -> bool:
        step = self._step
        return key in step.live and key in step.ended and key not in step.backwards

    def _learned_after(self, key: ChunkKey) -> ChunkKey | None:
        if not self._step.as_learned or key not in self.learned:
            return None
        place = self.learned.index(key) + 1
        return self.learned[place] if place < len(self.learned) else None

    def _ruled_after(self, key: ChunkKey) -> ChunkKey | None:
        """See [Note: the rule]."""
        step = self._step
        if step.newest_first:
            waiting = [other for other in step.forwards if self._ready(other)]
            return waiting[-1] if waiting else None
        size = self._group_size()
        group = key.ordinal // size
        if (key.ordinal + 1) // size == group:
            return ChunkKey(key.stage, key.ordinal + 1)
        stages = sorted({other.stage for other in step.forwards})
        lower = stages.index(key.stage) - 1
        return ChunkKey(stages[lower], group * size) if lower >= 0 else ChunkKey(stages[-1], (group + 1) * size)

    def _rank_of(self, key: ChunkKey) -> tuple[int, int, int]:
        return key.ordinal // self._group_size(), -key.stage, key.ordinal

    def _group_size(self) -> int:
        """How many microbatches went through the first part before another part ran."""
        forwards = self._step.forwards
        if not forwards:
            return 1
        first = forwards[0].stage
        run = next((index for index, key in enumerate(forwards) if key.stage != first), len(forwards))
        return max(1, run)

    def _newest_with_older(self, key: ChunkKey) -> bool:
        step = self._step
        waiting = [other for other in step.forwards if other in step.live]
        older = any(other.stage == key.stage and other.ordinal < key.ordinal for other in waiting)
        return older and waiting[-1] == key


class ChunkQuota:
    """Deals out one chunk's share of bytes while its forward runs, the earliest first.

    Knows byte counts; not tensors. With ``expected``, the bytes of the chunk's groups the last time, the share is exact
    to the byte if the chunk is the same. Without it, a whole tensor leaves whenever the share stays within
    ``fraction``, and ``margin`` and ``delta_bytes`` have no effect."""

    def __init__(self, policy: OffloadPolicy, expected: Sequence[int] | None, *, margin: int) -> None:
        self._policy = policy
        self._expected = expected
        self._margin = range(0) if expected is None else range(max(0, len(expected) - margin), len(expected))
        self._target = 0 if expected is None else _share(policy, sum(expected[: self._margin.start]))
        self._seen = self._offloaded = 0

    def take(self, nbytes: int, *, group: int) -> int:
        """How many bytes leave of a tensor of ``nbytes`` in the chunk's ``group``-th group: all, none, or as many as
        are left up to the target."""
        if group in self._margin:
            return 0
        self._seen += nbytes
        taken = self._exact(nbytes) if self._expected is not None else self._whole(nbytes)
        self._offloaded += taken
        return taken

    def put_back(self, nbytes: int) -> None:
        """Take back bytes that were dealt out but had to stay, for example because the host had no room."""
        self._offloaded -= nbytes

    def _exact(self, nbytes: int) -> int:
        target = max(self._target, _share(self._policy, self._seen))  # a bigger chunk than last time keeps its share
        return max(0, min(nbytes, target - self._offloaded))

    def _whole(self, nbytes: int) -> int:
        return nbytes if self._offloaded + nbytes <= round(self._policy.fraction * self._seen) else 0


def _share(policy: OffloadPolicy, nbytes: int) -> int:
    return max(0, round(policy.fraction * (nbytes - policy.rank * policy.delta_bytes)))


@dataclass(frozen=True, slots=True, order=True)
class GroupKey:
    """The ``occurrence``-th group called ``label`` in a forward of part ``stage``. The same in every step."""

    stage: int
    label: str
    occurrence: int


@dataclass(slots=True, eq=False)
class Chunk:
    """One forward of one model part, and what is left of it.

    Knows its groups in the order in which their scopes closed; not what moves them."""

    key: ChunkKey
    quota: ChunkQuota
    groups: list[Group] = field(default_factory=list)
    opened: dict[str, int] = field(default_factory=dict)  # label -> groups opened
    begun: list[int] = field(default_factory=list)  # groups whose backward began, in that order
    forward_open: bool = True
    live: int = 0  # handles that have not ended

    def open_group(self, name: str, label: str) -> Group:
        """A new group. It gets its place in the order when it closes."""
        occurrence = self.opened.get(label, 0)
        self.opened[label] = occurrence + 1
        return Group(name, GroupKey(self.key.stage, label, occurrence), self)

    def close_group(self, group: Group) -> None:
        """The group's scope has ended: the group comes next in the order."""
        if group.index < 0:
            group.index = len(self.groups)
            self.groups.append(group)

    @property
    def gone(self) -> bool:
        """Whether its forward is over and nothing that it saved is left."""
        return not self.forward_open and self.live == 0


@dataclass(slots=True, eq=False)
class Group:
    """The tensors that were saved inside one scope. They are decided on and moved together."""

    name: str
    key: GroupKey
    chunk: Chunk
    index: int = -1  # place in the chunk's order; -1 while open
    handles: list[weakref.ref[Saved[Group]]] = field(default_factory=list)  # until the group is committed
    entries: list[Entry] = field(default_factory=list)  # its backward needs them; some are shared with other groups
    saved_bytes: int = 0  # eligible bytes that were first saved here
    offloaded_bytes: int = 0
    task: int = -1  # the graph task that read from it last
    committed: bool = False
    recomputed: bool = False
    streams: set[Hashable] = field(default_factory=set)  # on which its tensors were saved
    signature: tuple[Sequence[int], ...] = ()  # shapes of its module's inputs
    input_bytes: int | None = None  # of the same; None: a scope in user code, which cannot be recomputed
    began: Event | None = None  # forward of its scope, if it is timed
    ended: Event | None = None

    def waiting(self) -> list[Saved[Group]]:
        """The live handles that hold their tensors, in the order in which these were saved. Returns each only once."""
        found = [saved for ref in self.handles if (saved := ref()) is not None and saved.tensor is not None]
        self.handles.clear()
        return found
