"""The ranks of a host meet before they gather, notice each other's end, and leave nothing behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import forked

from rayzero.errors import RayZeroError, StallError, UnsupportedError
from rayzero.protocol.gathers import Stop
from rayzero.store.rank.gathers.host_gathers import Host, HostGathers, join_gathers
from rayzero.store.shm.plan import SharedPlan
from rayzero.store.shm.signals import available

from .toy import make_spec

pytestmark = pytest.mark.skipif(available() is not None, reason="no signals between processes here")

WAIT = 20.0
Join = Callable[..., HostGathers | None]


@pytest.fixture
def joined() -> Iterator[list[HostGathers]]:
    made: list[HostGathers] = []
    yield made
    for gathers in made:
        gathers.close()


@pytest.fixture
def join(tmp_path: Path, joined: list[HostGathers]) -> Join:
    plan = SharedPlan.of(make_spec(3), 1)

    def one(rank: int, ranks: range = range(2), device: str = "cpu", stall_s: float = WAIT) -> HostGathers | None:
        host = Host(ranks=ranks, rank=rank, key="secret", model=0, directory=tmp_path, stall_s=stall_s)
        made = join_gathers(plan, host, device)
        if made is not None:
            joined.append(made)
        return made

    return one


def meet(join: Join, *devices: str) -> list[HostGathers | RayZeroError | None]:
    """All ranks of a host, each in a thread; what each gets."""
    found: dict[int, HostGathers | RayZeroError | None] = {}

    def one(rank: int) -> None:
        try:
            found[rank] = join(rank, range(len(devices)), devices[rank])
        except RayZeroError as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    return [found[rank] for rank in range(len(devices))]


def both(join: Join) -> tuple[HostGathers, HostGathers]:
    first, second = meet(join, "cpu", "cpu")
    assert isinstance(first, HostGathers)
    assert isinstance(second, HostGathers)
    return first, second


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ranks_agree_on_a_unit_and_leave_nothing(join: Join, tmp_path: Path) -> None:
    first, second = both(join)
    assert (first.place, second.place, first.size) == (0, 1, 2)
    assert first.meeting == second.meeting
    looked = threading.Event()
    first.listen(lambda: looked.set() if first.next() == 1 else None)
    assert first.announce(1, 0)
    assert second.announce(1, 0)
    assert looked.wait(WAIT), "the bell rings for the one that came first"
    assert second.next() == 1
    first.close()
    assert second.stopped() == "rank 0 has left the run"
    assert second.was_left
    assert not second.announce(1, 1)
    second.close()
    assert not list(tmp_path.iterdir())


def test_who_waited_in_vain_announces_the_unit_no_more_for_a_while_and_neither_do_others(join: Join) -> None:
    first, second = both(join)
    assert first.announce(1, 0)
    assert first.withdraw(1, in_vain=True)
    assert not first.announce(1, 0)
    assert not second.announce(1, 0)
    assert second.announce(0, 0), "another unit"


def test_a_rank_that_does_not_come_is_named(join: Join, tmp_path: Path) -> None:
    with pytest.raises(StallError, match=r"rank 1 has waited 0.1 s for ranks 0, 2 of its host to prepare the same"):
        join(1, range(3), stall_s=0.1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (("cpu", "cuda a"), "one computes on a CPU and the other on a GPU"),
        (("cuda a", "cuda b", "cuda a"), "ranks 0 and 2 of one host share a GPU"),
    ],
)
def test_devices_that_cannot_gather_are_refused_on_every_rank(join: Join, devices: tuple[str, ...], said: str) -> None:
    found = meet(join, *devices)
    assert all(isinstance(each, UnsupportedError) and said in str(each) for each in found), found


def test_more_ranks_than_fit_are_refused(join: Join) -> None:
    with pytest.raises(UnsupportedError, match="host_gather=True with 17 ranks on a host: at most 16"):
        join(0, range(17))


def test_a_rank_that_comes_back_gathers_nothing_and_ends_it_for_the_others(join: Join) -> None:
    first, _ = both(join)
    assert join(1) is None
    assert "rank 1" in str(first.stopped())
    assert "has died" in str(first.stopped())
    assert not first.announce(0, 0)


def test_who_is_late_is_named(join: Join) -> None:
    first, second = both(join)
    first.issued()
    assert first.behind() == f"rank 1 (pid {os.getpid()})"
    second.issued()
    second.stop(Stop.STALLED)
    assert "rank 1" in str(first.stopped())
    assert "has waited too long" in str(first.stopped())


OTHER = """
import sys
from pathlib import Path
from store.toy import make_spec
from rayzero.store.rank.gathers.host_gathers import Host, join_gathers
from rayzero.store.shm.plan import SharedPlan
host = Host(ranks=range(2), rank=1, key="secret", model=0, directory=Path(sys.argv[1]), stall_s=20.0)
gathers = join_gathers(SharedPlan.of(make_spec(3), 1), host, "cpu")
print("there", flush=True)
sys.stdin.read()
"""


def test_a_death_is_noticed_from_the_process_and_ends_the_waits(join: Join, tmp_path: Path) -> None:
    with forked(OTHER, tmp_path) as other:
        first = join(0)
        assert first is not None
        looks: list[str | None] = []
        first.listen(lambda: looks.append(first.stopped()))
        assert first.announce(0, 0)
        assert first.stopped() is None
    until(lambda: first.stopped() is not None)
    assert first.stopped() == f"rank 1 (pid {other.pid}) has died"
    until(lambda: looks[-1] is not None)
    first.close()
    assert not list(tmp_path.iterdir()), "the last one removes the slab, whoever has made it"
