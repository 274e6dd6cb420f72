"""``rayzero init`` writes a recipe from the config's own texts: nothing in it can drift from what a run takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner, Result

from rayzero.cli import app
from rayzero.cli.train import choose_recipe
from rayzero.config.text import first_sentence
from rayzero.errors import ConfigError
from rayzero.recipes.recipe import RecipeConfig, load_recipe


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["init", *arguments])


def fields(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        yield name, field.description or ""
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation)


def test_it_says_every_setting_and_is_the_default_recipe_with_and_without_its_marks() -> None:
    done = init()
    assert (done.exit_code, done.stdout.partition(":")[0]) == (0, "recipe.yaml")
    text = Path("recipe.yaml").read_text()
    assert load_recipe(Path("recipe.yaml")) == RecipeConfig()
    live = re.sub(r"^( *)#(?=\w)", r"\1", text, flags=re.MULTILINE)
    assert RecipeConfig.from_yaml(live) == RecipeConfig()
    prose = " ".join(re.sub(r"^ *# ", "", line) for line in text.splitlines())
    for name, description in fields(RecipeConfig):
        assert re.search(rf"^ *#?{name}:", text, re.MULTILINE), name
        assert first_sentence(description) in prose
    assert max(map(len, text.splitlines())) <= 120


def test_the_untouched_recipe_takes_settings_and_options_over_it(folder: Path) -> None:
    init("my.yaml")
    settings = ["lr=3e-4", "zero.precision=bf16", "scaling.num_workers=8", "run.telemetry.port=9100"]
    chosen = choose_recipe(["my.yaml", *settings], {"scaling.num_optimizers": 3}, folder / "runs" / "demo")
    assert (chosen.lr, chosen.zero_config.precision) == (3e-4, "bf16")
    assert (chosen.scaling.num_workers, chosen.scaling.num_optimizers) == (8, 3)
    assert (chosen.run.path, chosen.run.telemetry.port) == (folder / "runs" / "demo", 9100)
    assert choose_recipe(["my.yaml"], {}, None).run.name.startswith("train-"), "a new folder for each run"


def test_given_settings_are_live_and_others_are_not() -> None:
    given = ["steps=50", "precision=bf16", "run.telemetry.port=9100", "scaling.num_optimizers=[1, 4]"]
    assert init("my.yaml", *given).exit_code == 0
    assert load_recipe(Path("my.yaml")) == load_recipe(None, given)
    live = [line.strip() for line in Path("my.yaml").read_text().splitlines() if re.match(r" *\w+: ", line)]
    assert live == ["steps: 50", 'precision: "bf16"', "num_optimizers: [1, 4]", "port: 9100"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["taken.yaml"], "taken.yaml exists already; name another file"),
        (["a.yaml", "b.yaml"], "give one file to write, not a.yaml and b.yaml"),
        (["nowhere/a.yaml"], "cannot write nowhere/a.yaml: No such file or directory"),
        (["stpes=1"], "unknown setting 'stpes' = 1; did you mean 'steps'?"),
        (["zero=1"], "zero must be a group of settings"),
    ],
)
def test_it_refuses_and_writes_nothing(folder: Path, arguments: list[str], message: str) -> None:
    Path("taken.yaml").write_text("steps: 1\n")
    done = init(*arguments)
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("taken.yaml", "steps: 1\n")]
