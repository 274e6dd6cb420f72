"""A driver that is killed: its janitor ends what is left of its run and removes its shared memory and its file. What
processes of a run remove on other hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from engine.test_whole_run import killed_once
from engine.whole_run import LINEAGE, RUN
from slabs.test_hold import leave

from rayzero.cluster import run_actors
from rayzero.cluster.continuation import Continuation, what_is_left
from rayzero.cluster.janitor import Janitor, KeptStates, Remains, clear_up, leaving_nothing
from rayzero.cluster.run import Member
from rayzero.cluster.run_actors import RunActors
from rayzero.protocol.ownership import Ownership
from rayzero.slabs.sweep import SHARED_MEMORY, Hold, held_in, sweep
from tests.forked import Forked, forked
from tests.support import needs
from tests.support.leftovers import still_there
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(120)

OWNER = """
import signal, sys
from pathlib import Path
from rayzero.slabs.header import SlabFacts, lay_out_slab
from rayzero.slabs.slab import Slab
signal.signal(signal.SIGTERM, signal.SIG_IGN)
facts = SlabFacts(run="demo", role="params", index=0, incarnation=7, layout_digest="ab" * 16, kernel="native",
    lineage="one")
slab = Slab.create(lay_out_slab(facts, [("data", 4096, 0)]), Path(sys.argv[1]))
print("made", flush=True)
signal.pause()
"""
DRIVER = """
import json, os, signal, sys
from pathlib import Path
import psutil
from rayzero.cluster.janitor import announced
from rayzero.cluster.janitor import Janitor
slabs, targets = map(Path, sys.argv[1:3])
janitor = Janitor(slabs, targets)
janitor.watch([psutil.Process(int(pid)) for pid in sys.argv[3:]])
with announced(targets, "demo", b"[]"):
    print(json.dumps(janitor.pid), flush=True)
    asked = sys.stdin.readline().strip()
    if asked == "end the pipe":
        os.close(janitor._survivor._pipe.fileno())
        print("ended", flush=True)
        signal.pause()
    if asked == "half a line":
        os.write(janitor._survivor._pipe.fileno(), b'[[1, 2')
        print("written", flush=True)
        signal.pause()
    if asked == "fork":
        child = os.fork()
        if not child:
            signal.pause()
        print(child, flush=True)
        sys.stdin.readline()
    sys.stdin.readline()
janitor.close()
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Forked]:
    """A process with a slab in ``slabs``, which ends by SIGKILL alone."""
    (tmp_path / "slabs").mkdir()
    with forked(OWNER, tmp_path / "slabs") as process:
        assert process.said() == "made"
        yield process


def left(*folders: Path) -> list[str]:
    return [path.name for folder in folders for path in folder.iterdir()]


def until_empty(*folders: Path) -> list[str]:
    """What is still there after a while."""
    deadline = time.monotonic() + 60
    while (found := left(*folders)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@dataclass(frozen=True)
class Driver:
    """A driver, its janitor, the folders of slabs and of targets, and an owner's process."""

    process: subprocess.Popen[str]
    janitor: psutil.Process
    slabs: Path
    targets: Path
    owner: Forked

    def asked(self, what: str) -> str:
        """Its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(what, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """It is not waited for: like one whose parent is busy, it is a zombie all the while."""
        os.kill(self.process.pid, signal.SIGKILL)

    def everything_goes_with_the_owner(self) -> bool:
        """And the janitor after it."""
        self.owner.kill()
        self.owner.wait()
        return until_empty(self.slabs, self.targets) == [] and still_there([self.janitor], timeout_s=30) == []


@pytest.fixture
def driver(owner: Forked, tmp_path: Path) -> Iterator[Driver]:
    slabs, targets = tmp_path / "slabs", tmp_path / "targets"
    command = [sys.executable, "-c", DRIVER, str(slabs), str(targets), str(owner.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Driver(process, psutil.Process(json.loads(process.stdout.readline())), slabs, targets, owner)
        finally:
            process.kill()


@pytest.mark.promise("safe", "jobs")
def test_what_a_killed_driver_leaves_is_removed_once_its_processes_are_gone(driver):
    assert len(left(driver.slabs, driver.targets)) == 2
    driver.kill()
    assert until_empty(driver.targets) == []
    assert len(left(driver.slabs)) == 1, "its maker lives"
    assert driver.everything_goes_with_the_owner()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "before",
    [
        "end the pipe",  # the kernel closes a process's files before it says that the process has ended
        "fork",  # a child has the driver's end of the pipe, which thus stays open
        "half a line",  # the last whole one counts
    ],
)
def test_whatever_has_become_of_the_pipe_of_a_killed_driver_its_owner_is_waited_for(driver, before):
    told = driver.asked(before)
    try:
        assert still_there([driver.janitor], timeout_s=1.0) != []
        driver.kill()
        assert still_there([driver.janitor], timeout_s=1.0) != [], "its owner lives"
        assert driver.everything_goes_with_the_owner()
    finally:
        if before == "fork":
            os.kill(int(told), signal.SIGKILL)


def test_processes_that_stay_are_killed(owner, tmp_path):
    clear_up([psutil.Process(owner.pid)], tmp_path / "slabs", None, ends_s=0.1)
    assert owner.wait(60) == -signal.SIGKILL
    assert left(tmp_path / "slabs") == []


def test_a_driver_that_ends_well_takes_its_janitor_with_it(driver):
    driver.process.communicate("end\n", timeout=60)
    assert driver.process.returncode == 0
    assert still_there([driver.janitor], timeout_s=20) == []
    assert (len(left(driver.slabs)), left(driver.targets)) == (1, [])
    assert driver.owner.poll() is None


def test_a_janitor_that_was_killed_disturbs_nobody(tmp_path):
    with closing(Janitor(tmp_path, None)) as janitor:
        os.kill(janitor.pid, signal.SIGKILL)
        psutil.Process(janitor.pid).wait(60)
        janitor.watch([psutil.Process()])
    janitor.close()


HELD = """
import os, signal, sys, time
from pathlib import Path
from rayzero.cluster.janitor import Janitor, KeptStates
from rayzero.slabs.sweep import held_in
slabs = Path(sys.argv[1])
janitor = Janitor(slabs, None, keep=KeptStates(run="demo", lineage="one", seconds=0))
until = time.monotonic() + 60
while not held_in(slabs) and time.monotonic() < until:
    time.sleep(0.02)
print("held" if held_in(slabs) else "not held", flush=True)
sys.stdin.readline()
janitor.close()
"""


@pytest.mark.parametrize("end", ["well", "killed"])
def test_what_a_dead_owner_leaves_waits_for_its_successor_while_the_driver_lives(owner, tmp_path, end):
    """Though no process of its run is on this host, and others start and end there."""
    slabs = tmp_path / "slabs"
    with forked(HELD, slabs) as driver:
        assert driver.said() == "held"
        owner.kill()
        owner.wait()
        assert sweep(slabs) == [], "another run starts"
        if end == "well":
            driver.say("end")
            driver.wait(60)
            assert len(sweep(slabs)) == 1
    assert until_empty(slabs) == []


# ---- states of a run that can go on


@pytest.mark.thorough  # a killed run's states are held in tests/cluster/test_run_dir.py, too
@needs.shared_memory
def test_states_that_a_run_can_go_on_from_are_kept_for_a_while(tmp_path):
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-") as folder:
        slabs, keep = Path(folder), KeptStates(run=RUN, lineage=LINEAGE, seconds=3)
        goes_on = Continuation(step=2, life=1, repeats=2, ownership=Ownership(2))
        killed_once(slabs, tmp_path)
        clearing = threading.Thread(target=clear_up, args=([], slabs, None), kwargs={"keep": keep})
        clearing.start()
        until(lambda: any(held.step is not None for held in held_in(slabs)), 60)
        (held,) = [held for held in held_in(slabs) if held.step is not None]  # the former one may still be there
        assert held.step == 2
        assert held.until is not None
        assert 0 < held.until - time.time() < 60
        assert sweep(slabs) == [], "another run starts"
        assert what_is_left(RUN, LINEAGE, slabs) in (goes_on, replace(goes_on, repeats=None))
        clearing.join(60)
        assert left(slabs) == []


def test_states_that_no_run_can_go_on_from_are_removed_at_once(owner, tmp_path):
    keep = KeptStates(run="demo", lineage="one", seconds=3600)
    clear_up([psutil.Process(owner.pid)], tmp_path / "slabs", None, ends_s=0.1, keep=keep)
    assert left(tmp_path / "slabs") == []


# ---- hosts other than the driver's ----------------------------------------------------------------------------------


@pytest.fixture
def on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr("ray.get_runtime_context", lambda: here)


@pytest.mark.usefixtures("on_a_node")
def test_a_run_that_starts_again_does_not_wait_for_what_it_had_before(tmp_path: Path) -> None:
    """A janitor of a process that was killed would keep it for a successor."""
    before, other = leave(tmp_path, "one"), leave(tmp_path, "other")
    hold = Hold(tmp_path, "one")
    found = Remains.of_run("two", "elsewhere", replaces=False, over="one").janitor(tmp_path)
    assert found is not None
    assert (before.exists(), other.exists()) == (False, True)
    found.close()
    hold.close()


@pytest.mark.usefixtures("on_a_node")
def test_the_driver_sees_to_its_own_node(tmp_path: Path) -> None:
    before = leave(tmp_path, "one")
    assert Remains.of_run("two", "here", replaces=True, over="one").janitor(tmp_path) is None
    assert before.exists()


@pytest.mark.usefixtures("on_a_node")
def test_the_janitor_is_released_also_where_what_follows_raises(tmp_path: Path) -> None:
    own = leave(tmp_path, "two")
    with (
        pytest.raises(OSError, match="no thread"),
        leaving_nothing(Remains.of_run("two", "elsewhere", replaces=False), tmp_path),
    ):
        raise OSError("no thread")
    assert not own.exists()
    with leaving_nothing(None, tmp_path):
        pass


@pytest.mark.usefixtures("on_a_node")
def test_where_ray_is_gone_the_end_of_a_run_ends_its_processes_and_removes_what_killed_ones_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the driver's janitor holds it for their successors."""
    monkeypatch.setattr(run_actors, "ray_answers", lambda: False)
    actors = RunActors("r", SimpleNamespace(close=lambda: None), None)  # type: ignore[arg-type]
    killed, hold = leave(tmp_path, "one"), Hold(tmp_path, "one")
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            actors.local.find({"rank 0": Member(who="rank 0", pid=process.pid, node="n", host="h")}, "n")
            actors._share, actors.local.janitor = tmp_path, hold  # type: ignore[assignment]
            actors.end(politely=False)
            assert not psutil.pid_exists(process.pid)
        finally:
            process.kill()
    assert not killed.exists()
