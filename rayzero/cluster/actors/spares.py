"""Processes that have imported what an owner needs, and wait to become the successor of one that dies."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from rayzero.cluster.run import Member

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Spare:
    actor: Any
    node: str  # node id
    member: Member | None = None  # once it has imported everything


class Spares:
    """The spare processes of one run, on the nodes of its owners.

    Knows actors that have no work yet; not who dies, or how one becomes an owner."""

    def __init__(self, number: int, nodes: Sequence[str], make: Callable[[int], tuple[Any, Sequence[Any]]]) -> None:
        """``number``: how many there shall be. ``nodes``: of each owner. ``make``: starts a process at the place of an
        owner (by index), and returns its actor and its calls, see ``calls``."""
        self._number, self._nodes, self._make = number, tuple(nodes), make
        self._spares: dict[str, _Spare] = {}
        self._made = 0
        self.calls: dict[Any, str] = {}  # for ``take``: one answers when a process is up, one when it has died

    @property
    def actors(self) -> list[Any]:
        return [spare.actor for spare in self._spares.values()]

    @property
    def members(self) -> list[Member]:
        return [spare.member for spare in self._spares.values() if spare.member is not None]

    def fill(self) -> None:
        """Start the missing ones, where the fewest are."""
        while len(self._spares) < self._number:
            there = Counter(spare.node for spare in self._spares.values())
            owner = min(range(len(self._nodes)), key=lambda index: there[self._nodes[index]])
            who = f"spare {self._made}"
            actor, calls = self._make(owner)
            self._spares[who] = _Spare(actor, self._nodes[owner])
            self.calls |= dict.fromkeys(calls, who)
            self._made += 1

    def take(self, call: Any) -> Member | None:
        """Take a call that has ended: the process that is up now, or None if it has died. A dead one is replaced by the
        next ``fill``, not at once: it may have died of what will kill the next one too."""
        who = self.calls.pop(call)
        try:
            answer: Member = ray.get(call)
        except ray.exceptions.RayError as error:
            if self._spares.pop(who, None) is not None:
                log.warning("%s died: %s", who, str(error).partition("\n")[0])
            return None
        if who not in self._spares:  # it has died since
            return None
        self._spares[who].member = replace(answer, who=who)
        return self._spares[who].member

    def give(self, node: str) -> Any:
        """A process of this node that is up, which is no spare any more; None: there is none."""
        for who, spare in self._spares.items():
            if spare.member is not None and spare.node == node:
                del self._spares[who]
                self.calls = {call: name for call, name in self.calls.items() if name != who}
                return spare.actor
        return None
