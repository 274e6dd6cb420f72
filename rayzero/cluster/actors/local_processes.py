"""A run's processes on the driver's node: which are stopped, which have to be killed, and when all are gone.

Ray ends them by itself, but a stopped process notices nothing, and a Ray that is gone ends nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import psutil

from rayzero.cluster.janitor import Janitor
from rayzero.cluster.run import Member
from rayzero.cluster.supervision import Failure
from rayzero.concurrency.processes import is_stopped
from rayzero.concurrency.survivor import kill, wait_or_kill

KILL_S = 20.0  # how long the kernel may take to free a killed process: a machine out of memory or CPUs is slow

_END_S = 5.0  # how long it may take to free one that this process has killed


class LocalProcesses:
    """The processes by name, the coordinator's and those of spares too, and the janitor that knows them.

    Knows processes; not actors, nor why one has to end."""

    def __init__(self) -> None:
        self._processes: dict[str, psutil.Process] = {}
        self._ending: list[psutil.Process] = []  # told to end, and missed by nobody
        self._janitor: Janitor | None = None  # freed by: close()

    def give_janitor(self, janitor: Janitor) -> None:
        """Tell ``janitor`` of the processes from now on; closed by ``close``."""
        self._janitor = janitor

    def find(self, everyone: Mapping[str, Member], here: str) -> None:
        """Note those of ``everyone`` that are on the node ``here``, for the janitor too."""
        for who, member in everyone.items():
            if member.node == here:
                with suppress(psutil.NoSuchProcess):  # it died after it answered; the next call to it reports that
                    self._processes[who] = psutil.Process(member.pid)
        if self._janitor is not None:
            self._janitor.watch(self._processes.values())

    def rename(self, before: str, now: str) -> None:
        process = self._processes.pop(before, None)
        if process is not None:
            self._processes[now] = process

    def pid(self, who: str) -> int | None:
        """The id of a process; None: it is on another node."""
        process = self._processes.get(who)
        return None if process is None else process.pid

    @property
    def stopped(self) -> list[str]:
        """Whose processes are stopped (SIGSTOP, a debugger)."""
        stopped = [(who, process) for who, process in self._processes.items() if is_stopped(process.pid)]
        return [who for who, process in stopped if process.is_running()]  # else it is dead, and another has its pid

    def standing_still(self, members: Mapping[str, Member]) -> list[Failure]:
        """The ``members`` that are stopped; other processes only see that they do not answer."""
        return [
            Failure(
                who=who,
                what=f"makes no progress: its process (pid {self.pid(who)} on {members[who].host}) is stopped",
            )
            for who in self.stopped
            if who in members
        ]

    # ---- ends

    def kill(self, who: str) -> None:
        process = self._processes.get(who)
        if process is not None:
            kill(process)

    def kill_stopped(self) -> None:
        """Kill those that are stopped: they react to no other signal, and waiting for them takes long."""
        for who in self.stopped:
            self.kill(who)

    def let_end(self, who: str) -> None:
        """A process was told to end, and another one may have its name; ``see_gone`` waits for both."""
        process = self._processes.pop(who, None)
        if process is not None:
            self._ending.append(process)

    def await_ending(self, timeout_s: float) -> None:
        """Wait until those that were told to end are gone."""
        psutil.wait_procs(self._ending, timeout=timeout_s)

    def await_all(self, timeout_s: float) -> None:
        """Wait until nobody is left but those that were told to end before."""
        psutil.wait_procs(self._processes.values(), timeout=timeout_s)

    def see_gone(self, patience_s: float) -> None:
        """Wait ``patience_s`` until all are gone, and kill those that are not. Nobody is known after that."""
        wait_or_kill([*self._processes.values(), *self._ending], patience_s, _END_S)
        self._processes, self._ending = {}, []

    def close(self) -> None:
        if self._janitor is not None:
            self._janitor.close()
