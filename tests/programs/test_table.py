"""README.md has a row for every case, and no other."""

from __future__ import annotations

import pytest

from .engines import cases_of, categories
from .table import README, Table


def test_every_case_has_its_recorded_row_and_every_row_its_case(table: Table) -> None:
    recorded = {category: list(rows) for category, rows in table.rows.items()}
    assert recorded == {category: [case.name for case in cases_of(category)] for category in categories()}
    for rows in table.rows.values():
        for name, row in rows.items():
            assert row.rayzero in ("same", "refused"), name
            assert row.fsdp2 in ("same", "refused", "wrong", "hangs", "error", "runs"), name


def test_the_readme_is_made_of_what_was_recorded(table: Table, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--record", False):
        README.write_text(table.render())
    assert README.read_text() == table.render(), "run pytest tests/programs --record, and with --engine fsdp2"
