"""What has to end before the interpreter does.

A program may end without closing anything. A daemon thread that is in torch's C++ while the interpreter goes ends the
process with "terminate called": so whoever runs such a thread says here how it is left.
"""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol


class Abandoned(Protocol):
    """Runs a thread."""

    def abandon(self) -> None:
        """The interpreter ends: wait until the thread is done with what it is at. Idempotent."""
        ...


_running: weakref.WeakSet[Abandoned] = weakref.WeakSet()


def abandon_at_exit(runner: Abandoned) -> None:
    """Have ``runner`` abandoned when the interpreter ends, if it is still there."""
    _running.add(runner)


@atexit.register
def _abandon_all() -> None:
    for runner in list(_running):
        runner.abandon()
