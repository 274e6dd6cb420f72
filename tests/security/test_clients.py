"""Where a client is, its host and perhaps a port; and those that are refused: counted, and told now and then."""

from __future__ import annotations

import pytest
from clock import Clock

from rayzero.security.clients import WARN_EVERY_S, Refusals, host_and_port, host_of
from rayzero.telemetry.names import REFUSED
from rayzero.telemetry.recorder import MemoryRecorder


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


# ---- refused clients ------------------------------------------------------------------------------------------------


@pytest.mark.promise("observable", "tls")
def test_all_are_counted_and_few_are_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayzero.security.clients.monotonic", clock := Clock())
    recorder = MemoryRecorder()
    refusals = Refusals("metrics", recorder)
    for n in range(1000):
        refusals.note("password" if n % 2 else "slow", f"10.0.0.{n % 8}", "it says so")
    assert caplog.messages == ["refused 1 client, the last from 10.0.0.0: it says so"]
    clock.now += WARN_EVERY_S
    refusals.note("slow", "10.0.0.9", "again")
    assert caplog.messages[1:] == ["refused 1,000 clients, the last from 10.0.0.9: again"]
    counted = recorder.counters()[REFUSED]
    assert {dict(labels)["reason"]: value for labels, value in counted.items()} == {"password": 500, "slow": 501}
