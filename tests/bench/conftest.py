"""Contestants' processes do not spin while they wait for a core: tests run beside others."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _patient_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
