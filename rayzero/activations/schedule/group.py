"""Groups of saved tensors and the chunks they belong to."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from rayzero.activations.schedule.chunk_order import ChunkKey
from rayzero.activations.schedule.quota import ChunkQuota
from rayzero.activations.tensors.entry import Entry, Saved
from rayzero.lanes import Event


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

    def group_bytes(self) -> tuple[int, ...]:
        """The eligible bytes of each group, in order."""
        return tuple(group.saved_bytes for group in self.groups)


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
    began: Event | None = None  # forward of its scope, if it is timed
    ended: Event | None = None

    def waiting(self) -> list[Saved[Group]]:
        """The live handles that hold their tensors, in the order in which these were saved. Returns each only once."""
        found = [saved for ref in self.handles if (saved := ref()) is not None and saved.tensor is not None]
        self.handles.clear()
        return found
