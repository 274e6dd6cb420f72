"""Process 1 of a host, run by hosts.py in namespaces of its own: ``power_on.py NAME MTU OWN ADDRESS...``.

It makes the host what it is, sends its network devices (one an address: eth0, eth1, ...) over the socket that is its
stdin, and waits there for the end of that socket. Its own end is that of the host: the kernel kills every other process
of the host with it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import uuid
from pathlib import Path

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def main(name: str, mtu: str, own: str, *addresses: str) -> None:
    socket.sethostname(name)
    system("mount", "-t", "tmpfs", "-o", "size=2g", "none", "/dev/shm")
    system("mount", "-t", "tmpfs", "none", own)
    boot_id = Path(own) / "boot_id"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    system("mount", "--bind", str(boot_id), BOOT_ID)
    devices = [plug(f"eth{number}", address, mtu) for number, address in enumerate(addresses)]
    system("ip", "link", "set", "lo", "up")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans of the host are children of this process: no zombies
    with socket.socket(fileno=0) as outside:
        socket.send_fds(outside, [b"up"], devices)
        for device in devices:
            os.close(device)
        outside.recv(1)


def plug(name: str, address: str, mtu: str) -> int:
    """Make a network device; returns its file."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    within = [f"{address}/64", "nodad"] if ":" in address else [f"{address}/24"]  # nobody else can have it
    system("ip", "address", "add", *within, "dev", name)
    system("ip", "link", "set", name, "mtu", mtu, "up")
    return device


def system(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
