"""Who calls an owner over a link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayzero.store.wire.rpc import OWNER_SERVICE, STORE_SERVICE, Metadata, life_metadata


@dataclass(frozen=True, slots=True)
class Caller:
    """A rank, or an optimizer actor that keeps a copy of an owner's parameters for its host."""

    name: str  # "rank 3" or "optimizer 1", for messages and as the name of its links
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

    @property
    def signature(self) -> Mapping[str, int]:
        """The field of a request that says who sends it."""
        return {"rank" if self.service == STORE_SERVICE else "owner": self.number}
