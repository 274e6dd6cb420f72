"""Whether the hosts of a run reach its owners, tried before the run, or an owner that joins, depends on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from rayzero.cluster.actors.calls import control
from rayzero.cluster.nodes.reachability import require_reached

__all__ = ["Listener", "ReachTrial", "Tries"]


@dataclass(frozen=True, slots=True)
class Listener:
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
    listeners: tuple[Listener, ...]


class ReachTrial:
    """Calls in which processes try to connect to owners. Once none is left, ``require`` says what came of them."""

    def __init__(self, tries: Iterable[Tries]) -> None:
        """Each owner is reached if its port for calls is, and that for tensors."""
        all_of = list(tries)
        self._owners = {to.address: to for each in all_of for to in each.listeners}
        self._tensors = {at: control(to.actor.tensor_address).remote(at) for at, to in self._owners.items()}
        self._calls: dict[Any, Tries] = {}
        for each in all_of:
            known = [to.address for to in each.listeners]
            call = control(each.actor.unreachable).remote(known, *(self._tensors[at] for at in known))
            self._calls[call] = each
        self._failed: dict[str, Mapping[str, str]] = {}

    @property
    def calls(self) -> dict[Any, str]:
        """Those that have not been taken, and who is to answer."""
        return {call: each.who for call, each in self._calls.items()}

    def take(self, call: Any) -> None:
        """One of ``calls`` has ended."""
        each = self._calls.pop(call)
        with suppress(ray.exceptions.RayError):  # somebody has died, which another call reports
            self._failed[each.host] = ray.get(call)

    def require(self) -> None:
        """Raise ConfigError, naming both ends, if a host does not reach an owner."""
        if not any(self._failed.values()):
            return
        owners = {at: to.who for at, to in self._owners.items()}
        tensors = {ray.get(call): self._owners[at].who for at, call in self._tensors.items()}
        require_reached(self._failed, owners, tensors)
