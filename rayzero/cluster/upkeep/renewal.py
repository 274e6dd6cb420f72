"""Gives the processes of a run new certificates while it goes on.

[Note: certificates that end] The authority's key stays with the driver, so only it can renew. It looks once a minute;
when a third of the certificates' life is over (or a user's files have changed) it issues new ones to everybody. Who has
them shows them from its next connection on, and connections that are open live on: no call notices. Who does not take
its own is asked again each minute, for the hours that its present one still lasts. A process that takes a dead one's
place, or joins, gets a fresh one at its start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

import ray

from rayzero.cluster.actor_calls import failure_from_ray
from rayzero.cluster.run_actors import RunActors
from rayzero.errors import ConfigError, RayZeroError

LOOK_S = 60.0  # between two looks, and between two tries

log = logging.getLogger(__name__)


class Renewal:
    """Knows who has still to take what is newest; not what certificates say."""

    def __init__(
        self,
        actors: RunActors,
        *,
        say: Callable[[str], None],
        others: Mapping[str, Callable[[], None]] | None = None,
    ) -> None:
        """``say``: called with what does not work, and once with certificates that may end before the run. ``others``:
        by name, what tells those who are no members."""
        self._actors, self._say, self._others = actors, say, dict(others or {})
        self._looked = monotonic()
        self._owed: set[str] = set()
        self._asked: dict[Any, str] = {}  # call -> who
        self._problem: str | None = None  # with the user's files, at the last look
        self._said: set[str] = set()
        self._warn()

    def act(self) -> None:
        """Take answers and, once a minute, see whether there is something to renew. Does not wait."""
        self._take_answers()
        if monotonic() - self._looked >= LOOK_S:
            self._looked = monotonic()
            self._look()

    def _look(self) -> None:
        if self._refreshed():
            self._owed = {*self._actors.everybody, *self._others}
            self._asked.clear()  # their answers would be about older ones
            self._said.clear()
        self._warn()
        for who in sorted(self._owed):
            if who in self._others:
                self._tell_other(who)
            elif who not in self._actors.everybody:
                self._owed.discard(who)  # it has parted
            elif who in self._asked.values():
                self._tell(f"{who} has not answered for {LOOK_S:g} s whether it takes its new certificate")
            else:
                self._asked[self._actors.renew(who)] = who

    def _refreshed(self) -> bool:
        try:
            refreshed, self._problem = self._actors.certificates.refresh(), None
        except ConfigError as error:
            before, self._problem = self._problem, str(error)
            if before is not None:  # else somebody may be about to write the second of two files
                self._tell(f"certificates cannot be renewed: {error}")
            return False
        return refreshed

    def _warn(self) -> None:
        for warning in self._actors.certificates.warnings:
            self._tell(warning)

    def _tell_other(self, who: str) -> None:
        try:
            self._others[who]()
            self._owed.discard(who)
        except (RayZeroError, ray.exceptions.RayError) as error:
            self._tell(f"{who} cannot get new certificates: {error}; it is tried again each minute")

    def _take_answers(self) -> None:
        ready, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0) if self._asked else ([], [])
        for call in ready:
            who = self._asked.pop(call)
            try:
                ray.get(call)
                self._owed.discard(who)
            except ray.exceptions.RayActorError:
                self._owed.discard(who)  # it is dead: who takes its place begins with a new one
            except ray.exceptions.RayError as error:
                what = failure_from_ray(who, error, None).what
                self._tell(f"{who} does not take its new certificate: {what}; it is asked again each minute")
        if ready and not self._owed:
            log.info("everybody has new certificates")

    def _tell(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._say(what)
