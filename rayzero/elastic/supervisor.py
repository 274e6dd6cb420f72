"""Carries out what the ``Controller`` decides, wherever a run's processes are.

What happens to processes comes as events. The controller answers each with actions, and a ``Processes`` starts, calls
and ends processes for them: on this machine (``rayzero/testing/rank_processes.py``) or on a cluster
(``cluster/upkeep/ray_processes.py``). Nothing here waits, so the order of events is all that a run depends on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rayzero.elastic.controller import Action, Controller, Run, Start
from rayzero.elastic.members import Process
from rayzero.elastic.reform import Abandon, Call, Join, Kill, Retire, Step
from rayzero.layout.shard_map import Rescale
from rayzero.protocol.ownership import Ownership, Prepared

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Serves:
    """A process that was started answers."""

    process: Process
    address: str = ""  # where an owner serves


@dataclass(frozen=True, slots=True)
class Answered:
    """A process has answered a call."""

    process: Process
    method: str
    result: Any = None
    refused: str | None = None  # why it cannot do what it was asked


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank's loop has returned or raised."""

    process: Process


@dataclass(frozen=True, slots=True)
class Died:
    """A process is gone, also one that never served."""

    process: Process
    counted: bool = False  # what killed it has been counted as a failure with another process's death


Event = Serves | Answered | Ended | Died


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
