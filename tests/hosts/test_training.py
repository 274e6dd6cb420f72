"""A run over two hosts ends with the bits of a run on one, whoever dies, and also if the cable is cut."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.moved import bytes_moved
from tests.support.waiting import until

from .hosts import Host, why_no_hosts
from .links import Cable
from .trainings import (
    ENDLESS,
    LONG_S,
    MODEL_BYTES,
    OWNERS_ELSEWHERE,
    PYTHON,
    RAY_ENV,
    STEPS,
    Training,
    TwoHosts,
    train,
)

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
]

PUSHED = STEPS * MODEL_BYTES  # by a rank
FETCHED = (STEPS + 1) * MODEL_BYTES  # the initial weights, and each step's


@pytest.mark.promise("exact", "hosts")
def test_a_rank_and_an_owner_on_each_host(two_hosts: TwoHosts, undisturbed: str, tmp_path: Path) -> None:
    a, b = two_hosts.a, two_hosts.b
    before = a.sent_to(b), b.sent_to(a)
    training = train(a, tmp_path, two_hosts.address)
    training.end()
    assert [sorted(who[:-2] for who in training.members(host)) for host in (a, b)] == [["optimizer", "rank"]] * 2
    for sent, earlier in zip((a.sent_to(b), b.sent_to(a)), before, strict=True):
        assert sent - earlier > 0.9 * PUSHED, "half a rank's gradients one way, and half of the weights for the other's"
    moved = bytes_moved(training.folder)
    loaded = moved.pop(("shm", "load")), moved.pop(("grpc", "load"))
    assert sum(loaded) == MODEL_BYTES
    assert all(loaded), "one owner is on rank 0's host, the other is not"
    # half of each rank's gradients go to the owner of its host
    assert moved == {("shm", "push"): PUSHED, ("grpc", "push"): PUSHED}
    assert bytes_moved(training.folder, "optimizer") == {("grpc", "fetch"): FETCHED}
    assert training.digest() == undisturbed


@pytest.mark.thorough
def test_metrics_of_both_hosts_are_for_the_runs_own_tools_and_owners_listen_in_its_network(
    two_hosts: TwoHosts, tmp_path: Path
) -> None:
    a, b = two_hosts.a, two_hosts.b
    network = f"{a.address.rpartition('.')[0]}.0/24"
    training = train(a, tmp_path, two_hosts.address, f"run.network={network}", steps=ENDLESS)
    training.until(10)
    told = training.record()["telemetry"]
    assert told["http_sd"].startswith(f"https://{a.address}:")
    shown = a.run([PYTHON, "-m", "rayzero", "top", str(training.folder), "--once"], timeout=LONG_S)
    assert re.search(r"rank 1|optimizer 1", shown.stdout), shown.stdout + shown.stderr
    assert "answer" not in shown.stdout, "one that does not"
    ask = f"""
import ssl, urllib.request
try:
    print(urllib.request.urlopen({told["http_sd"]!r}, timeout=20, context=ssl._create_unverified_context()).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""
    assert b.run([PYTHON, "-c", ask], timeout=LONG_S).stdout.strip() == "401"
    a.kill(training.record()["driver"]["pid"], signal.SIGINT)
    assert training.driver.wait(LONG_S) == 130


@pytest.mark.thorough
def test_a_host_that_does_not_share_the_runs_folder_is_refused_at_the_start(
    two_hosts: TwoHosts, tmp_path: Path
) -> None:
    """Else the checkpoint after the last step, days later perhaps, would say so."""
    a, b = two_hosts.a, two_hosts.b
    folder = tmp_path / "run"
    folder.mkdir()
    assert b.run(["mount", "-t", "tmpfs", "none", str(folder)]).returncode == 0
    training = train(a, tmp_path, two_hosts.address)
    said = training.driver.communicate(timeout=LONG_S)[0]
    assert training.driver.returncode == 2
    assert f"{b.address} cannot see {folder}, so no checkpoint can be completed in it; set run.storage_path" in said
    assert slabs_on(b) == 0


@pytest.mark.thorough
def test_a_driver_that_is_killed_leaves_nothing_in_the_other_hosts_memory(two_hosts: TwoHosts, tmp_path: Path) -> None:
    a, b = two_hosts.a, two_hosts.b
    training = train(a, tmp_path, two_hosts.address, "run.max_failures=0", steps=ENDLESS)
    training.until(10)
    assert slabs_on(b) >= 4, "a rank's and an owner's"
    a.kill(training.record()["driver"]["pid"])
    assert training.driver.wait(LONG_S) != 0
    until(lambda: slabs_on(b) == 0, LONG_S, "no slabs of a run that has ended")
    until(lambda: "rayzero.slabs.sweep" not in b.run(["ps", "ax", "-o", "args"]).stdout, LONG_S, "no janitor")


def slabs_on(host: Host) -> int:
    return host.run(["ls", "/dev/shm"]).stdout.count("rayzero-")


@pytest.mark.thorough
def test_all_ranks_on_one_host_and_all_owners_on_the_other(
    two_hosts: TwoHosts, undisturbed: str, tmp_path: Path
) -> None:
    a, b = two_hosts.a, two_hosts.b
    before = a.sent_to(b), b.sent_to(a)
    training = train(a, tmp_path, two_hosts.address, *OWNERS_ELSEWHERE)
    training.end()
    assert (sorted(training.members(a)), sorted(training.members(b))) == (
        ["optimizer 2", "rank 0", "rank 1"],  # without shards
        ["optimizer 0", "optimizer 1"],
    )
    assert 0.9 * PUSHED < a.sent_to(b) - before[0] < 1.5 * PUSHED, "gradients leave as one sum of both ranks"
    assert 0.9 * PUSHED < b.sent_to(a) - before[1] < 1.5 * PUSHED, "weights come once for both ranks"
    assert bytes_moved(training.folder) == {("host", "push"): 2 * PUSHED, ("grpc", "load"): MODEL_BYTES}
    assert bytes_moved(training.folder, "optimizer") == {("grpc", "fetch"): FETCHED, ("grpc", "push"): PUSHED}
    assert training.digest() == undisturbed


def _far_ends(host: Host, *pids: int) -> set[str]:
    """The addresses to which processes have connections."""
    program = "import psutil, sys\nfor pid in map(int, sys.argv[1:]):\n"
    program += " for each in psutil.Process(pid).net_connections('inet'):\n  print(each.raddr.ip if each.raddr else '')"
    return set(host.run([PYTHON, "-c", program, *map(str, pids)]).stdout.split())


@pytest.mark.thorough
def test_a_host_of_ranks_keeps_a_door_that_is_small_and_shown_also_after_its_death_and_a_change(
    two_hosts: TwoHosts, undisturbed: str, tmp_path: Path
) -> None:
    a = two_hosts.a
    training = train(a, tmp_path, two_hosts.address, "run.max_failures=2", *OWNERS_ELSEWHERE)
    training.until(10)
    members = training.members(a)
    assert "optimizer 2" in members, training.record()["members"]
    a.kill(members["rank 0"], signal.SIGSTOP)  # so that the run does not end before
    door, folder = members["optimizer 2"], str(training.folder)
    memory = a.run(["cat", f"/proc/{door}/smaps_rollup"]).stdout
    kib = {kind: int(size) for kind, size in re.findall(r"^(Rss|Pss|Private_Dirty): +(\d+) kB", memory, re.MULTILINE)}
    assert kib["Rss"] <= 300 << 10, memory
    assert _far_ends(a, members["rank 0"], members["rank 1"]) & {two_hosts.b.address} == set(), (
        "the door calls for them"
    )
    assert two_hosts.b.address in _far_ends(a, door)
    rayzero = [PYTHON, "-m", "rayzero"]
    assert f"optimizer 2: pid {door} on {a.address}, without shards\n" in a.run([*rayzero, "status", folder]).stdout
    assert re.search(r"optimizer 2 .* 0 *$", a.run([*rayzero, "top", folder, "--once"]).stdout, re.MULTILINE)
    a.kill(door)
    scaling = a.start([*rayzero, "scale", folder, "--optimizers", "1"], env=RAY_ENV)
    until(lambda: str(training.record()["rescaling"]).endswith("leading the ranks to them"), LONG_S, "one owner")
    a.kill(members["rank 0"], signal.SIGCONT)
    said = scaling.communicate(timeout=LONG_S)[0]
    assert scaling.returncode == 0, said
    training.end()
    assert [one["who"] for one in training.record()["recoveries"]] == ["optimizer 2"]
    assert sorted(training.members(a)) == ["optimizer 1", "rank 0", "rank 1"]
    assert training.digest() == undisturbed


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("whom", "settings"),
    [("rank", []), ("optimizer 0", OWNERS_ELSEWHERE)],
    ids=["rank", "lead-of-ranks-elsewhere"],
)
def test_a_process_that_is_killed_on_the_other_host_is_replaced_there(
    whom: str, settings: list[str], two_hosts: TwoHosts, undisturbed: str, tmp_path: Path
) -> None:
    a, b = two_hosts.a, two_hosts.b
    training = train(a, tmp_path, two_hosts.address, "run.max_failures=2", *settings)
    training.until(10)
    [(who, pid)] = [(who, pid) for who, pid in training.members(b).items() if who.startswith(whom)]
    b.kill(pid)
    said = training.end()
    [recovery] = training.record()["recoveries"]
    assert recovery["who"] == who
    assert training.members(b)[who] == recovery["pid"] != pid
    assert "(1 more failure would be outlived)" in said
    assert training.digest() == undisturbed


@pytest.mark.thorough
def test_a_bad_cable_changes_no_bit(two_hosts: TwoHosts, undisturbed: str, tmp_path: Path) -> None:
    """One that is cut for less than a ping's patience, that loses packets, is slow, or far.

    A ping has 10 s. TCP sends again after 0.2 s, on busy hosts after 0.4 s, then after twice as long each time: so
    nothing passes for up to twice as long as the cable is cut."""
    cable = two_hosts.a.cable(two_hosts.b)
    training = train(two_hosts.a, tmp_path, two_hosts.address)
    training.until(10)
    cut(cable, training, seconds=3.0)
    for faults in ({"bytes_per_s": 12.5e6, "delay_s": 0.005, "loss": 0.005}, {"bytes_per_s": 1e6}, {"delay_s": 0.05}):
        for what, value in faults.items():
            setattr(cable, what, value)
        try:
            training.until(training.done() + 8)
        finally:
            cable.mend()
    said = training.end()
    assert "is back after" not in said, "no link was given up"
    assert training.record()["recoveries"] == []
    assert training.digest() == undisturbed


def cut(cable: Cable, training: Training, *, seconds: float) -> None:
    """Cut the cable for a while, in which no step is decided by half of the run."""
    cable.cut()
    try:
        done = training.done()
        with pytest.raises(subprocess.TimeoutExpired):
            training.driver.wait(seconds)
        assert training.done() <= done + 1
    finally:
        cable.mend()


@pytest.mark.thorough
def test_links_over_a_cable_that_carries_one_way_only_are_given_up_and_opened_again(
    two_hosts: TwoHosts, undisturbed: str, tmp_path: Path
) -> None:
    """What the second host sends arrives; it hears nothing, so its side finds out only by its own pings."""
    a, b = two_hosts.a, two_hosts.b
    cable = a.cable(b)
    training = train(a, tmp_path, two_hosts.address, *OWNERS_ELSEWHERE)
    training.until(10)
    cable.loses_only_from, cable.loss = a.device, 1.0
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            training.driver.wait(15.0)
    finally:
        cable.mend()
    said = training.end()
    assert re.search(r"rank \d: the link to optimizer \d at \S+ is back after", said)
    assert training.record()["recoveries"] == []
    assert training.digest() == undisturbed
