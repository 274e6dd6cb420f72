"""Tables of lab/RESULTS.md, taken over as they stand there: a page cannot quote what was not measured."""

from __future__ import annotations

import re

from docs.hooks.repository import ROOT

_TABLE = re.compile(r"(?:^\|.*\n)+", re.M)


def section(title: str) -> str:
    """The section of RESULTS.md whose heading begins with ``title``. Raises LookupError if there is none."""
    text = (ROOT / "lab" / "RESULTS.md").read_text()
    for part in re.split(r"^##+ ", text, flags=re.M)[1:]:
        if part.startswith(title):
            return part
    raise LookupError(f"lab/RESULTS.md has no section {title!r}")


def tables(wanted: str) -> str:
    """``NUMBER TITLE``: the table with that number (from 1) of the section with that title."""
    number, _, title = wanted.partition(" ")
    found = _TABLE.findall(section(title))
    return found[int(number) - 1]
