"""Texts from the code as Markdown: what would be markup outside of code is escaped."""

from __future__ import annotations

import re

_CODE = re.compile(r"(``.+?``|`[^`]+`)", re.S)


def prose(text: str) -> str:
    """A docstring or help text as one paragraph of Markdown; code between backticks stays as it is."""
    parts = _CODE.split(" ".join(text.split()))
    return "".join(part if part.startswith("`") else re.sub(r"([*_<>|\[\]])", r"\\\1", part) for part in parts)


def cell(text: str) -> str:
    """Code for a cell of a table, in which a bar would end the cell."""
    return f"<code>{text.replace('&', '&amp;').replace('<', '&lt;').replace('|', '&#124;')}</code>"
