"""Groups of saved tensors, the chunks they belong to, and how many bytes of a chunk leave."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from rayzero.activations.policy import OffloadPolicy
from rayzero.activations.schedule.chunk_order import ChunkKey
from rayzero.activations.tensors.entry import Entry, Saved
from rayzero.lanes import Event


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
