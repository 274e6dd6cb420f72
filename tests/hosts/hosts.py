"""Several hosts on this machine: each has a network, processes, /dev/shm and a boot of its own.

    with hosts(2) as (a, b):
        a.run(["ping", b.address])
        a.cable(b).cut()

A host's processes end with the block. They also end if this process is killed: the host's process 1 notices, and the
kernel kills the others. Hosts share files, as on a cluster with a network file system, except for /dev/shm and
``Host.own``. The clock, memory and processors are the machine's. Only root can have hosts.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from ipaddress import ip_address
from itertools import combinations
from pathlib import Path

import psutil

from .links import MTU, Cable, Switch

_POWER_ON = Path(__file__).with_name("power_on.py")
_NAMESPACES = ("--net", "--mount", "--pid", "--uts", "--ipc")
_TIMEOUT_S = 240.0


class HostsError(Exception):
    """This machine cannot have hosts; says why."""


class Host:
    """One host. ``address``: its IPv4 address, which the others reach; ``addresses``: in each network, that one first.
    ``own``: the path of a folder that each host has for itself."""

    def __init__(self, name: str, addresses: Sequence[str], own: Path) -> None:
        self.name, self.address, self.addresses, self.own = name, addresses[0], tuple(addresses), own
        self._cables: dict[str, Cable] = {}  # by the other end's address
        self._started: list[subprocess.Popen[str]] = []
        command = ["unshare", *_NAMESPACES, "--fork", "--mount-proc", sys.executable, "-I", str(_POWER_ON)]
        command += [name, str(MTU), str(own), *addresses]
        with ExitStack() as on_error:
            self._power_line, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            on_error.enter_context(self._power_line)
            with its_end:
                self._power = subprocess.Popen(command, stdin=its_end.fileno(), stderr=subprocess.PIPE, text=True)
            said, files, _, _ = socket.recv_fds(self._power_line, 2, len(addresses))
            if said != b"up":
                error = self._power.communicate(timeout=_TIMEOUT_S)[1].strip().rpartition("\n")[2]
                raise HostsError(error or f"a host ended with exit code {self._power.returncode}")
            on_error.pop_all()
        self.devices = tuple(files)  # by network
        [process_1] = psutil.Process(self._power.pid).children()
        self._enter = ("nsenter", f"--target={process_1.pid}", *_NAMESPACES)

    def run(
        self, command: Sequence[str], *, timeout: float = _TIMEOUT_S, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the host to its end, in this process's folder and environment with ``env`` over it."""
        return subprocess.run(
            self._entered(command), capture_output=True, text=True, timeout=timeout, env=os.environ | dict(env or {})
        )

    def start(self, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command on the host, with a pipe for its stdin, and one for its stdout and stderr. It ends with the
        host at the latest. To send it a signal, use ``kill`` with the pid that it has on the host: what is returned
        does not pass signals on."""
        started = subprocess.Popen(
            self._entered(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | dict(env or {}),
        )
        self._started.append(started)
        return started

    def _entered(self, command: Sequence[str]) -> list[str]:
        return [*self._enter, f"--wdns={os.getcwd()}", "--", *command]

    def kill(self, pid: int, signal: int = 9) -> None:
        """``pid``: as processes of the host know it."""
        done = self.run(["kill", f"-{signal}", str(pid)])
        assert done.returncode == 0, f"{self.name}: {done.stderr}"

    def give_ports(self, ports: range) -> None:
        """From here on, who asks for any port gets one of these."""
        given = f"net.ipv4.ip_local_port_range={ports[0]} {ports[-1]}"
        assert self.run(["sysctl", "-w", given]).returncode == 0

    def drop_answers(self, mine: range, theirs: range) -> None:
        """Be a firewall: whoever connects from ``theirs`` to one of these ports of this host hears nothing."""
        between = ["sport", f"{mine[0]}-{mine[-1]}", "dport", f"{theirs[0]}-{theirs[-1]}"]
        done = self.run(["ip", "rule", "add", "ipproto", "tcp", *between, "blackhole"])
        assert done.returncode == 0, done.stderr

    @property
    def device(self) -> int:
        """The end of its cables in the first network."""
        return self.devices[0]

    def cable(self, other: Host) -> Cable:
        """What is between this host and another one in the first network."""
        return self._cables[other.address]

    def plug(self, other: Host) -> dict[frozenset[int], Cable]:
        """Lay the cables to another host, one a network; by the devices at their ends."""
        laid = {}
        for mine, others, at, to in zip(self.addresses, other.addresses, self.devices, other.devices, strict=True):
            self._cables[others] = other._cables[mine] = laid[frozenset((at, to))] = Cable((at, to))
        return laid

    def passed(self) -> list[int]:
        """Bytes that its devices have sent and received so far, by network, as its kernel counts them."""
        table = self.run(["cat", "/proc/net/dev"]).stdout.splitlines()
        counts = {
            name.strip(): list(map(int, rest.split())) for name, _, rest in (one.partition(":") for one in table[2:])
        }
        return [counts[f"eth{number}"][0] + counts[f"eth{number}"][8] for number in range(len(self.addresses))]

    def sent_to(self, other: Host) -> int:
        """Bytes that have reached the other host, with the headers of their packets."""
        return self.cable(other).sent[self.device]

    def power_off(self) -> None:
        """End the host at once, with all its processes. Nobody is told: no packet says that a connection has ended.
        Idempotent."""
        for cable in self._cables.values():
            cable.cut()
        self._power_line.close()
        self._power.wait(_TIMEOUT_S)

    def close(self) -> None:
        """End the host, and its devices, which no switch may use any more."""
        self.power_off()
        for device in self.devices:
            os.close(device)
        for process in (self._power, *self._started):
            process.communicate(timeout=_TIMEOUT_S)  # closes its pipes


@contextmanager
def hosts(count: int, *more: str) -> Iterator[tuple[Host, ...]]:
    """``count`` hosts, with a cable between each two. ``more``: how addresses begin in further networks ("10.88.0.",
    "fd00:88::"), which have devices and cables of their own. Raises HostsError if there can be none here."""
    with ExitStack() as ends:
        own = Path(
            ends.enter_context(tempfile.TemporaryDirectory(prefix="rz-hosts-", dir="/tmp"))
        )  # short: sockets lie there
        made: list[Host] = []
        for number in range(1, count + 1):
            try:
                addresses = [f"{begin}{number}" for begin in ("10.77.0.", *more)]
                made.append(Host(f"host-{number}", addresses, own))
            except OSError as error:
                raise HostsError(str(error)) from error
            ends.callback(made[-1].close)
        cables = {ends: cable for a, b in combinations(made, 2) for ends, cable in a.plug(b).items()}
        devices = {
            ip_address(address).packed: device
            for host in made
            for address, device in zip(host.addresses, host.devices, strict=True)
        }
        switch = Switch(devices, cables)
        ends.callback(switch.close)
        yield tuple(made)


@cache
def why_no_hosts() -> str | None:
    """Why this machine cannot have hosts; None if it can."""
    try:
        with hosts(1):
            return None
    except HostsError as error:
        return f"no hosts can be made here: {error}"
