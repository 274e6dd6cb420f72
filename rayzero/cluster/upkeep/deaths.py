"""Deaths of a run's processes, from the first word of one until another process has taken the place.

[Note: two witnesses] Ray reports a death from any node, with a reason, but not at once, and not when it happened. The
kernel reports it at once, to a pidfd, but only of processes on the driver's node. So a death counts from the first
word, its moment is known only where the kernel saw it, and Ray's words describe it if they have come by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import monotonic

from rayzero.cluster.run import Recovery
from rayzero.cluster.supervision import Failure, death_of
from rayzero.concurrency.processes import process_with, watch_process
from rayzero.elastic.members import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A process that has died."""

    failure: Failure
    since: float  # monotonic seconds: when it happened if it was ``seen``, else when Ray told of it
    seen: bool  # by the kernel


class Deaths:
    """Deaths that nobody has acted on. Each waits until it is ``calm_s`` old.

    Knows names; not processes, Ray or a clock (callers pass monotonic seconds)."""

    def __init__(self, calm_s: float) -> None:
        self._calm_s = calm_s
        self._known: dict[str, Death] = {}

    def told(self, failure: Failure, now: float) -> None:
        """Ray reports that a process has died."""
        known = self._known.get(failure.who)
        since, seen = (known.since, known.seen) if known is not None else (now, False)
        self._known[failure.who] = Death(failure=failure, since=since, seen=seen)

    def saw(self, who: str, pid: int, at: float) -> None:
        """The kernel has reported that a process died at ``at``."""
        known = self._known.get(who)
        failure = known.failure if known is not None else death_of(who, pid, "")
        self._known[who] = Death(failure=failure, since=at, seen=True)

    def patience_s(self, now: float) -> float | None:
        """Seconds until ``take`` returns a death; None: it will not."""
        return min((max(0.0, death.since + self._calm_s - now) for death in self._known.values()), default=None)

    def take(self, now: float) -> list[Death]:
        """The deaths that are old enough, the oldest first; they are acted on now."""
        calm = [death for death in self._known.values() if now - death.since >= self._calm_s]
        for death in calm:
            del self._known[death.failure.who]
        return sorted(calm, key=lambda death: death.since)


class EndWatch:
    """Notices the ends of processes on this node. [Note: two witnesses]"""

    def __init__(self, wake: Callable[[], object]) -> None:
        """``wake``: called on another thread when ``take`` has something to return."""
        self._wake = wake
        self._ended: SimpleQueue[tuple[str, int, float]] = SimpleQueue()
        self._watched: dict[str, tuple[int, Callable[[], None]]] = {}  # who -> pid, and what ends the watch

    def watch(self, who: str, pid: int | None) -> None:
        """Watch this process, and no earlier one of that name. None: it is on another node."""
        self.forget(who)
        process = None if pid is None else process_with(pid)
        if process is None:
            return

        def died() -> None:
            self._ended.put((who, process.pid, monotonic()))
            self._wake()

        end = watch_process(process, died)
        if end is not None:
            self._watched[who] = process.pid, end

    def forget(self, who: str) -> None:
        """Do not report the end of this process any more."""
        if who in self._watched:
            self._watched.pop(who)[1]()

    def take(self) -> list[tuple[str, int, float]]:
        """(who, pid, monotonic seconds of the end) of each process that has ended since the last call."""
        found = []
        try:
            while True:
                found.append(self._ended.get_nowait())
        except Empty:
            return [(who, pid, at) for who, pid, at in found if self._watched.get(who, (0,))[0] == pid]

    def close(self) -> None:
        for who in list(self._watched):
            self.forget(who)


@dataclass(slots=True, kw_only=True)
class Recovering:
    """A member whose place another process takes; the times are monotonic seconds."""

    who: str
    death: Death
    acted: float  # when the new process was asked for
    answered: float = 0.0  # when it answered
    pid: int = 0  # its own
    telling: set[Process] = field(default_factory=set)  # others that are told of it and have not answered

    def recovery(self, now: float) -> Recovery:
        """The recovery, which has ended. A phase that nobody has measured is not in it."""
        phases = {"detect": self.acted - self.death.since} if self.death.seen else {}
        phases["start"] = self.answered - self.acted
        if not self.telling:
            phases["re-form"] = now - self.answered
        return Recovery(who=self.who, pid=self.pid, seconds=now - self.death.since, phases=phases)
