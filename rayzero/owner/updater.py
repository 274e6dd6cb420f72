"""The thread that computes: runs one task after the other, in the order of submission."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable

from rayzero.concurrency.threads import use_torch_threads

Task = Callable[[], None]


class Updater:
    """One thread with its own torch thread count.

    Knows tasks and their order; not what they do. If a task raises, the thread goes on, and ``on_error`` gets the
    error."""

    def __init__(self, name: str, threads: int, on_error: Callable[[BaseException], None]) -> None:
        """``threads``: torch threads of each task, at least 1."""
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._on_error = on_error
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, args=(threads,), name=name, daemon=True)
        self._thread.start()
        _running.add(self)

    @property
    def queued(self) -> int:
        """Tasks that wait behind the running one."""
        return self._tasks.qsize()

    def submit(self, task: Task) -> None:
        """Queue a task. Tasks submitted after ``close`` do not run."""
        self._tasks.put(task)

    def close(self) -> None:
        """Run the queued tasks, then end the thread. Idempotent; must not be called from a task."""
        self._tasks.put(None)
        self._thread.join()

    def abandon(self) -> None:
        """Wait for the running task and start no other. Idempotent; must not be called from a task."""
        self._abandoned = True
        self._tasks.put(None)
        self._thread.join()

    def _run(self, threads: int) -> None:
        while (task := self._tasks.get()) is not None and not self._abandoned:
            use_torch_threads(threads)
            try:
                task()
            except Exception as exc:  # the supervision loop of everything an owner computes
                self._on_error(exc)
            del task  # it may hold gradients, and the next one may come late


_running: weakref.WeakSet[Updater] = weakref.WeakSet()


@atexit.register
def _abandon_all() -> None:
    """A program may end without closing anything, and the process dies with "terminate called" if a daemon thread is in
    torch's C++ while the interpreter ends. So threads end before that."""
    for updater in list(_running):
        updater.abandon()
