"""Refused clients are counted by reason, and told now and then."""

from __future__ import annotations

import pytest
from clock import Clock

from rayzero.security.refusals import WARN_EVERY_S, Refusals
from rayzero.telemetry.names import REFUSED
from rayzero.telemetry.recorder import MemoryRecorder


@pytest.mark.promise("observable", "tls")
def test_all_are_counted_and_few_are_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayzero.security.refusals.monotonic", clock := Clock())
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
