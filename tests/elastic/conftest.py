"""What runs that are disturbed are compared with."""

from __future__ import annotations

from typing import Any

import pytest

from .disturbed import undisturbed


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By rank, what a run ends with that nothing happens to."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))
