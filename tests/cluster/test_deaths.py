"""When a run acts on a death, what it says of it, and which seconds count."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rayzero.cluster.supervision import Failure, death_of
from rayzero.cluster.upkeep.ray_processes import Death, Deaths, EndWatch
from rayzero.cluster.upkeep.replacement import Recovering
from rayzero.elastic.members import MemberId, MemberKind, Process
from tests.support.waiting import until

CALM = 0.3


def ray_says(who: str) -> Failure:
    return death_of(who, 7, "Out of memory.")


def test_a_death_is_acted_on_when_it_is_calm_and_once() -> None:
    deaths = Deaths(CALM)
    assert deaths.patience_s(9.0) is None
    deaths.told(ray_says("rank 0"), 10.0)
    assert deaths.patience_s(10.1) == pytest.approx(0.2)
    assert deaths.take(10.2) == []
    assert deaths.take(10.31) == [Death(failure=ray_says("rank 0"), since=10.0, seen=False)]
    assert deaths.take(99.0) == []


def test_a_death_counts_from_when_the_kernel_saw_it_and_has_rays_reason() -> None:
    expected = [Death(failure=ray_says("rank 0"), since=9.9, seen=True)]
    deaths = Deaths(CALM)
    deaths.saw("rank 0", 7, 9.9)
    deaths.told(ray_says("rank 0"), 10.1)
    assert deaths.take(10.21) == expected
    deaths.told(ray_says("rank 0"), 10.1)
    deaths.saw("rank 0", 7, 9.9)
    assert deaths.take(10.21) == expected


def test_the_oldest_death_comes_first_and_a_younger_one_waits() -> None:
    deaths = Deaths(CALM)
    for who, at in (("rank 0", 10.2), ("rank 1", 10.0), ("rank 2", 10.9)):
        deaths.saw(who, 7, at)
    assert [death.failure.who for death in deaths.take(11.0)] == ["rank 1", "rank 0"]
    assert deaths.patience_s(11.0) == pytest.approx(0.2)


@pytest.fixture
def start() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def make() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]))
        return started[-1]

    yield make
    for process in started:
        process.kill()
        process.wait()


def test_the_end_of_a_process_wakes_who_waits_at_once(start) -> None:
    woken = threading.Event()
    watch = EndWatch(woken.set)
    process = start()
    watch.watch("rank 0", process.pid)
    assert watch.take() == []
    killed = time.monotonic()
    process.send_signal(signal.SIGKILL)
    assert woken.wait(20)
    [(who, pid, at)] = watch.take()
    assert (who, pid) == ("rank 0", process.pid)
    assert killed <= at <= time.monotonic()
    assert watch.take() == []
    watch.close()


def test_only_the_last_process_of_a_name_counts_and_only_while_it_is_watched(start) -> None:
    woken: list[int] = []
    watch = EndWatch(lambda: woken.append(1))
    first, second, third = start(), start(), start()
    watch.watch("rank 0", first.pid)
    watch.watch("rank 0", second.pid)
    watch.watch("rank 1", third.pid)
    for process in (first, second, third):
        process.kill()
        process.wait()
    until(lambda: len(woken) == 2)
    watch.forget("rank 1")
    assert [pid for _, pid, _ in watch.take()] == [second.pid]
    watch.close()


def test_a_process_of_another_node_or_that_is_gone_is_left_to_ray(start) -> None:
    watch = EndWatch(lambda: None)
    gone = start()
    gone.kill()
    gone.wait()
    watch.watch("rank 0", gone.pid)
    watch.watch("rank 1", None)
    assert watch.take() == []
    watch.close()


def recovering(*, seen: bool, telling: set[Process]) -> Recovering:
    death = Death(failure=ray_says("rank 0"), since=10.0, seen=seen)
    return Recovering(who="rank 0", death=death, acted=10.25, answered=12.25, pid=8, telling=telling)


def test_a_recovery_has_the_phases_that_were_measured_and_no_others() -> None:
    whole = recovering(seen=True, telling=set()).recovery(12.5)
    assert whole.phases == {"detect": 0.25, "start": 2.0, "re-form": 0.25}
    assert (whole.seconds, whole.pid) == (2.5, 8)
    assert recovering(seen=False, telling=set()).recovery(12.5).phases == {"start": 2.0, "re-form": 0.25}
    told = {Process(MemberId(MemberKind.OWNER, 0), 0)}
    assert recovering(seen=True, telling=told).recovery(12.5).phases == {
        "detect": 0.25,
        "start": 2.0,
    }
