"""Which address an owner listens at, and whether the other hosts of a run reach it."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence

import psutil

from rayzero.errors import ConfigError
from rayzero.quantities import count
from rayzero.security.clients import host_and_port, is_loopback
from rayzero.store.wire.tensor_streams import LET_THROUGH

CONNECT_S = 5.0


def own_addresses() -> list[str]:
    """The IPv4 and IPv6 addresses of this host's interfaces, without those of one link only (RFC 3927, RFC 4291)."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = [each.address for all_of in psutil.net_if_addrs().values() for each in all_of if each.family in families]
    addresses = [ipaddress.ip_address(address.partition("%")[0]) for address in found]
    return [str(address) for address in addresses if not address.is_link_local]


def address_to_serve(who: str, host: str, network: str | None, own: Sequence[str]) -> str:
    """The address at which ``who`` listens, and which the run's other processes are told.

    host: its node's address in Ray, or loopback. network: ``run.network``; None: any. own: of its host's interfaces.

    Raises ConfigError if its host has no such address: behind NAT, others know it by one that it does not have."""
    if is_loopback(host):
        return host
    there = [address for address in own if not is_loopback(address)]
    if network is None:
        if host in own or not _is_address(host):  # a name is the resolver's matter
            return host
        raise ConfigError(
            f"{who} would listen at {host}, its node's address in Ray, but its host has only {', '.join(there)}: "
            "behind NAT or a proxy the others cannot be told where it is; start Ray there with --node-ip-address set "
            "to one of these that other hosts reach, or set run.network"
        )
    within = [address for address in there if ipaddress.ip_address(address) in ipaddress.ip_network(network)]
    if not within:
        raise ConfigError(
            f"run.network is {network}, but the host of {who} (node {host}) has only {', '.join(there) or 'loopback'}; "
            "pass a network that has an address of every host"
        )
    return host if host in within else within[0]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def unreachable(addresses: Sequence[str], timeout_s: float = CONNECT_S) -> dict[str, str]:
    """Those of some host:port to which this process cannot open a connection, and why."""

    async def why_not(address: str) -> str | None:
        host, port = host_and_port(address)
        try:
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection(host, port)
            writer.transport.abort()
        except TimeoutError:
            return f"no answer within {timeout_s:g} s"
        except OSError as error:
            return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        return None

    async def all_of_them() -> list[str | None]:
        return await asyncio.gather(*map(why_not, addresses))

    found = zip(addresses, asyncio.run(all_of_them()), strict=True)
    return {address: why for address, why in found if why is not None}


def require_reached(
    answers: Mapping[str, Mapping[str, str]], owners: Mapping[str, str], tensors: Mapping[str, str]
) -> None:
    """Raise ConfigError, naming both ends, if a host does not reach an owner. answers: by host, what ``unreachable``
    says there. owners: address -> its owner's name; tensors: the same for connections for tensors."""
    pairs = [(host, address, why) for host, failed in answers.items() for address, why in failed.items()]
    if not pairs:
        return
    host, address, why = next((pair for pair in pairs if pair[1] in owners), pairs[0])
    others = f" (and {count(len(pairs) - 1, 'more such pair')})" if len(pairs) > 1 else ""
    if address in owners:
        raise ConfigError(
            f"the host {host} cannot connect to {owners[address]} at {address}: {why}{others}; open the ports "
            "between the hosts, or, if a host has several networks or is behind NAT, set run.network to the one "
            "that all of them share"
        )
    raise ConfigError(
        f"the host {host} reaches {tensors[address]}, but not its port for tensors, {address}: {why}{others}; "
        f"{LET_THROUGH}"
    )
