"""What MkDocs calls while it builds the site: adds pages from the repository, fills in generated parts.

A line ``<!-- generated: NAME -->`` in a page is replaced by what PARTS[NAME] returns, so that no list of settings,
commands, metrics or errors can lag behind the code. SVG pictures become part of the page and take its colours.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.hooks import commands, failures, metrics, repository, results, settings

PARTS: dict[str, Callable[[str], str]] = {
    "settings": lambda _: settings.page(),
    "commands": lambda _: commands.page(),
    "lab": lambda _: commands.lab_page(),
    "metrics": lambda _: metrics.page(),
    "errors": lambda _: failures.page(),
    "results": results.tables,
}
_PART = re.compile(r"^<!-- generated: (\w+) ?(.*?) -->$", re.M)
_PICTURE = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+\.svg)\)$", re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents of the repository that the navigation names, and every file that a page links to."""
    waiting = [posixpath.join("docs", one.src_uri) for one in files.documentation_pages()]
    waiting += [repository.in_repository(page) for page in _named(config.nav) if page.startswith(repository.REPOSITORY)]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not (repository.ROOT / path).is_file():  # MkDocs itself warns of what is not there
            continue
        seen.add(path)
        if not path.startswith(repository.DOCS):
            files.append(_file(path, config))
        if path.endswith(".md"):
            waiting += repository.targets((repository.ROOT / path).read_text(), path)
    return files


def _named(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for one in nav.values() if isinstance(nav, dict) else nav or ():
            yield from _named(one)


def _file(path: str, config: MkDocsConfig) -> File:
    place = repository.in_site(path)
    if place.startswith(repository.SOURCE):
        return File.generated(config, place, content=repository.source_page(path))
    return File.generated(config, place, abs_src_path=str(repository.ROOT / path))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A page's text with generated parts, pictures, and links as the site has them."""
    path = repository.in_repository(page.file.src_uri)
    if page.file.src_uri.startswith(repository.SOURCE):
        return markdown
    markdown = _PART.sub(lambda match: PARTS[match[1]](match[2]), markdown)
    markdown = repository.outside_fences(markdown, lambda text: _PICTURE.sub(lambda m: _figure(m, path), text))
    return repository.with_links_of_site(markdown, path)


def _figure(match: re.Match[str], path: str) -> str:
    drawn = (repository.ROOT / posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))).read_text()
    drawing = re.sub(r"\s*\n\s*", "", drawn.partition("?>")[2] or drawn)
    return f'<figure class="drawing" role="img" aria-label="{match[1]}">{drawing}</figure>'
