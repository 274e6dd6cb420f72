"""Decides who takes the place of a member that dies. Plain logic: no processes, no Ray, no clock.

A *member* of a run is a rank or an owner, a *life* is one process's time as that member, and an *epoch* is one state of
the routing table. The shell around a ``Controller`` tells it what has happened and carries out the actions that it
answers with: a ``Supervisor``, through ``Processes`` on this machine (``testing/rank_processes.py``) or on a cluster
(``cluster/upkeep/ray_processes.py``). Nothing here waits, so the order of events is all that a run depends on.

A rank's loop is begun only while every owner has a process: it would look for the others at addresses where nobody is.
Everything else that waits for a new process waits by itself: ranks in their store calls, the lead with its next
decision. So deaths may come in any order and at any time, also those of new processes.

A change of the owners (elastic/reform.py) begins when every member does its work. An owner's death before the point of
no return ends it, and it is tried again once that owner is replaced. After that point, members are those of the next
epoch. One that dies before all owners have entered it is replaced when they have; and ranks go over once every owner
serves, since they shake hands with all of them. A rank's loop is not begun between that point and the end.

[Note: late answers] An attempt that is abandoned leaves questions open, and an owner may carry out ``Abandon`` before
what it was asked earlier. So a member that answers late gets ``Abandon`` once more, and no other attempt begins before
all have answered or died: an answer always belongs to the only attempt that there is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from rayzero.elastic import reform
from rayzero.elastic.members import Answered, Died, Ended, Event, MemberId, MemberKind, Process, Serves
from rayzero.elastic.reform import Abandon, Call, Join, Kill, Reform, Retire, Step
from rayzero.errors import ConfigError
from rayzero.layout.shard_map import Rescale
from rayzero.protocol.ownership import Ownership, Prepared
from rayzero.quantities import count

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process in its member's place. Then call ``Controller.ready`` or ``Controller.died``."""

    process: Process


@dataclass(frozen=True, slots=True)
class Run:
    """Begin the loop of a rank that is ready."""

    rank: Process
    addresses: tuple[str, ...]  # of the owners


Action = Start | Run | reform.Action


class _State(Enum):
    DEAD = auto()  # no process takes its place yet
    STARTING = auto()  # its process does not answer yet
    CONNECTING = auto()  # an owner's process serves, but does not know the others
    READY = auto()  # a rank's process waits to begin
    RUNNING = auto()
    ENDED = auto()  # its loop has returned, or raised


@dataclass(slots=True)
class _Place:
    """A member's present process; of a dead member, its next one."""

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

    Begins when every member runs: owners in life 0, ranks in ``rank_life``. ``over`` may be set by each call that takes
    an event."""

    def __init__(
        self,
        num_ranks: int,
        addresses: Sequence[str],
        *,
        max_failures: int,
        outlived: int = 0,
        bound: frozenset[MemberId] = frozenset(),
        rank_life: int = 0,
        beside: int = 0,
        ownership: Ownership | None = None,
    ) -> None:
        """``addresses``: by owner; the last ``beside`` are of those beside ranks. ``max_failures``: how many failures
        the run outlives in all; ``outlived``: how many it has outlived before. ``bound``: members whose states die with
        their process; after their death nobody can take their place. ``rank_life``: more than 0 in a run that continues
        another one. ``ownership``: who owns what; None: it is the run's first epoch, without doors."""
        self.addresses = tuple(addresses)
        on_host = len(self.addresses) - beside
        self.ownership = ownership or Ownership(on_host)
        self._wanted: Rescale | None = None  # the change that is asked for and has not begun
        self._reform: Reform | None = None  # the one under way
        self._unanswered: set[tuple[Process, Step]] = set()  # of attempts that are abandoned. [Note: late answers]
        self.max_failures, self.outlived = max_failures, outlived
        self.over: str | None = None  # why nobody takes the place of the last member that died
        self.exhausted = False  # because the run has outlived as many failures as it may
        self._bound = bound
        self._places = {MemberId(MemberKind.RANK, rank): _Place(rank_life) for rank in range(num_ranks)}
        self._places |= {MemberId(MemberKind.OWNER, owner): _Place() for owner in range(on_host)}
        self._places |= {MemberId(MemberKind.BESIDE, rank): _Place() for rank in range(beside)}
        self._lives = {member: place.life for member, place in self._places.items()}  # the last one of each so far

    def life(self, member: MemberId) -> int:
        return self._places[member].life

    def last_life(self, member: MemberId) -> int:
        """The last life of a member so far, also of one that is to join; -1 if there has been none."""
        return self._lives.get(member, -1)

    @property
    def running(self) -> tuple[MemberId, ...]:
        """The owners that serve, and the ranks whose loops have begun and not ended."""
        return tuple(member for member, place in self._places.items() if place.state is _State.RUNNING)

    @property
    def awaited(self) -> list[MemberId]:
        """The members whose new processes do not do their work yet."""
        begins = _State.DEAD, _State.STARTING, _State.CONNECTING
        return [member for member, place in self._places.items() if place.state in begins]

    # ---- deaths

    def died(self, process: Process, *, counted: bool = False) -> list[Action]:
        """The process of a member has died, at any time. If the run does not outlive that, ``over`` says why.

        counted: what killed it has been counted as a failure with another member's death."""
        member, change = process.member, self._reform
        if change is not None and not change.stands and process in change.joining:
            return [*self._give_up_joining(process, counted=counted), *self._go_on()]
        place = self._place_of(process)
        if place is None:  # old news, or an owner that has no shards any more
            return [*self._expect_nothing(process), *self._go_on()]
        is_done = place.state is _State.ENDED and member not in self._bound  # else others may still need what it had
        if is_done or place.state is _State.DEAD or self.over is not None:
            return []
        self.over = None if counted else self.spend()
        if self.over is None and member in self._bound:
            self.over = "its part of the optimizer was in its own memory, so nobody can take its place"
        if self.over is not None:
            return []
        place.life, place.state = self._next_life(member), _State.DEAD
        self._unanswered = {late for late in self._unanswered if process not in late}
        if change is not None and not change.stands and member.kind is MemberKind.OWNER:
            return [self._abandon(f"{member} has died", again=True), *self._go_on()]
        return [*self._expect_nothing(process), *self._go_on()]

    def spend(self) -> str | None:
        """Count one more failure. Returns why the run does not outlive it; None if it may."""
        why = self._why_too_many()
        if why is None:
            self.outlived += 1
        else:
            self.exhausted = True
        return why

    def _why_too_many(self) -> str | None:
        if self.outlived < self.max_failures:
            return None
        if not self.max_failures:
            return "nobody takes its place (max_failures=0)"
        outlived = count(self.outlived, "failure")
        return f"it was one failure too many: the run has outlived {outlived} (max_failures={self.max_failures})"

    def _replace(self) -> list[Action]:
        actions: list[Action] = []
        for member, place in self._places.items():
            if place.state is _State.DEAD:
                place.state = _State.STARTING
                if member.kind is MemberKind.RANK:
                    owners = self._present(other for other in self.running if other.kind is not MemberKind.RANK)
                    actions.append(Call(owners, "lose", (member.index, place.life)))
                actions.append(Start(Process(member, place.life)))
        return actions

    # ---- new processes

    def ready(self, process: Process, address: str = "") -> list[Action]:
        """A new process answers. ``address``: where an owner serves."""
        if self._reform is not None and process in self._reform.joining and not self._reform.stands:
            return [*self._reform.serves(process, address)]
        place, owner = self._place_of(process), process.member.index
        if place is None or place.state is not _State.STARTING:
            return []
        if process.member.kind is MemberKind.RANK:
            place.state = _State.READY
            return self._go_on()
        place.state = _State.CONNECTING
        self.addresses = (*self.addresses[:owner], address, *self.addresses[owner + 1 :])
        return [Call((process,), "connect_peers", (self.addresses,))]

    def connected(self, process: Process) -> list[Action]:
        """An owner's successor knows all owners."""
        place, owner = self._place_of(process), process.member.index
        if place is None or place.state is not _State.CONNECTING:
            return []
        knows = _State.CONNECTING, _State.RUNNING
        others = [m for m, other in self._places.items() if other.state in knows and other is not place]
        if self._reform is not None and self._reform.step is Step.ENTER:  # ranks hear of all owners when they go over
            others = [member for member in others if member.kind is not MemberKind.RANK]
        place.state = _State.RUNNING
        told = Call(self._present(others), "succeed", (owner, self.addresses[owner]))
        return [told, *self._go_on()]

    def ended(self, rank: Process) -> list[Action]:
        """A rank's loop has returned or raised: its process is not replaced any more."""
        place = self._place_of(rank)
        if place is None:
            return []
        place.state = _State.ENDED
        return [*self._expect_nothing(rank), *self._go_on()]

    def _begin(self) -> list[Action]:
        begun: list[Action] = []
        for member, place in self._places.items():
            if place.state is _State.READY:
                place.state = _State.RUNNING
                begun.append(Run(Process(member, place.life), self.addresses))
        return begun

    def _go_on(self) -> list[Action]:
        """Do what nothing stands in the way of any more."""
        if self.over is not None:
            return []
        actions: list[Action] = []
        if self._reform is None or not self._reform.stands or self._reform.entered:
            actions += self._replace()
        all_serve = not any(member.kind is MemberKind.OWNER for member in self.awaited)
        if self._reform is not None and self._reform.entered:
            actions += self._go_over(self._reform, all_serve=all_serve)
        if all_serve and (self._reform is None or not self._reform.stands):  # the lead may wait for a rank to be heard
            actions += self._begin()
        if all_serve and self._reform is None:
            actions += self._begin_change()
        return actions

    # ---- other owners

    @property
    def changes(self) -> bool:
        """Whether the owners are to change, or are changing."""
        return self._wanted is not None or self._reform is not None

    @property
    def coming(self) -> Ownership:
        """Who owns what once the change that is under way is over."""
        return self.ownership if self._reform is None or self._reform.stands else self._reform.after

    def readdress(self, addresses: Sequence[str]) -> None:
        """The owners can be reached at these addresses too, also from other nodes. Ranks learn of them with the next
        change."""
        self.addresses = tuple(addresses)

    def scale(self, change: Rescale | None) -> list[Action]:
        """Change the owners, once every member does its work and a change that is under way is over; instead of one
        that has not begun yet. ``change``: as seen from the owners that are ``coming``, whose numbers stay; None: they
        stay as they are. Raises ConfigError if an owner is to get another number, which no process can."""
        for index, former in enumerate(change.former) if change is not None else ():
            if former is not None and former != index:
                raise ConfigError(
                    f"optimizer {former} cannot become optimizer {index}: name it in its own place, or not"
                )
        self._wanted = change
        return self._go_on()

    def _begin_change(self) -> list[Action]:
        if self._wanted is None or self._unanswered or self.awaited:
            return []
        on_host = self.ownership.num_owners
        change, self._wanted = reform.resolved(self._wanted, self.ownership), None
        if change is None:
            return []
        new = [MemberId(MemberKind.OWNER, index) for index, former in enumerate(change.former) if former is None]
        self._reform = Reform(
            before=self.ownership,
            change=change,
            old=self._present(MemberId(MemberKind.OWNER, index) for index in range(on_host)),
            addresses=self.addresses,
            joining=tuple(Process(member, self._next_life(member)) for member in new),
            beside=self._present(member for member in self._places if member.kind is MemberKind.BESIDE),
        )
        return [*self._reform.begin()]

    def answered(self, process: Process, step: Step, answer: object = None) -> list[Action]:
        """A process has taken a step that was asked of it."""
        if (process, step) in self._unanswered:
            return self._take_late(process, step)
        change = self._reform
        if change is None:
            return []
        stood = change.stands
        actions = change.answered(process, step, answer)
        if change.stands and not stood:
            self._enter(change)
        return [*actions, *self._go_on()]

    def refused(self, process: Process, step: Step, why: str) -> list[Action]:
        """A process cannot do what was asked of it, or cannot be started (``START``). Before the point of no return the
        change is given up for good; after it, the process belongs to no epoch, and has to die."""
        if (process, step) in self._unanswered:
            return self._take_late(process, step)
        change = self._reform
        if change is None or change.step is not step or process not in change.missing:
            return []
        if change.stands:
            return [Kill(process, why)]
        change.missing.discard(process)
        return [self._abandon(f"{process}: {why}", again=False), *self._go_on()]

    def _take_late(self, process: Process, step: Step) -> list[Action]:
        """[Note: late answers]"""
        self._unanswered.discard((process, step))
        return [Call((process,), "abandon"), *self._go_on()]

    def _give_up_joining(self, process: Process, *, counted: bool) -> list[Action]:
        """A process that was to join has died: nobody needs it yet, so the run goes on in any case."""
        why = None if counted else self._why_too_many()
        if why is None and not counted:
            self.outlived += 1
        return [self._abandon(f"{process} has died" + (f": {why}" if why else ""), again=why is None)]

    def _abandon(self, why: str, *, again: bool) -> Action:
        """Stay in this epoch. ``again``: the change is tried once more, unless another one is asked for by now."""
        change, self._reform = self._reform, None
        assert change is not None
        asked = (*change.old, *change.beside) if change.step is not Step.START else ()
        owners = tuple(process for process in asked if process.member in self.running)
        self._unanswered = {(process, change.step) for process in change.missing if process in owners}
        if again and self._wanted is None:
            self._wanted = change.change
        return Abandon(owners, change.joining, why)

    def _enter(self, change: Reform) -> None:
        for process in (*change.parting, *change.joining):
            self._places.pop(process.member, None)
        self._places |= {process.member: _Place(process.life) for process in change.joining}
        self.addresses, self.ownership = change.new_addresses, change.after

    def _go_over(self, change: Reform, *, all_serve: bool) -> list[Action]:
        """Let ranks go over, and end the change when they have."""
        actions: list[Action] = []
        if change.step is Step.ENTER and all_serve:
            ranks = self._present(member for member in self.running if member.kind is MemberKind.RANK)
            actions += change.go_over(ranks, self.addresses)
        if change.over:
            self._reform = None
            actions.append(Retire(change.parting))
        return actions

    def _expect_nothing(self, process: Process) -> list[Action]:
        return [] if self._reform is None else [*self._reform.gone(process)]

    def _next_life(self, member: MemberId) -> int:
        """A new one: also processes that were to join and never did had one."""
        self._lives[member] = self.last_life(member) + 1
        return self._lives[member]

    def _place_of(self, process: Process) -> _Place | None:
        """None: it has none, or another process has it now."""
        place = self._places.get(process.member)
        return place if place is not None and place.life == process.life else None

    def _present(self, members: Iterable[MemberId]) -> tuple[Process, ...]:
        return tuple(Process(member, self._places[member].life) for member in members)


# ---- what carries the decisions out ----------------------------------------------------------------------------------


class Processes(Protocol):
    """The processes of a run. What comes of a method follows as events; none is ever about a process that nobody
    started."""

    def start(self, process: Process, ownership: Ownership) -> None:
        """Start a process in the place of a dead one; ``Serves`` or ``Died`` follows. ``ownership``: who owns what."""

    def join(self, process: Process, ownership: Ownership, addresses: Sequence[str]) -> None:
        """Start a process that is an owner in the epoch of ``ownership``, and none before; ``Serves``, ``Died`` or a
        refusal to ``Step.START`` follows. ``addresses``: of the owners before."""

    def run(self, rank: Process, addresses: Sequence[str], ownership: Ownership) -> None:
        """Begin the loop of a rank; ``Ended`` or ``Died`` follows. ``addresses``: of the owners."""

    def call(self, processes: Sequence[Process], method: str, *arguments: Any) -> None:
        """Call a method of ``OwnerServer`` or ``OwnerTable`` side by side; ``Answered`` follows from each process that
        lives. A step of a change may be answered late; other calls that a process has got are done in their order."""

    def kill(self, processes: Sequence[Process]) -> None:
        """Kill processes; ``Died`` may follow from each."""

    def end(self, process: Process) -> None:
        """Let the process of an owner end that has no shards any more; its ``Died`` says nothing."""


class Supervisor:
    """Passes events to a ``Controller`` and its actions to ``Processes``."""

    def __init__(self, controller: Controller, processes: Processes) -> None:
        self.controller, self._processes = controller, processes

    def take(self, event: Event) -> list[Action]:
        """Do what follows from an event. Returns what was done, in order; nothing once ``controller.over``."""
        return self._perform(self._decided(event))

    def scale(self, change: Rescale | None) -> list[Action]:
        """Change the owners; see ``Controller.scale``. Returns what was done."""
        return self._perform(self.controller.scale(change))

    def _decided(self, event: Event) -> list[Action]:
        controller = self.controller
        match event:
            case Serves(process, address):
                return controller.ready(process, address)
            case Ended(process):
                return controller.ended(process)
            case Died(process, counted):
                return controller.died(process, counted=counted)
            case Answered(process, "connect_peers", _, refused):
                if refused is None:
                    return controller.connected(process)
                log.warning("%s does not know the other owners, and is killed: %s", process, refused)
                self._processes.kill((process,))
                return []
            case Answered(process, method, result, refused) if method in list(Step):
                if refused is not None:
                    return controller.refused(process, Step(method), refused)
                answer = result.leads if isinstance(result, Prepared) else result
                return controller.answered(process, Step(method), answer)
            case _:  # nothing depends on the answers of others
                return []

    def _perform(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            self._do(action)
        return actions

    def _do(self, action: Action) -> None:
        processes, ownership, addresses = self._processes, self.controller.ownership, self.controller.addresses
        match action:
            case Start(process):
                processes.start(process, ownership)
            case Run(rank, its_owners):
                processes.run(rank, its_owners, ownership)
            case Call(asked, method, arguments):
                processes.call(asked, method, *arguments)
            case Join(process, after):
                processes.join(process, after, addresses)
            case Abandon(owners, joined, _):
                processes.call(owners, "abandon")
                processes.kill(joined)  # at once: nobody takes what it has prepared for that of a living process
            case Kill(process, why):
                log.warning("%s cannot go on with other owners and is killed: %s", process, why)
                processes.kill((process,))
            case Retire(parting):
                for process in parting:
                    processes.end(process)
