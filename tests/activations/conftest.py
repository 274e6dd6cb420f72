"""One compute thread, so that bits do not depend on how work is split and copy threads find a core."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass
