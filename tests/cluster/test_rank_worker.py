"""What a rank worker knows of its owners when its loop begins."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import rayzero
from rayzero.cluster.loop import pack_loop
from rayzero.cluster.processes import rank_worker
from rayzero.cluster.processes.rank_worker import RankSettings, RankWorker
from rayzero.config import ZeroConfig
from rayzero.elastic.reform import Step
from rayzero.protocol.ownership import Ownership


def connect() -> None:
    rayzero.get_context().connect(0)


def test_a_loop_that_is_late_finds_the_owners_that_have_moved_meanwhile(monkeypatch, tmp_path: Path) -> None:
    """Its config may take long to come, and an owner may die in the meantime."""
    seen: list[list[str]] = []

    def connected(rank: int, table: Any, **settings: Any) -> None:
        seen.append(list(table._addresses))

    monkeypatch.setattr(rank_worker, "connect_store", connected)
    worker = RankWorker(0, 1, None)
    worker.succeed(1, "c:3")
    settings = RankSettings(
        ranks_here=(0,),
        rank=0, world_size=1, run="demo", run_dir=tmp_path, resume=None, on_checkpoint_error="warn", use_gpu=False,
        bind_numa=False, config=ZeroConfig(), addresses=("a:1", "b:2"), lineage="line", token="secret",
    )  # fmt: skip
    outcome = worker.run(settings, pack_loop(connect, None), coordinator=None)
    assert outcome.failure is None
    assert seen == [["a:1", "c:3"]]


def test_a_successor_that_is_told_of_while_owners_change_is_one_of_the_new_owners() -> None:
    """Its rank may need it to get there, so the change does not hold it up."""
    told: list[str] = []
    over: Future[None] = Future()

    class Table:
        def go_over(self, addresses: list[str], ownership: Ownership) -> Future[None]:
            told.append(f"epoch {ownership.epoch}")
            threading.Thread(target=worker.succeed, args=(1, "c:3")).start()
            time.sleep(0.05)
            told.append("gone over")
            return over

        def succeed(self, owner: int, address: str) -> None:
            told.append(f"{owner} is at {address}")
            over.set_result(None)

    worker = RankWorker(0, 1, None)
    worker._table = Table()  # type: ignore[assignment]
    worker.carry_out(Step.CHANGE, [["a:1", "b:2"], Ownership(2)])
    assert told == ["epoch 0", "gone over", "1 is at c:3"]


class Told:
    def __init__(self) -> None:
        self.successors: list[tuple[int, str]] = []

    def succeed(self, owner: int, address: str) -> None:
        self.successors.append((owner, address))


def test_the_owner_beside_a_rank_hears_of_a_successor_by_itself() -> None:
    """While owners change, it is in the next epoch already, and the rank is not: the same number is another owner."""
    worker: Any = RankWorker(0, 1, None)
    owner, table = Told(), Told()
    worker._owner, worker._table = SimpleNamespace(server=owner), table
    worker.succeed_beside(4, "a4")
    assert (owner.successors, table.successors) == ([(4, "a4")], [])
    worker.succeed(1, "a1")
    assert (owner.successors, table.successors) == ([(4, "a4")], [(1, "a1")])
