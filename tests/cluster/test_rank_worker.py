"""What a rank worker is told, and whom in it that is for."""

from __future__ import annotations

from typing import Any

from rayzero.cluster.processes.rank_worker import RankWorker


class Told:
    def __init__(self) -> None:
        self.successors: list[tuple[int, str]] = []

    def succeed(self, owner: int, address: str) -> None:
        self.successors.append((owner, address))


def test_the_owner_beside_a_rank_hears_of_a_successor_by_itself() -> None:
    """While owners change, it is in the next epoch already, and the rank is not: the same number is another owner."""
    worker: Any = RankWorker(0, 1, None)
    worker._owner, worker._table = owner, table = Told(), Told()
    worker.succeed_beside(4, "a4")
    assert (owner.successors, table.successors) == ([(4, "a4")], [])
    worker.succeed(1, "a1")
    assert (owner.successors, table.successors) == ([(4, "a4")], [(1, "a1")])
