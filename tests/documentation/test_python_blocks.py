"""The Python blocks of the pages run, one after the other, each page as if in a process of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import rayzero
from rayzero.engine.context import RankContext, running_in

from .blocks import DOCUMENTS, PAGES, Block, blocks
from .setups import SETUPS, SHORTER

pytestmark = pytest.mark.thorough

PYTHON = {page: [one for one in blocks(page) if one.language == "python"] for page in DOCUMENTS}
STARTS_RAY = "docs/start.md"  # test_start_page.py runs its blocks, with those of the shell


def shortened(block: Block) -> str:
    text = block.text
    for long, short in SHORTER.get(block.page, ()):
        text = text.replace(long, short)
    return text


@pytest.mark.parametrize("block", [one for found in PYTHON.values() for one in found], ids=str)
def test_every_block_is_python(block: Block) -> None:
    ast.parse(block.text)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("page", [page for page in ("README.md", *PAGES) if PYTHON[page] and page != STARTS_RAY])
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"torch": torch, "rayzero": rayzero} | (SETUPS[page]() if page in SETUPS else {})
    ran = 0
    with running_in(RankContext()):
        for block in PYTHON[page]:
            if block.why_not is None:
                exec(compile(shortened(block), str(block), "exec"), names)
                ran += 1
    assert ran or all(block.why_not for block in PYTHON[page])
    if page in SHORTER:
        assert any(shortened(block) != block.text for block in PYTHON[page])
