"""The blocks of code in the repository's documents."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
ROOMS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "rayzero").glob("*/README.md"))
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "deploy/README.md",
    "lab/README.md",
    "dashboards/README.md",
    *ROOMS,
    *PAGES,
]

_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>.+?) -->\n)?^(?P<indent> *)```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str
    title: str | None
    why_not: str | None  # it is run only without this

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """All of a document."""
    text = (ROOT / page).read_text()
    return [
        Block(
            page=page,
            line=text.count("\n", 0, found.start("language")) + 1,
            language=found["language"],
            text=textwrap.dedent(found["text"]),
            title=found["title"],
            why_not=found["why"],
        )
        for found in _BLOCK.finditer(text)
    ]


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of ours in a shell block, or after a prompt in a transcript; those of the lab begin
    with "lab". What stands between a command and the end of its line (a comment, ``&``, a redirection, a pipe) is left
    out."""
    text = block.text.replace("\\\n", " ")
    if block.language != "bash":
        typed = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ rayzero")]
        text = "\n".join(line.partition("   ")[0] for line in typed)  # a transcript may say the seconds behind it
    for line in text.splitlines():
        for part in re.split(r"&&", line):
            words = shlex.split(part, comments=True)
            for at, word in enumerate(words):
                if word in ("rayzero", ".venv/bin/rayzero") or words[at : at + 2] == ["-m", "lab"]:
                    yield list(_until_shell(words[at + 1 :]))
                    break


def _until_shell(words: list[str]) -> Iterator[str]:
    for word in words:
        if word in ("&", "|", ">", "<", "…"):
            return
        yield word
