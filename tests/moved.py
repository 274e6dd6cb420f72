"""What the processes of a finished run counted."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path


def bytes_moved(run: Path, role: str = "rank") -> dict[tuple[str, str], float]:
    """Bytes that travelled, by transport and direction. ``role``: of the processes that counted them."""
    moved: Counter[tuple[str, str]] = Counter()
    for who, measured in json.loads((run / "run.json").read_text())["measured"].items():
        for series, value in measured.items():
            if who.startswith(role) and series.startswith("rayzero_transfer_bytes_total"):
                labels = dict(re.findall(r'(\w+)="(\w+)"', series))
                moved[labels["transport"], labels["direction"]] += value
    return dict(moved)
