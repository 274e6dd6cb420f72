"""The page of a sweep: docs/sweeps/FAMILY.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .trial import OUTCOMES, Outcome

PAGES = Path(__file__).parents[2] / "docs" / "sweeps"

_LONGEST = 200  # characters of a reason


def page(title: str, intro: str, packages: list[str], outcomes: Mapping[str, Outcome], command: str) -> str:
    """The text of a page: what was tried with which packages, how much of it came out how, and each case's row."""
    counts = Counter(outcome.kind for outcome in outcomes.values())
    summary = ", ".join(f"{kind} {counts[kind]}" for kind in OUTCOMES if counts[kind])
    tried = ", ".join(f"{name} {_version(name)}" for name in packages)
    rows = [f"| `{name}` | {outcome.kind} | {_cell(outcome.why)} |" for name, outcome in outcomes.items()]
    return "\n".join(
        [
            f"# {title}",
            "",
            intro.strip(),
            "",
            f"Made by `{command}` with {tried}. Of {len(outcomes)} cases: {summary}.",
            "",
            "| case | RayZero | why |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def write(family: str, text: str) -> Path:
    """Write a family's page and return its path."""
    PAGES.mkdir(exist_ok=True)
    path = PAGES / f"{family}.md"
    path.write_text(text)
    return path


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def _cell(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
