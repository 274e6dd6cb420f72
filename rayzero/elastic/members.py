"""The members of a run, its ranks and owners, their processes, and what happens to these."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class MemberKind(StrEnum):
    """What a member is. The value is its name in messages."""

    RANK = "rank"
    OWNER = "optimizer"
    BESIDE = "optimizer beside rank"  # an owner with states on that rank's device, which stays there as long as it


@dataclass(frozen=True, slots=True, order=True)
class MemberId:
    """A member of a run, whichever process it is now."""

    kind: MemberKind
    index: int

    def __str__(self) -> str:
        return f"{self.kind} {self.index}"


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """One process of a member, in one of its lives. For a while, two may be the same owner: one that leaves, and one
    that joins in its place."""

    member: MemberId
    life: int

    def __str__(self) -> str:
        return str(self.member)


# ---- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Serves:
    """A process that was started answers."""

    process: Process
    address: str = ""  # where an owner serves


@dataclass(frozen=True, slots=True)
class Answered:
    """A process has answered a call."""

    process: Process
    method: str
    result: Any = None
    refused: str | None = None  # why it cannot do what it was asked


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank's loop has returned or raised."""

    process: Process


@dataclass(frozen=True, slots=True)
class Died:
    """A process is gone, also one that never served."""

    process: Process
    counted: bool = False  # what killed it has been counted as a failure with another process's death


Event = Serves | Answered | Ended | Died
