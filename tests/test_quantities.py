"""Numbers of things, as people write them; and that messages use the one place that knows how."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rayzero
from rayzero.quantities import count

NOUNS = (
    "checkpoint|CPU|file|GPU|host|model|node|optimizer|optimizer actor|owner|process|program|rank|span|step|token|unit"
)


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [(1, "rank", "1 rank"), (0, "rank", "0 ranks"), (2000, "file", "2,000 files"), (1.0, "CPU", "1 CPU"),
     (0.5, "CPU", "0.5 CPUs"), (1, "process", "1 process"), (2, "process", "2 processes")],
)  # fmt: skip
def test_a_count_is_written_as_people_do(number, noun, said):
    assert count(number, noun, *(["processes"] if noun == "process" else [])) == said


def test_no_message_writes_an_ordinal_with_a_full_stop():
    """ "a 2. time" is another language's."""
    number = re.compile(r"\ba \{[^{}]*\}\. [a-z]")
    sources = Path(rayzero.__file__).parent.rglob("*.py")
    assert [str(path) for path in sources if number.search(path.read_text())] == []


def test_no_message_writes_a_plural_after_a_number_by_itself():
    """Rates ("tokens/s") and what comes after "each of" or "all" are never one."""
    number = re.compile(rf"(?<!all )\{{[^{{}}]*\}} ({NOUNS})e?s\b(?!/)")
    sources = Path(rayzero.__file__).parent.rglob("*.py")
    found = [
        f"{path}:{line}: {text.strip()}"
        for path in sources
        for line, text in enumerate(path.read_text().splitlines(), start=1)
        if number.search(text)
    ]
    assert found == []
