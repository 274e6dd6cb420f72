"""Whether the hosts of a run reach its owners, tried before the run, or an owner that joins, depends on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray

from rayzero.cluster.actors.actor_calls import control
from rayzero.cluster.nodes.reachability import require_reached
from rayzero.cluster.supervision import failure_of
from rayzero.errors import ConfigError

_DEATHS = (  # of a process, or of its node
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ObjectLostError,
)


@dataclass(frozen=True, slots=True)
class ReachTarget:
    """An owner that is to be reached."""

    who: str
    address: str
    actor: Any


@dataclass(frozen=True, slots=True)
class Tries:
    """A process that connects to owners, for all of its host."""

    who: str
    host: str
    actor: Any
    listeners: tuple[ReachTarget, ...]


class ReachTrial:
    """Calls in which processes try to connect to owners. Once none is left, ``require`` says what came of them.

    Owners say their ports for tensors first. Ray sends an actor its calls in order: a try that waited for a port would
    hold up every later call to that actor."""

    def __init__(self, tries: Iterable[Tries]) -> None:
        """Each owner is reached if its port for calls is, and that for tensors."""
        self._tries = list(tries)
        owners = {to.address: to for each in self._tries for to in each.listeners}
        self._owners = {at: to.who for at, to in owners.items()}
        self._asked = {control(to.actor.tensor_address).remote(at): to for at, to in owners.items()}
        self._tensors: dict[str, str] = {}  # address of an owner that has answered -> that for tensors
        self._calls: dict[Any, Tries] = {}
        self._failed: dict[str, dict[str, str]] = {}  # host -> address -> why
        self._raised: list[str] = []  # who could not try or be tried, and why

    @property
    def calls(self) -> dict[Any, str]:
        """Those that have not been taken, and who is to answer."""
        return {call: each.who for each_of in (self._asked, self._calls) for call, each in each_of.items()}

    def take(self, call: Any) -> None:
        if call in self._asked:
            owner = self._asked.pop(call)
            if self._has_answer(call, owner.who):
                self._tensors[owner.address] = ray.get(call)
            if not self._asked:
                self._begin()
        else:
            each = self._calls.pop(call)
            if self._has_answer(call, each.who):
                self._failed.setdefault(each.host, {}).update(ray.get(call))  # a host may have several nodes

    def _begin(self) -> None:
        for each in self._tries:
            answered = [to.address for to in each.listeners if to.address in self._tensors]
            tensors = [self._tensors[at] for at in answered]
            self._calls[control(each.actor.unreachable).remote([*answered, *tensors])] = each

    def _has_answer(self, call: Any, who: str) -> bool:
        """Whether the call has returned a value. Keeps what it has raised; another call reports a death."""
        try:
            ray.get(call)
        except ray.exceptions.RayError as error:
            if not isinstance(error, _DEATHS):
                raised = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
                self._raised.append(f"{who} {failure_of(who, raised).what}")
            return False
        return True

    def require(self) -> None:
        """Raise ConfigError, naming both ends, if a host does not reach an owner, or a process could not try."""
        tensors = {at: self._owners[owner] for owner, at in self._tensors.items()}
        require_reached(self._failed, self._owners, tensors)
        if self._raised:
            raise ConfigError(f"it is not known whether all hosts reach all optimizers: {self._raised[0]}; ask again")
