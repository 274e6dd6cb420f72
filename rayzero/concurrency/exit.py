"""Ends threads before the interpreter does.

A program may end without closing anything. If a daemon thread is in torch's C++ while the interpreter ends, the process
dies with "terminate called". So whoever runs such a thread registers here.
"""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol


class Abandoned(Protocol):
    """An object that runs a thread."""

    def abandon(self) -> None:
        """The interpreter is ending: wait until the thread has finished its present work. Idempotent."""
        ...


_running: weakref.WeakSet[Abandoned] = weakref.WeakSet()


def abandon_at_exit(runner: Abandoned) -> None:
    """Call ``runner.abandon()`` when the interpreter ends, if ``runner`` still exists."""
    _running.add(runner)


@atexit.register
def _abandon_all() -> None:
    for runner in list(_running):
        runner.abandon()
