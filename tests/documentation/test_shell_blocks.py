"""Command lines of ours in the documents: the command exists and takes these options and these settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from docs.hooks.commands import lab_parser
from rayzero.cli import app
from rayzero.config import apply_overrides
from rayzero.errors import RayZeroError
from rayzero.recipes.recipe import RecipeConfig

from .blocks import DOCUMENTS, ROOT, Block, blocks, commands

GROUP: Any = typer.main.get_command(app)
LINES = [(one, words) for page in DOCUMENTS for one in blocks(page) for words in commands(one)]


def check(words: list[str]) -> None:
    """Raise if the command line would be refused for its own sake, before it looks at any file or machine."""
    name, *rest = words
    if name == "lab":
        parser = lab_parser(rest[0])
        if rest[0] == "plan":  # the others are options of the package's command
            check(["plan", *parser.parse_known_args(rest[1:])[1]])
        elif parser is not None:
            parser.parse_args(rest[1:])
        return
    if name.startswith("--"):
        assert not rest
        assert name in {option for parameter in GROUP.params for option in parameter.opts}
        return
    command = GROUP.commands[name]
    context = command.make_context(name, rest)
    if name in ("train", "plan"):
        settings = [one for one in context.params["arguments"] or () if "=" in one]
        RecipeConfig.from_mapping(apply_overrides({}, settings))


@pytest.mark.parametrize(("block", "words"), LINES, ids=[f"{one}-{' '.join(words)[:50]}" for one, words in LINES])
def test_a_command_line_is_one_that_rayzero_takes(block: Block, words: list[str]) -> None:
    if "$SET" in words:  # a transcript's own variable
        words.remove("$SET")
    check(words)


def test_there_are_lines_of_every_command() -> None:
    of_every_kind = {"train", "scale", "status", "top", "trace", "export", "plan", "doctor", "lab"}
    assert {words[0] for _, words in LINES} >= of_every_kind
    assert len(LINES) > 50


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--stepz", "3"],
        ["train", "zero.precison=bf16"],
        ["train", "zero.precision=fp8"],
        ["status", "--jsn"],
        ["trane"],
        ["lab", "stroe"],
        ["lab", "store", "--mibs", "3"],
    ],
    ids=" ".join,
)
def test_a_wrong_line_is_found(words: list[str]) -> None:
    with pytest.raises((typer.exceptions.TyperException, RayZeroError, KeyError, SystemExit)):
        check(words)


SCRIPTS = [
    (one, word) for page in DOCUMENTS for one in blocks(page) if one.language == "bash" for word in one.text.split()
]


@pytest.mark.parametrize(
    "path", sorted({word for _, word in SCRIPTS if word.startswith(("scripts/", "lab/", "deploy/"))})
)
def test_files_that_command_lines_name_exist(path: str) -> None:
    assert (ROOT / path).exists()


YAML = [one for page in DOCUMENTS for one in blocks(page) if one.language == "yaml"]


@pytest.mark.parametrize("block", YAML, ids=str)
def test_a_yaml_block_is_yaml(block: Block) -> None:
    assert yaml.safe_load(block.text)


def test_the_recipe_of_deploy_is_one() -> None:
    RecipeConfig.from_mapping(yaml.safe_load((Path(ROOT) / "deploy" / "recipe.yaml").read_text()))
