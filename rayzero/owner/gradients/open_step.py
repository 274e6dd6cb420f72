"""The step whose gradients an owner takes in."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from rayzero.owner.gradients.collection import Collection
from rayzero.owner.gradients.landing import RankGradients


@dataclass(eq=False)
class OpenStep:
    """Which step is open, and what ranks have pushed for it. Only ``Contributions`` writes it; ``ShardSums`` reads."""

    number: int
    ranks: dict[int, RankGradients] = field(default_factory=dict)  # those that have attached
    collection: Collection | None = None  # once its reports are here
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while anything of the step is read or changed
