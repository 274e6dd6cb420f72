"""Who calls an owner over a link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayzero.store.wire.rpc import FOLLOWER_SERVICE, OWNER_SERVICE, STORE_SERVICE, Metadata, life_metadata


@dataclass(frozen=True, slots=True)
class Caller:
    """A rank, an optimizer actor that keeps a copy of an owner's parameters for its host, or a follower."""

    name: str  # "rank 3", "optimizer 1" or "follower 8a41", for messages and as the name of its links
    service: str  # whose methods it calls
    number: int
    metadata: Metadata = ()  # of each of its calls

    @classmethod
    def rank(cls, rank: int, life: int = 0) -> Caller:
        """``life``: how often the rank has died and come back."""
        return cls(f"rank {rank}", STORE_SERVICE, rank, life_metadata(rank, life))

    @classmethod
    def optimizer(cls, owner: int) -> Caller:
        """An optimizer actor, by its number as an owner."""
        return cls(f"optimizer {owner}", OWNER_SERVICE, owner)

    @classmethod
    def follower(cls, name: str) -> Caller:
        """A process that takes no part in the run; its links say who it is."""
        return cls(f"follower {name}", FOLLOWER_SERVICE, 0)

    @property
    def signature(self) -> Mapping[str, int]:
        """The field of a request that says who sends it."""
        if self.service == FOLLOWER_SERVICE:
            return {}
        return {"rank" if self.service == STORE_SERVICE else "owner": self.number}
