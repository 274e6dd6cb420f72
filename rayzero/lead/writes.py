"""A user's writes to parameters and optimizer states, at the lead: made once every rank has requested the same
write."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from rayzero.concurrency.futures import settled
from rayzero.errors import StepMismatchError
from rayzero.layout.model_layout import ModelLayout
from rayzero.lead.attempt import have, owing
from rayzero.protocol.messages import COMPUTE, MASTER, Write


@dataclass(eq=False)
class _WriteRequest:
    write: Write
    number: int
    futures: dict[int, Future[None]] = field(default_factory=dict)  # per rank that asked
    begun: bool = False
    asked: tuple[Future[None], ...] = ()  # owners, by index


class WriteRequests:
    """The write that ranks request, one at a time.

    Knows which rank requested what; not steps or owners. Only one thread at a time may call it."""

    def __init__(self) -> None:
        self._asked: _WriteRequest | None = None
        self._version = -1  # the version of the latest write
        self._made: list[Write] = []  # writes to that version
        self._asked_by: dict[int, int] = {}  # rank -> how many of them it has asked for

    def ask(self, rank: int, write: Write, layout: ModelLayout) -> Future[None]:
        """Note a rank's request. Raises StepMismatchError, naming both ranks, if another one requested something
        else."""
        self._enter(write.version)
        if self._is_made(rank, write):
            return settled(None)
        self._asked_by[rank] = len(self._made) + 1
        if self._asked is None:
            self._asked = _WriteRequest(write, len(self._made) + 1)
        asked = self._asked
        if write != asked.write or rank in asked.futures:
            raise _disagreement(rank, write, min(asked.futures, default=rank), asked.write, layout)
        return asked.futures.setdefault(rank, Future())

    def _is_made(self, rank: int, write: Write) -> bool:
        """Whether a write is one that was made after those which the rank has asked for. (A rank that has come back
        does not ask for what it finds published.)"""
        before = self._asked_by.get(rank, 0)
        if write not in self._made[before:]:
            return False
        self._asked_by[rank] = self._made.index(write, before) + 1
        return True

    def know(self, rank: int, write: Write) -> list[Future[None]]:
        """A rank has found what a write makes published: it is made, though a former life of the lead may have died
        before it said so. Returns the futures of the ranks that wait for it."""
        self._enter(write.version)
        if self._is_made(rank, write):
            return []
        self._asked_by[rank] = len(self._made) + 1
        asked = self._asked
        if asked is None or asked.write != write:
            self._made.append(write)
            return []
        return [] if asked.begun else self._made_now(asked)

    def _enter(self, version: int) -> None:
        if version != self._version:
            self._version, self._made, self._asked_by = version, [], {}

    def _made_now(self, asked: _WriteRequest) -> list[Future[None]]:
        self._asked = None
        self._made.append(asked.write)
        return list(asked.futures.values())

    def go_on(self, version: int, made: list[Write], asked_by: dict[int, int]) -> None:
        """Begin with what a former life of the lead has made. ``asked_by``: how many of them each rank has asked for
        and had."""
        self._version, self._made, self._asked_by = version, made, asked_by

    def forget(self, rank: int) -> None:
        """A rank has died: it will ask for the version's writes again."""
        self._asked_by.pop(rank, None)
        if self._asked is not None:
            self._asked.futures.pop(rank, None)
            if not self._asked.futures and not self._asked.begun:
                self._asked = None

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that wait for a write."""
        return frozenset(self._asked.futures) if self._asked is not None else frozenset()

    @property
    def making(self) -> bool:
        """Whether owners make the write now."""
        return self._asked is not None and self._asked.begun

    def begin(self, world_size: int) -> tuple[int, Write] | None:
        """(number, write) once all ranks have requested it; returned only once. Writes to one version are numbered from
        1."""
        asked = self._asked
        if asked is None or asked.begun or len(asked.futures) < world_size:
            return None
        asked.begun = True
        return asked.number, asked.write

    def told(self, owners: tuple[Future[None], ...]) -> None:
        """The write was sent to the owners. ``owners``: their answers, by index."""
        if self._asked is not None:
            self._asked.asked = owners

    def end(self) -> list[Future[None]]:
        """The write is done, or will never be; returns the futures of the ranks that requested it."""
        asked = self._asked
        if asked is not None and asked.begun:
            return self._made_now(asked)
        self._asked = None
        return list(asked.futures.values()) if asked is not None else []

    def describe(self, layout: ModelLayout) -> str:
        """A description of who requested what."""
        return f"{have(sorted(self.ranks))} {self.action(layout)}"

    def action(self, layout: ModelLayout) -> str:
        """A description of the requested write."""
        assert self._asked is not None
        write = self._asked.write
        return f"written to {_what(write, layout)} at step {write.version}"

    def waits_for(self, layout: ModelLayout, world_size: int) -> str:
        """The ranks or owners that the write waits for, for errors about waits."""
        missing = [rank for rank in range(world_size) if rank not in self.ranks]
        owners = () if self._asked is None else self._asked.asked
        return f"{self.describe(layout)}, {have(missing) if missing else owing(owners)} not"


def _what(write: Write, layout: ModelLayout) -> str:
    of = {COMPUTE: "", MASTER: "the masters of "}.get(write.kind, f"{write.kind} of ")
    return f"{of}{layout.units[write.unit].name!r}"


def _disagreement(rank: int, ours: Write, other: int, theirs: Write, layout: ModelLayout) -> StepMismatchError:
    both, step = f"rank {other} wrote to {_what(theirs, layout)}", f"at step {ours.version}"
    what = "other values" if _what(ours, layout) == _what(theirs, layout) else f"to {_what(ours, layout)}"
    return StepMismatchError(
        f"{both} and rank {rank} wrote {what} {step}; every rank must write the same values to the same parameters"
    )
