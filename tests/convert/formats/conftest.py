"""The states that every folder of these tests has."""

from __future__ import annotations

import pytest

from .foreign import States


@pytest.fixture
def states() -> States:
    return States.random()
