"""Hosts with two networks: a run's bytes cross the one that ``run.network`` names, with IPv4 or with IPv6 alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from store.stores import inprocess

from .hosts import Host, hosts, why_no_hosts
from .members import OWNERS, RANKS, digest, give_certificates

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
    pytest.mark.thorough,
]

MEMBERS = str(Path(__file__).with_name("members.py"))
PATH = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
MANAGEMENT, V4, V6 = range(3)  # numbers of networks
CHATTER = 4096  # bytes: a host asks its devices for routers


class Networks:
    """Two hosts with an owner each; ranks are with the first."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self.hosts = hosts
        self._members = [
            host.start([sys.executable, MEMBERS, str(folder), str(owner)], env=PATH) for owner, host in enumerate(hosts)
        ]

    def order(self, owner: int, *words: str) -> str:
        """Have a process do something; returns its answer."""
        pipes = self._members[owner].stdin, self._members[owner].stdout
        assert pipes[0] is not None
        assert pipes[1] is not None
        pipes[0].write(" ".join(words) + "\n")
        pipes[0].flush()
        return pipes[1].readline().strip()

    def owners(self, network: str, *, at: int) -> list[str]:
        """Start both owners, which Ray would know by their hosts' addresses in network ``at``. Returns where they
        listen."""
        listening = [self.order(owner, "serve", host.addresses[at], network) for owner, host in enumerate(self.hosts)]
        for owner in range(OWNERS):
            assert self.order(owner, "connect", *listening) == "connected"
        return listening


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Networks]:
    folder = tmp_path_factory.mktemp("networks")
    give_certificates(folder)
    with hosts(2, "10.88.0.", "fd00:88::") as made:
        yield Networks(made, folder)


@pytest.fixture(scope="module")
def expected() -> str:
    """The digest of the same training in one process."""
    with inprocess(RANKS, OWNERS) as stores:
        return digest(stores)


@pytest.mark.parametrize(
    ("network", "chosen", "begins"),
    [("10.88.0.0/16", V4, "10.88.0."), ("fd00:88::/64", V6, "[fd00:88::"), ("", MANAGEMENT, "10.77.0.")],
)
def test_bytes_cross_the_network_that_the_run_names(
    network: str, chosen: int, begins: str, networks: Networks, expected: str
) -> None:
    before = networks.hosts[1].passed()
    addresses = networks.owners(network, at=MANAGEMENT)
    assert [address.startswith(begins) for address in addresses] == [True, True]
    assert networks.order(0, "train", *addresses) == expected
    passed = [now - was for now, was in zip(networks.hosts[1].passed(), before, strict=True)]
    assert passed[chosen] > 50 * CHATTER
    assert sum(passed) - passed[chosen] < CHATTER


def test_hosts_that_ray_knows_by_ipv6_addresses_alone_train_too(networks: Networks, expected: str) -> None:
    addresses = networks.owners("", at=V6)
    assert all(address.startswith("[fd00:88::") for address in addresses)
    assert networks.order(0, "train", *addresses) == expected
