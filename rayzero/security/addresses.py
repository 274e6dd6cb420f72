"""Addresses of processes: a host, perhaps with a port. An IPv6 address before a port is in brackets."""

from __future__ import annotations

import ipaddress

__all__ = ["host_and_port", "host_of", "is_loopback"]


def host_of(address: str) -> str:
    """The host, without brackets."""
    if address.startswith("["):
        return address.rpartition("]")[0].removeprefix("[")
    return address.partition(":")[0] if address.count(":") == 1 else address


def host_and_port(address: str) -> tuple[str, int]:
    """Both; the host without brackets. Raises ValueError without a port."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether an address is reached from its own host only."""
    host = host_of(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
