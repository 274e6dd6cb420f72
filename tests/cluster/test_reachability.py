"""At which address an owner listens, and the one line for a host that others do not reach."""

from __future__ import annotations

import socket

import pytest

from rayzero.cluster.nodes.reachability import address_to_serve, own_addresses, require_reached, unreachable
from rayzero.config import RunConfig
from rayzero.errors import ConfigError

OWN = ["127.0.0.1", "::1", "10.0.0.4", "192.168.7.4", "fd00::4", "2001:db8::4"]


@pytest.mark.parametrize(
    ("host", "network", "expected"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("127.0.0.1", "10.0.0.0/8", "127.0.0.1"),  # all are on one host
        ("10.0.0.4", None, "10.0.0.4"),
        ("fd00::4", None, "fd00::4"),
        ("node-3.cluster", None, "node-3.cluster"),
        ("10.0.0.4", "192.168.0.0/16", "192.168.7.4"),
        ("10.0.0.4", "10.0.0.0/8", "10.0.0.4"),
        ("10.0.0.4", "fd00::/8", "fd00::4"),
        ("203.0.113.9", "10.0.0.0/24", "10.0.0.4"),  # Ray knows the host by its address outside
        ("2001:db8::4", "::/0", "2001:db8::4"),
    ],
)
def test_an_owner_listens_at_its_nodes_address_or_at_the_one_in_the_network(
    host: str, network: str | None, expected: str
) -> None:
    assert address_to_serve("optimizer 0", host, network, OWN) == expected


@pytest.mark.promise("refused", "hosts")
def test_a_host_behind_nat_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as refused:
        address_to_serve("optimizer 3", "203.0.113.9", None, OWN)
    assert str(refused.value) == (
        "optimizer 3 would listen at 203.0.113.9, its node's address in Ray, but its host has only 10.0.0.4, "
        "192.168.7.4, fd00::4, 2001:db8::4: behind NAT or a proxy the others cannot be told where it is; start Ray "
        "there with --node-ip-address set to one of these that other hosts reach, or set run.network"
    )


def test_a_host_without_an_address_in_the_network_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"run.network is 172.16.0.0/12, but the host of optimizer 1 \(node 10.0.0.4"):
        address_to_serve("optimizer 1", "10.0.0.4", "172.16.0.0/12", OWN)


@pytest.mark.parametrize("network", ["eth0", "", "10.0.0.0/99"])
def test_what_is_no_network_is_refused(network: str) -> None:
    with pytest.raises(ConfigError, match=r"network is .* but must be a network such as 10.0.0.0/8 or fd00::/8"):
        RunConfig(network=network)


def test_this_hosts_addresses_are_those_that_it_can_listen_at() -> None:
    found = own_addresses()
    assert "127.0.0.1" in found
    for address in found:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as listening:
            listening.bind((address, 0))


def test_what_does_not_answer_is_named_with_its_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        there = f"127.0.0.1:{listening.getsockname()[1]}"
        nobody = f"127.0.0.1:{gone.getsockname()[1]}"
        assert unreachable([there, nobody]) == {nobody: "Connection refused"}
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listening:
        assert unreachable([f"[::1]:{listening.getsockname()[1]}"]) == {}


def test_one_that_swallows_everything_takes_its_time_and_no_more() -> None:
    with socket.socket() as full:  # nobody accepts, and the backlog is full
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for connection in waiting:
            connection.setblocking(False)
            connection.connect_ex(full.getsockname())
        address = f"127.0.0.1:{full.getsockname()[1]}"
        assert unreachable([address], timeout_s=0.3) == {address: "no answer within 0.3 s"}
        for connection in waiting:
            connection.close()


def test_both_ends_are_named() -> None:
    owners = {"10.0.0.4:50": "optimizer 0", "10.0.0.5:51": "optimizer 1"}
    tensors = {"10.0.0.4:60": "optimizer 0", "10.0.0.5:61": "optimizer 1"}
    require_reached({"10.0.0.4": {}, "10.0.0.5": {}}, owners, tensors)
    answers = {"10.0.0.4": {"10.0.0.5:61": "y", "10.0.0.5:51": "no answer within 5 s"}, "10.0.0.6": {}}
    with pytest.raises(ConfigError) as refused:
        require_reached(answers, owners, tensors)
    assert str(refused.value).startswith(
        "the host 10.0.0.4 cannot connect to optimizer 1 at 10.0.0.5:51: no answer within 5 s (and 1 more such pair); "
        "open the ports between the hosts, or, if a host has several networks or is behind NAT, set run.network"
    )

    with pytest.raises(ConfigError) as refused:
        require_reached({"10.0.0.5": {"10.0.0.4:60": "Connection refused"}}, owners, tensors)
    said = str(refused.value)
    assert said.startswith("the host 10.0.0.5 reaches optimizer 0, but not its port for tensors, 10.0.0.4:60: Connec")
    assert said.endswith("open every port of the optimizer actors' hosts to them: owners take free ones")
