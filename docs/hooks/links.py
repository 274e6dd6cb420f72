"""Checks every link of the built site: pages, files and anchors exist; nothing is loaded from another host.

``python docs/hooks/links.py FOLDER``. Links to other hosts are checked for their form alone, so it needs no network.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}


@dataclass
class Seen(HTMLParser):
    """What one page has: its anchors, its links, and what it loads."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag's name, target and source."""
        given = dict(attrs)
        self.anchors.update(value for name in ("id", "name") if (value := given.get(name)))
        if tag == "a" and (target := given.get("href")) is not None:
            self.links.append(target)
        loaded = given.get(_LOADS.get(tag, ""))
        if loaded and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(loaded)


def read(page: Path) -> Seen:
    """What a page has."""
    seen = Seen()
    seen.feed(page.read_text())
    return seen


def broken(site: Path) -> Iterator[str]:
    """A line for each link that leads nowhere, and for each thing that is loaded from another host."""
    pages = {path.resolve(): read(path) for path in sorted(site.rglob("*.html"))}
    for path, seen in pages.items():
        where = path.relative_to(site.resolve())
        for target in seen.loads:
            if urlsplit(target).scheme not in ("", "data") or target.startswith("//"):
                yield f"{where}: loads {target} from another host"
            elif not target.startswith("data:"):
                yield from _lost(site, where, target, {})
        for target in seen.links:
            parts = urlsplit(target)
            if parts.scheme in ("http", "https"):
                if not parts.netloc or " " in target:
                    yield f"{where}: {target} is no address"
            elif parts.scheme not in ("", "mailto"):
                yield f"{where}: {target} has a scheme that browsers do not open"
            elif not parts.scheme:
                yield from _lost(site, where, target, pages)


def _lost(site: Path, where: Path, target: str, pages: dict[Path, Seen]) -> Iterator[str]:
    parts = urlsplit(target)
    base = site if parts.path.startswith("/") else (site / where).parent
    path = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else (site / where).resolve()
    path = path / "index.html" if path.is_dir() else path
    if not path.is_file():
        yield f"{where}: {target} does not exist"
    elif parts.fragment and path in pages and unquote(parts.fragment) not in pages[path].anchors:
        yield f"{where}: {target} has no such anchor"


def main(folder: str) -> int:
    """Print what is broken; returns the exit code."""
    site = Path(folder)
    lines = list(broken(site))
    print("\n".join(lines) or f"{len(list(site.rglob('*.html')))} pages: every link leads somewhere")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
