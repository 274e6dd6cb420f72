"""Links between documents become links of the site, and the site's check finds each kind of broken link."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.hooks import links, repository

from .blocks import DOCUMENTS


@pytest.mark.parametrize(
    ("path", "link", "moved"),
    [
        ("docs/start.md", "scaling.md#by-itself", "scaling.md#by-itself"),
        ("docs/howto/scale.md", "../scaling.md", "../scaling.md"),
        ("docs/index.md", "../ARCHITECTURE.md#words", "repository/ARCHITECTURE.md#words"),
        ("docs/howto/lora.md", "../../examples/lora.py", "../source/examples/lora.py.md"),
        ("docs/howto/monitor.md", "../../dashboards", "../repository/dashboards/README.md"),
        ("README.md", "docs/scaling.md", "../scaling.md"),
        ("deploy/README.md", "../SECURITY.md", "../SECURITY.md"),
        ("docs/start.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("docs/start.md", "#install", "#install"),
    ],
)
def test_a_link_in_the_repository_becomes_one_of_the_site(path: str, link: str, moved: str) -> None:
    assert repository.with_links_of_site(f"see [a\npage]({link}).", path) == f"see [a\npage]({moved})."


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_a_document_links_to_exist(document: str) -> None:
    text = (repository.ROOT / document).read_text()
    assert [
        path for path in repository.targets(text, document) if path and not (repository.ROOT / path).is_file()
    ] == []


def test_code_keeps_its_brackets() -> None:
    text = "```python\na[0](x.md)\n```\n[b](x.md)\n"
    assert list(repository.targets(text, "docs/y.md")) == ["docs/x.md"]
    assert repository.with_links_of_site(text, "docs/y.md") == text


def test_a_page_of_the_site_knows_its_file() -> None:
    for path in ("docs/howto/lora.md", "ARCHITECTURE.md", "docs/reference/differences.md", "examples/lora.py"):
        assert repository.in_repository(repository.in_site(path)) == path


SITE = {
    "index.html": '<h1 id="top">A</h1><a href="b/page.html#there">1</a><img src="p.png"><a href="#top">2</a>',
    "b/page.html": '<p id="there"></p><a href="../index.html">3</a><a href="https://example.org/x">4</a>',
    "p.png": "",
}


def made(tmp_path: Path, **changed: str) -> list[str]:
    for name, text in (SITE | {name.replace("__", "/") + ".html": text for name, text in changed.items()}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return list(links.broken(tmp_path))


def test_a_site_without_a_fault_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert made(tmp_path) == []
    assert links.main(str(tmp_path)) == 0
    assert capsys.readouterr().out == "2 pages: every link leads somewhere\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('<a href="c.html">', "index.html: c.html does not exist"),
        ('<a href="b/page.html#gone">', "index.html: b/page.html#gone has no such anchor"),
        ('<a href="#gone">', "index.html: #gone has no such anchor"),
        ('<img src="q.png">', "index.html: q.png does not exist"),
        ('<script src="https://example.org/x.js">', "index.html: loads https://example.org/x.js from another host"),
        ('<link rel="stylesheet" href="//example.org/x">', "index.html: loads //example.org/x from another host"),
        ('<a href="https:///x">', "index.html: https:///x is no address"),
        ('<a href="file:///x">', "index.html: file:///x has a scheme that browsers do not open"),
    ],
)
def test_each_kind_of_broken_link_is_found(tmp_path: Path, text: str, line: str) -> None:
    assert made(tmp_path, index=text) == [line]
    assert links.main(str(tmp_path)) == 1
