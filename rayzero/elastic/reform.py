"""The change from one epoch of a run to the next, in which it has other owners. Plain logic: no processes, no clock.

::

    start     new processes start, while training goes on
    hold      the lead finishes what is decided, and decides nothing more; ranks go on computing, and wait at their step
    settle    owners apply and publish it
    prepare   the owners of the next epoch write down what they will take over, and get what is on other hosts; nothing
              has changed yet
    let stand the new lead notes that the next epoch stands
    enter     old owners end all calls, new ones serve
    change    ranks go over to the new owners, ask again what they had no answer to, and training goes on

Before the point of no return, a failure leaves everything as it was. After it, a member that fails is replaced in the
next epoch. (The protocol follows view changes of replicated systems: a table with a number, and one atomic record.)

[Note: the point of no return] is where the new lead is *asked* to let the next epoch stand, not where it answers. If it
dies in between, nobody knows whether it has, so there is only one way that is right in both cases: the next epoch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from rayzero.elastic.members import Process
from rayzero.layout.shard_map import Rescale
from rayzero.protocol.ownership import Ownership


class Step(StrEnum):
    """What is done. From HOLD to ENTER, the value is the method of ``OwnerServer`` to call; for CHANGE it is
    ``OwnerTable.go_over``."""

    START = "start"
    HOLD = "hold"
    SETTLE = "settle"
    PREPARE = "prepare"
    LET_STAND = "let_stand"
    ENTER = "enter"
    CHANGE = "change"


@dataclass(frozen=True, slots=True)
class Call:
    """Call a method of processes, side by side. What they answer to ``connect_peers`` or a step goes to
    ``Controller.connected``, ``answered`` or ``refused``; nothing depends on answers to other methods:

    - ``lose``: a rank has died, and comes back in a life
    - ``succeed``: an owner's successor is at an address. A rank that is asked to ``CHANGE`` must take this before it
      answers: it may wait for that successor
    - ``abandon``: the next epoch does not begin; also once more to an owner that has only now done what it was asked
      before"""

    processes: tuple[Process, ...]
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Join:
    """Start a process that becomes its member in the next epoch; until then, another process may be that member. Then
    call ``Controller.ready`` or ``Controller.died``."""

    process: Process
    ownership: Ownership


@dataclass(frozen=True, slots=True)
class Abandon:
    """The next epoch does not begin: tell ``owners``, and end the processes of ``joined``."""

    owners: tuple[Process, ...]
    joined: tuple[Process, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a process that cannot go on into the next epoch. Then call ``Controller.died``."""

    process: Process
    why: str


@dataclass(frozen=True, slots=True)
class Retire:
    """The change is over: end the processes of owners that have no shards any more."""

    processes: tuple[Process, ...]


Action = Call | Join | Abandon | Kill | Retire


@dataclass(slots=True)
class Reform:
    """One change, from the first new process until ranks have gone over.

    Knows steps, and who has answered or is gone; not what else members do, or who takes their places."""

    before: Ownership
    change: Rescale
    old: tuple[Process, ...]  # the owners before, but for those beside ranks
    addresses: tuple[str, ...]  # of all owners before, those beside ranks last
    joining: tuple[Process, ...]  # owners that are new
    beside: tuple[Process, ...] = ()  # owners beside ranks: the same before and after
    step: Step = Step.START
    missing: set[Process] = field(default_factory=set)  # that have not answered
    _gone: set[Process] = field(default_factory=set)  # that have died
    _joined: dict[Process, str] = field(default_factory=dict)  # owner that joins -> its address
    _specs: dict[int, bytes] = field(default_factory=dict)  # by model
    _leads: set[Process] = field(default_factory=set)  # that lead a model in the next epoch

    @property
    def after(self) -> Ownership:
        return self.before.then(self.change)

    @property
    def stands(self) -> bool:
        """Whether the point of no return is behind. [Note: the point of no return]"""
        return self.step in (Step.LET_STAND, Step.ENTER, Step.CHANGE)

    @property
    def entered(self) -> bool:
        """Whether all owners that live are in the next epoch."""
        return self.step is Step.CHANGE or (self.step is Step.ENTER and not self.missing)

    @property
    def over(self) -> bool:
        return self.step is Step.CHANGE and not self.missing

    @property
    def new(self) -> tuple[Process, ...]:
        joining = {process.member.index: process for process in self.joining}
        return tuple(joining.get(index) or self.old[index] for index in range(len(self.change.former)))

    @property
    def parting(self) -> tuple[Process, ...]:
        return tuple(process for process in self.old if process not in self.new)

    @property
    def new_addresses(self) -> tuple[str, ...]:
        """The owners' addresses after the change, once all new processes serve."""
        known = dict(zip((*self.old, *self.beside), self.addresses, strict=True)) | self._joined
        return tuple(known[process] for process in (*self.new, *self.beside))

    def begin(self) -> list[Action]:
        if not self.joining:
            return self._go(Step.HOLD, (*self.old, *self.beside))
        self.missing = set(self.joining)
        return [Join(process, self.after) for process in self.joining]

    def serves(self, owner: Process, address: str) -> list[Action]:
        if self.step is not Step.START or owner not in self.missing:
            return []
        self._joined[owner] = address
        self.missing.discard(owner)
        return [] if self.missing else self._go(Step.HOLD, (*self.old, *self.beside))

    def answered(self, process: Process, step: Step, answer: Any) -> list[Action]:
        if step is not self.step or process not in self.missing:
            return []
        self.missing.discard(process)
        if step is Step.SETTLE and answer:
            self._specs.update(answer)
        elif step is Step.PREPARE and answer:
            self._leads.add(process)
        return [] if self.missing else self._next()

    def gone(self, process: Process) -> list[Action]:
        """A process has died behind the point of no return, or is a rank whose loop has ended: expect nothing of it."""
        self._gone.add(process)
        if process not in self.missing:
            return []
        self.missing.discard(process)
        return [] if self.missing else self._next()

    def go_over(self, ranks: Iterable[Process], addresses: tuple[str, ...]) -> list[Action]:
        """Ask the ranks that run to go over to the owners at ``addresses``: all have entered, and serve."""
        return self._go(Step.CHANGE, ranks, addresses, self.after)

    def _next(self) -> list[Action]:
        match self.step:
            case Step.HOLD:
                return self._go(Step.SETTLE, (*self.old, *self.beside))
            case Step.SETTLE:
                return self._go(Step.PREPARE, (*self.new, *self.beside), self.after, self._specs, self.addresses)
            case Step.PREPARE:
                return self._go(Step.LET_STAND, sorted(self._leads))
            case Step.LET_STAND:
                return self._go(Step.ENTER, (*self.old, *self.joining, *self.beside), self.after, self.new_addresses)
            case _:  # the supervisor decides when each rank and owner goes over
                return []

    def _go(self, step: Step, processes: Iterable[Process], *arguments: Any) -> list[Action]:
        asked = tuple(process for process in processes if process not in self._gone)
        self.step, self.missing = step, set(asked)
        return [Call(asked, step, arguments)] if asked else self._next()


def resolved(change: Rescale, before: Ownership) -> Rescale | None:
    """A change that was asked for when there were other owners, as seen from those ``before``; None: it changes
    nothing."""
    num_owners, doors = before.num_owners, len(before.door_numbers)
    there = tuple(i if was is not None and i < num_owners else None for i, was in enumerate(change.former))
    return None if (there, change.doors) == (tuple(range(num_owners)), doors) else Rescale(there, change.doors)


Host = TypeVar("Host", bound=Hashable)


def hosts_without_owner(ranks: Iterable[Host], owners: Iterable[Host]) -> list[Host]:
    """The hosts that get a door, in the order of their first ranks. ``ranks``, ``owners``: the host of each."""
    there = set(owners)
    return [host for host in dict.fromkeys(ranks) if host not in there]


def with_doors(
    change: Rescale, owners: Sequence[Host], *, ranks: Iterable[Host], there: Sequence[Host], before: Ownership
) -> tuple[Rescale, dict[int, Host]]:
    """A change of the owners with shards, and the doors that it takes. Returns the whole change, and by number the host
    of each door that joins. ``owners``: the host of each owner with shards after it, ``there``: of each owner
    ``before`` it.

    A door that is needed on its host stays if its number is that of a door afterwards. It never gets shards: it was
    placed with few CPUs; and an owner that parts with its shards ends, so that its CPUs are free for others."""
    needed = hosts_without_owner(ranks, owners)
    numbers = range(len(owners), len(owners) + len(needed))
    stay = {door: there[door] for door in numbers if door in before.door_numbers and there[door] in needed}
    joining = [door for door in numbers if door not in stay]
    left = [host for host in needed if host not in stay.values()]
    former = [was if was is not None and was < before.num_optimizers else None for was in change.former]
    doors = [door if door in stay else None for door in numbers]
    return Rescale((*former, *doors), len(doors)), dict(zip(joining, left, strict=True))
