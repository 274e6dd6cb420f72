"""The pages that promise a behaviour row by row name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {"docs/reference/differences.md": "| the line", "docs/offload_manager.md": "| torsh"}


@pytest.mark.parametrize("page", PAGES)
def test_every_row_names_a_test_that_exists(page: str) -> None:
    rows = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
    rows = [row for row in rows if not row.startswith((PAGES[page], "| left out", "|---"))]
    assert len(rows) > 15
    rows = [row for row in rows if row.count("|") == 4]  # the others say why something is left out
    for row in rows:
        named = re.findall(r"`(tests/[\w/.]+)::(\w+)`", row)
        assert named, f"no test: {row}"
        for path, name in named:
            assert f"def {name}(" in (ROOT / path).read_text(), f"{path} has no {name}"
