"""The members of a run: its ranks and owners."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
