"""Where a process is: its host, and perhaps a port."""

from __future__ import annotations

import pytest

from rayzero.security.addresses import host_and_port, host_of


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("10.0.0.1:6379", "10.0.0.1"),
        ("node-1:80", "node-1"),
        ("[::1]:50", "::1"),
        ("[fe80::1]", "fe80::1"),
        ("fe80::1", "fe80::1"),
        ("node-1", "node-1"),
    ],
)
def test_the_host_of_an_address(address: str, host: str) -> None:
    assert host_of(address) == host


def test_a_host_and_its_port() -> None:
    assert host_and_port("10.0.0.1:6379") == ("10.0.0.1", 6379)
    assert host_and_port("[::1]:50") == ("::1", 50)
    with pytest.raises(ValueError, match="node-1"):
        host_and_port("node-1")
