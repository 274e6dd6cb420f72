"""Texts from the code as Markdown: what would be markup outside of code is escaped."""

from __future__ import annotations

import re

_CODE = re.compile(r"(``.+?``|`[^`]+`)", re.S)


def prose(text: str) -> str:
    """A docstring or help text as one paragraph of Markdown; code between backticks stays as it is."""
    parts = _CODE.split(" ".join(text.split()))
    return "".join(part if part.startswith("`") else _plain(part) for part in parts)


def _plain(text: str) -> str:
    return re.sub(r"([*_>|\[\]])", r"\\\1", text).replace("<", "&lt;")
