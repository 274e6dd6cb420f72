"""How the ranks of one host agree on the units that they all-gather, as one of them sees it.

[Note: no collective to hang on] A rank announces a unit once it has memory for it and its own part of the bytes can be
copied. Until every rank of the host has announced the same bytes, any of them may withdraw and copy the whole unit; the
moment all have, the unit is agreed, and every rank issues its all-gather, in one order. So ranks may run different
units, in different orders: then they gather less, and nobody waits for a rank that does not come.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Protocol


class Stop(IntEnum):
    """Why the ranks of a host gather no more units together."""

    LEFT = 1  # a rank has closed its store
    DIED = 2  # a rank's process has died
    FAILED = 3  # an all-gather of a rank has failed
    STALLED = 4  # a rank did not come to an all-gather that it had agreed to


class UnitGathers(Protocol):
    """What the ranks of a host agree on. Thread-safe."""

    place: int  # this rank's among those of its host, from 0
    size: int  # how many those are, at least 2
    meeting: Path  # a file that does not exist yet, by which they may find each other
    stall_s: float  # how long a rank may not come

    def announce(self, unit: int, content: int) -> bool:
        """This rank wants the bytes of version ``content`` of a unit, which it has not announced yet. False: copy all
        of them, because another rank wants others, or waited for one in vain lately, or none are gathered any more."""
        ...

    def withdraw(self, unit: int, *, in_vain: bool) -> bool:
        """Take an announcement back; False if the unit is agreed, and so in the order. in_vain: this rank has waited
        for the others, who do not announce the unit for a while either."""
        ...

    def next(self) -> int | None:
        """The unit that is gathered next, by all ranks; None: none is agreed."""
        ...

    def issued(self) -> None:
        """This rank has issued one more all-gather."""
        ...

    def behind(self) -> str:
        """The ranks that have issued fewer than this one, for messages; if there are none, all others."""
        ...

    def stop(self, why: Stop) -> None:
        """This rank gathers no more, and so do the others. Idempotent."""
        ...

    def stopped(self) -> str | None:
        """Why none are gathered any more; None: they are."""
        ...

    @property
    def was_left(self) -> bool:
        """Whether that is only because a rank has left."""
        ...

    def listen(self, look: Callable[[], None]) -> None:
        """Call ``look`` in a thread whenever there may be news, and some times a second. It must not wait."""
        ...

    def close(self) -> None:
        """Leave, and end that thread. Idempotent."""
        ...
