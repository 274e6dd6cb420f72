"""Documents and files outside of ``docs/`` in the site: which page each one is, and where links between them lead.

A document of the repository, such as ARCHITECTURE.md, is the page ``repository/ARCHITECTURE.md``. Any other file that a
page links to becomes a page that shows its text, below ``source/``; pictures are copied. So no link leaves the site.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS, REPOSITORY, SOURCE = "docs/", "repository/", "source/"
PICTURES = (".png", ".svg")
_EXTERNAL = re.compile(r"[a-z]+:|#|/")
_FENCE = re.compile(r"^( *)(```+)[^`\n]*\n.*?^\1\2 *$\n?", re.M | re.S)
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\()([^)\s]+)(\))")


def in_repository(page: str) -> str:
    """The path in the repository of a page of the site, both relative to their roots."""
    for below in (REPOSITORY, SOURCE):
        if page.startswith(below):
            return page.removeprefix(below).removesuffix(".md" if below == SOURCE else "")
    return DOCS + page


def in_site(path: str) -> str:
    """The page, or the copied picture, of a file of the repository."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    if path.endswith((".md", *PICTURES)):
        return REPOSITORY + path
    return f"{SOURCE}{path}.md"


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """``change`` applied to everything that is not in a fenced block of code."""
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def targets(text: str, path: str) -> Iterator[str]:
    """The files of the repository that a document links to. ``path``: its own."""
    found: list[str] = []

    def note(prose: str) -> str:
        found.extend(match[2] for match in _LINK.finditer(prose) if not _EXTERNAL.match(match[2]))
        return prose

    outside_fences(text, note)
    for link in found:
        yield _resolve(link.partition("#")[0], path)


def with_links_of_site(text: str, path: str) -> str:
    """A document with its links as the site has them. ``path``: its own, in the repository."""
    here = posixpath.dirname(in_site(path))

    def moved(match: re.Match[str]) -> str:
        if _EXTERNAL.match(match[2]):
            return match[0]
        link, hash_, anchor = match[2].partition("#")
        target = in_site(_resolve(link, path))
        return f"{match[1]}{posixpath.relpath(target, here or '.')}{hash_}{anchor}{match[3]}"

    return outside_fences(text, lambda prose: _LINK.sub(moved, prose))


def _resolve(link: str, path: str) -> str:
    """The file that a link leads to; of a folder its README.md."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return f"{target}/README.md" if (ROOT / target).is_dir() else target


def source_page(path: str) -> str:
    """The page that shows a file's text."""
    language = {"py": "python", "c": "c", "yaml": "yaml", "json": "json", "proto": "protobuf"}
    kind = language.get(path.rpartition(".")[2], "text")
    text = (ROOT / path).read_text()
    return f"# {posixpath.basename(path)}\n\n`{path}`\n\n``````{kind}\n{text}\n``````\n"
