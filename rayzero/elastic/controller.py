"""Decides who takes the place of a member that dies. Plain logic: no processes, no Ray, no clock.

A *member* of a run is a rank or an owner, a *life* is one process's time as that member, and an *epoch* is one state of
the routing table. The shell around a ``Controller`` tells it what has happened and carries out the actions that it
answers with: ``rayzero/testing/`` with threads and processes, ``cluster/`` with Ray actors.

A rank's loop is begun only while every owner has a process: it would look for the others at addresses where nobody is.
Everything else that waits for a new process waits by itself: ranks in their store calls, the lead with its next
decision. So deaths may come in any order and at any time, also those of new processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from rayzero.quantities import count


class Kind(StrEnum):
    """What a member is. The value is its name in messages."""

    RANK = "rank"
    OWNER = "optimizer"


@dataclass(frozen=True, slots=True, order=True)
class MemberId:
    """A member of a run, whichever process it is now."""

    kind: Kind
    index: int

    def __str__(self) -> str:
        return f"{self.kind} {self.index}"


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process as ``member``. Then call ``Controller.ready`` or ``Controller.died``."""

    member: MemberId
    life: int


@dataclass(frozen=True, slots=True)
class Lose:
    """Tell ``owners`` that ``rank`` has died and comes back in ``life``."""

    rank: int
    life: int
    owners: tuple[MemberId, ...]  # that run


@dataclass(frozen=True, slots=True)
class Connect:
    """Tell an owner that serves where all owners are. Then call ``Controller.connected``."""

    owner: int
    life: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Succeed:
    """Tell ``others`` that the successor of ``owner`` is at ``address``."""

    owner: int
    address: str
    epoch: int  # of the table with this address
    others: tuple[MemberId, ...]  # that run, or have been told an older table


@dataclass(frozen=True, slots=True)
class Run:
    """Begin the loop of a rank that is ready."""

    rank: int
    life: int
    addresses: tuple[str, ...]  # of the owners


Action = Start | Lose | Connect | Succeed | Run


class _State(Enum):
    STARTING = auto()  # its process does not answer yet
    CONNECTING = auto()  # an owner's process serves, but does not know the others
    READY = auto()  # a rank's process waits to begin
    RUNNING = auto()
    ENDED = auto()  # its loop has returned, or raised


@dataclass(slots=True)
class _Place:
    """A member's present process."""

    life: int = 0
    state: _State = _State.RUNNING


def wait_before_restart(restarts: int) -> float:
    """Seconds to wait before a run starts again from a checkpoint, for the ``restarts``-th time: 1, 2, 4 and so on, at
    most a minute."""
    return float(min(60, 2 ** (restarts - 1)))


def still_outlived(max_failures: int, outlived: int) -> str:
    """``"(2 more failures would be outlived)"``: the end of each line that tells of a failure."""
    return f"({count(max_failures - outlived, 'more failure')} would be outlived)"


class Controller:
    """Knows each member's life, the owners' addresses and how many failures may still be outlived; not processes.

    Begins when every member runs: owners in life 0, ranks in ``rank_life``."""

    def __init__(
        self,
        num_ranks: int,
        addresses: Sequence[str],
        *,
        max_failures: int,
        outlived: int = 0,
        bound: frozenset[MemberId] = frozenset(),
        rank_life: int = 0,
    ) -> None:
        """``addresses``: by owner. ``max_failures``: how many failures the run outlives in all; ``outlived``: how many
        it has outlived before. ``bound``: members whose states die with their process; after their death nobody can
        take their place. ``rank_life``: more than 0 in a run that continues another one."""
        self.addresses, self.epoch = tuple(addresses), 0
        self.max_failures, self.outlived = max_failures, outlived
        self.over: str | None = None  # why nobody takes the place of the last member that died
        self.exhausted = False  # because the run has outlived as many failures as it may
        self._bound = bound
        self._places = {MemberId(Kind.RANK, rank): _Place(rank_life) for rank in range(num_ranks)}
        self._places |= {MemberId(Kind.OWNER, owner): _Place() for owner in range(len(addresses))}

    def life(self, member: MemberId) -> int:
        """The present life of a member."""
        return self._places[member].life

    @property
    def running(self) -> tuple[MemberId, ...]:
        """The owners that serve, and the ranks whose loops have begun and not ended."""
        return tuple(member for member, place in self._places.items() if place.state is _State.RUNNING)

    @property
    def awaited(self) -> list[MemberId]:
        """The members whose new processes do not do their work yet."""
        begins = _State.STARTING, _State.CONNECTING
        return [member for member, place in self._places.items() if place.state in begins]

    def died(self, member: MemberId, life: int, *, counted: bool = False) -> list[Action]:
        """The process of a member has died, at any time. If the run does not outlive that, ``over`` says why.

        counted: what killed it has been counted as a failure with another member's death."""
        place = self._places[member]
        is_done = place.state is _State.ENDED and member not in self._bound  # else others may still need what it had
        if life != place.life or is_done or self.over is not None:
            return []
        self.over = None if counted else self.spend()
        if self.over is None and member in self._bound:
            self.over = "its part of the optimizer was in its own memory, so nobody can take its place"
        if self.over is not None:
            return []
        place.life, place.state = life + 1, _State.STARTING
        start = Start(member, place.life)
        if member.kind is Kind.OWNER:
            return [start]
        owners = tuple(other for other in self.running if other.kind is Kind.OWNER)
        return [Lose(member.index, place.life, owners), start]

    def spend(self) -> str | None:
        """Count one more failure. Returns why the run does not outlive it; None if it may."""
        if self.outlived < self.max_failures:
            self.outlived += 1
            return None
        self.exhausted = True
        if not self.max_failures:
            return "nobody takes its place (max_failures=0)"
        outlived = count(self.outlived, "failure")
        return f"it was one failure too many: the run has outlived {outlived} (max_failures={self.max_failures})"

    def ready(self, member: MemberId, life: int, address: str = "") -> list[Action]:
        """A new process answers. ``address``: where an owner serves."""
        place = self._places[member]
        if life != place.life or place.state is not _State.STARTING:
            return []
        if member.kind is Kind.RANK:
            place.state = _State.READY
            return self._begin()
        place.state = _State.CONNECTING
        self.epoch += 1
        self.addresses = (*self.addresses[: member.index], address, *self.addresses[member.index + 1 :])
        return [Connect(member.index, life, self.addresses)]

    def connected(self, owner: int, life: int) -> list[Action]:
        """An owner's successor knows all owners."""
        place = self._places[MemberId(Kind.OWNER, owner)]
        if life != place.life or place.state is not _State.CONNECTING:
            return []
        knows = _State.CONNECTING, _State.RUNNING
        others = tuple(m for m, other in self._places.items() if other.state in knows and other is not place)
        place.state = _State.RUNNING
        return [Succeed(owner, self.addresses[owner], self.epoch, others), *self._begin()]

    def _begin(self) -> list[Action]:
        """Begin the loops that are ready, if all owners have processes."""
        if any(member.kind is Kind.OWNER for member in self.awaited):
            return []
        begun: list[Action] = []
        for member, place in self._places.items():
            if place.state is _State.READY:
                place.state = _State.RUNNING
                begun.append(Run(member.index, place.life, self.addresses))
        return begun

    def ended(self, rank: int, life: int) -> None:
        """A rank's loop has returned or raised: its process is not replaced any more."""
        place = self._places[MemberId(Kind.RANK, rank)]
        if life == place.life:
            place.state = _State.ENDED
