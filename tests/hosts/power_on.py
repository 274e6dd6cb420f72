"""Process 1 of a host, run by hosts.py in namespaces of its own: ``power_on.py NAME ADDRESS MTU OWN``.

It makes the host what it is, sends its network device over the socket that is its stdin, and waits there for the end of
that socket. Its own end is that of the host: the kernel kills every other process of the host with it.
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


def main(name: str, address: str, mtu: str, own: str) -> None:
    socket.sethostname(name)
    system("mount", "-t", "tmpfs", "-o", "size=2g", "none", "/dev/shm")
    system("mount", "-t", "tmpfs", "none", own)
    boot_id = Path(own) / "boot_id"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    system("mount", "--bind", str(boot_id), BOOT_ID)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
    system("ip", "address", "add", f"{address}/24", "dev", "eth0")
    system("ip", "link", "set", "eth0", "mtu", mtu, "up")
    system("ip", "link", "set", "lo", "up")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans of the host are children of this process: no zombies
    with socket.socket(fileno=0) as outside:
        socket.send_fds(outside, [b"up"], [device])
        os.close(device)
        outside.recv(1)


def system(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
