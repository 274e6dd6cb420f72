"""Hosts are apart in what makes a host, reach each other over cables that can be spoiled, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rayzero.concurrency.processes import this_process
from rayzero.store.shm.signals import host_identity
from tests.support.leftovers import files_left, open_files

from .hosts import Host, hosts, why_no_hosts

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
    pytest.mark.thorough,
]

SERVER = """
import hashlib, socket, sys
with socket.create_server((sys.argv[1], 5001)) as server:
    print("ready", flush=True)
    while True:
        caller, content = server.accept()[0], hashlib.sha256()
        while part := caller.recv(1 << 16):
            content.update(part)
        caller.sendall(content.digest())
        caller.close()
"""
"""Answers whatever it is sent with its hash."""

CLIENT = """
import hashlib, os, socket, sys, time
content = os.urandom(int(sys.argv[2]))
began = time.monotonic()
with socket.create_connection((sys.argv[1], 5001), timeout=float(sys.argv[3])) as server:
    print("connected", flush=True)
    server.sendall(content)
    server.shutdown(socket.SHUT_WR)
    server.settimeout(20)
    assert server.recv(100) == hashlib.sha256(content).digest()
print(time.monotonic() - began)
"""


def serve(host: Host, address: str) -> None:
    server = host.start([sys.executable, "-c", SERVER, address])
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"


def call(host: Host, address: str, num_bytes: int = 1, patience_s: float = 10.0) -> subprocess.CompletedProcess[str]:
    return host.run([sys.executable, "-c", CLIENT, address, str(num_bytes), str(patience_s)])


def seconds(host: Host, address: str, num_bytes: int = 1) -> float:
    """How long a call took that arrived whole."""
    done = call(host, address, num_bytes)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])


def soonest(host: Host, address: str, within_s: float, num_bytes: int = 1) -> float:
    """How long the first of five calls took that took less than ``within_s``, else that: a busy machine slows some."""
    return next((took for _ in range(5) if (took := seconds(host, address, num_bytes)) < within_s), within_s)


def sent_in_a_call(host: Host, other: Host, num_bytes: int) -> int:
    before = host.sent_to(other)
    seconds(host, other.address, num_bytes)
    return host.sent_to(other) - before


@pytest.fixture(scope="module")
def three() -> Iterator[tuple[Host, ...]]:
    """Hosts of which each answers at its address."""
    with hosts(3) as made:
        for host in made:
            serve(host, host.address)
        yield made


def test_each_reaches_the_others_at_their_addresses(three: tuple[Host, ...]) -> None:
    for host in three:
        seconds(host, host.address, 100_000)
        for other in set(three) - {host}:  # what a busy machine answers late is sent again
            assert any(100_000 < sent_in_a_call(host, other, 100_000) < 110_000 for _ in range(5))


@pytest.mark.parametrize("folder", ["/dev/shm", "own"])
def test_each_has_files_of_its_own(folder: str, three: tuple[Host, ...]) -> None:
    a, b, _ = three
    mine = Path(a.own if folder == "own" else folder) / "test-hosts"
    a.run(["touch", str(mine)])
    assert a.run(["ls", str(mine)]).returncode == 0
    assert b.run(["ls", str(mine)]).returncode != 0
    assert not mine.exists()


def test_each_is_a_host_of_its_own_to_who_would_share_memory_or_watch_processes(three: tuple[Host, ...]) -> None:
    ask = "from rayzero.store.shm.signals import host_identity as host\n"
    ask += "from rayzero.concurrency.processes import this_process as process\nprint(host(), process().kernel)"
    asked = [host.start([sys.executable, "-c", ask]) for host in three[:2]]
    told = [process.communicate(timeout=100)[0].split() for process in asked]
    told.append([host_identity(), this_process().kernel])
    assert all(len(identities) == 2 for identities in told), told
    for identities in zip(*told, strict=True):
        assert len({identity.partition(":")[0] for identity in identities}) == 3, "three boots"


def test_a_cable_that_is_cut_swallows_everything_until_it_is_mended(three: tuple[Host, ...]) -> None:
    a, b, c = three
    a.cable(b).cut()
    assert "TimeoutError" in call(a, b.address, patience_s=0.5).stderr, "nobody is told"
    seconds(a, c.address)
    seconds(c, b.address)
    a.cable(b).mend()
    seconds(a, b.address)


def test_a_slow_cable_takes_as_long_as_its_rate_says(three: tuple[Host, ...]) -> None:
    a, b, _ = three
    a.cable(b).bytes_per_s = 1e6  # 8 Mbit/s
    slow = soonest(a, b.address, 4.0, 1_000_000)
    a.cable(b).mend()
    assert 0.8 < slow < 4.0
    assert soonest(a, b.address, slow / 2, 1_000_000) < slow / 2


def test_a_long_cable_delays_both_ways(three: tuple[Host, ...]) -> None:
    a, b, _ = three
    a.cable(b).delay_s = 0.1
    late = soonest(a, b.address, 2.0)
    a.cable(b).mend()
    assert 0.4 < late < 2.0, "two round trips: the connection, then question and answer"


def test_nothing_is_left(tmp_path: Path) -> None:
    files = open_files()
    with hosts(2) as (a, b):
        for host in (a, b):
            host.run(["sh", "-c", f"setsid sleep 1000 >{tmp_path}/said 2>&1 & touch /dev/shm/test-x {host.own}/x"])
        spaces = {host.run(["readlink", "/proc/self/ns/net"]).stdout.strip() for host in (a, b)}
        assert len(spaces) == 2
        assert spaces <= network_spaces()
        a.power_off()
        assert len(spaces & network_spaces()) == 1
        assert "TimeoutError" in call(b, a.address, patience_s=0.2).stderr
    assert spaces & network_spaces() == set()
    assert not a.own.exists()
    assert not Path("/dev/shm/test-x").exists()
    assert files_left(files) == 0


def network_spaces() -> set[str]:
    """The network namespaces of all processes."""
    spaces = set()
    for space in Path("/proc").glob("[0-9]*/ns/net"):
        with suppress(OSError):  # its process has ended
            spaces.add(str(space.readlink()))
    return spaces
