"""The driver's checks before Ray: a recipe is either found able to run, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayzero.cluster.run_lock import RunLock
from rayzero.errors import CheckpointError, ConfigError, DataError, UnsupportedError
from rayzero.recipes.recipe import RecipeConfig
from rayzero.recipes.training import prepare_run


@pytest.fixture
def recipe(tmp_path: Path) -> RecipeConfig:
    (tmp_path / "text.txt").write_bytes(b"to be or not to be. " * 100)
    run = {"storage_path": str(tmp_path / "runs")}
    return RecipeConfig(data=str(tmp_path / "text.txt"), dim=16, num_layers=1, num_heads=2, seq_len=16, run=run)


def test_a_recipe_that_can_run_is_measured_and_nothing_is_written(recipe, tmp_path):
    prepared = prepare_run(recipe)
    assert prepared.num_params == 2 * 256 * 16 + 3 * 2 * 16 + 4 * 16 * 16 + 2 * 4 * 16 * 16 + 5 * 16
    assert (prepared.text.num_files, prepared.resume_step) == (1, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_transformers_model_is_measured_without_allocating_it(recipe, tmp_path):
    pytest.importorskip("transformers")
    huge = {"model_type": "gpt2", "n_layer": 96, "n_head": 96, "n_embd": 12288, "n_positions": 64, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(huge))
    assert prepare_run(recipe.replace(model=f"hf:{tmp_path / 'config.json'}")).num_params > 170e9


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"data": "nowhere"}, DataError, "nowhere"),
        ({"seq_len": 400}, DataError, "the validation split has 200 tokens"),
        ({"zero": {"transport": "inproc"}}, UnsupportedError, "transport='inproc' reaches owners in the same process"),
        ({"model": "hf:nowhere.json"}, ConfigError, "no such file"),
        ({"run": {"resume": True, "storage_path": "nowhere"}}, CheckpointError, "nothing to resume"),
        ({"run": {"resume": "nowhere/step-000001"}}, CheckpointError, "no checkpoint at"),
    ],
)
def test_what_cannot_run_is_refused_by_name(recipe, change, error, message):
    with pytest.raises(error, match=message) as caught:
        prepare_run(recipe.replace(**change))
    assert "\n" not in str(caught.value)


def test_a_run_that_goes_on_is_not_resumed_even_if_it_has_no_checkpoint_yet(recipe, tmp_path):
    resuming = recipe.replace(run={"resume": True, "storage_path": str(tmp_path / "runs")})
    resuming.run.path.mkdir(parents=True)
    with RunLock.take(resuming.run.path), pytest.raises(ConfigError, match="in use by a run that is going on"):
        prepare_run(resuming)
