"""Marks of tests that need what not every machine has."""

from __future__ import annotations

import pytest

from rayzero.store.shm import signals

shared_memory = pytest.mark.skipif(signals.why_no_sharing() is not None, reason="no shared memory here")
signals_between_processes = pytest.mark.skipif(
    signals.available() is not None, reason="no signals between processes here"
)
