"""The recipe: every wrong setting is one line, and the model it names is the same on every rank."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import nn

from rayzero.errors import ConfigError
from rayzero.recipes.lm import lr_factor, optimizers, param_groups
from rayzero.recipes.model import GPT, build_model
from rayzero.recipes.recipe import GPTConfig, RecipeConfig, load_recipe

HF_CONFIG = {
    "model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 256,
}  # fmt: skip


def test_a_recipe_survives_yaml():
    recipe = RecipeConfig(
        data=["a.txt", "b"], zero={"precision": "bf16"}, clip=None, betas=[0.8, 0.9], run={"name": "x"}
    )
    assert RecipeConfig.from_yaml(recipe.to_yaml()) == recipe


def test_overrides_reach_every_group(tmp_path):
    (tmp_path / "recipe.yaml").write_text("steps: 5\nzero: {overlap: none}\nlr: 1e-4\n")
    overrides = ["zero.prefetch_buffer_size=3", "precision=bf16", "scaling.num_workers=4", "data=[a, b]"]
    recipe = load_recipe(tmp_path / "recipe.yaml", overrides)
    assert (recipe.steps, recipe.lr, recipe.zero.overlap, recipe.zero.prefetch_buffer_size) == (5, 1e-4, "none", 3)
    assert (recipe.zero.precision, recipe.scaling.num_workers, recipe.data) == ("bf16", 4, ("a", "b"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=three", "steps is 'three' but must be a valid integer"),
        ("lr=-1", "lr is -1"),
        ("zero.prcision=bf16", "unknown setting 'prcision'.*did you mean 'precision'"),
        ("dim=65", "dim 65 must split into 4 heads of an even size"),
        ("model=bert", "must be 'gpt' or 'hf:<config.json>'"),
        ("data=[]", "must be a file, folder, glob or 'stdlib'"),
        ("zero.max_grad_norm=0.5", "clip is 1.0 and zero.max_grad_norm is 0.5; set one of them"),
        ("betas=[0.9, 1.0]", "betas"),
        ("gradient_accumulation_steps=0", "gradient_accumulation_steps is 0"),
        ("run.report_to=[[csv]]", r"report_to is \['csv'\] but must be 'tensorboard', 'wandb'"),
        ("num_layers=10001", "num_layers is 10001 but must be less than or equal to 10000"),
        ("dim=2097152", "dim is 2097152 but must be less than or equal to 1048576"),
        ("batch_size=1000000001", "batch_size is 1000000001 but must be less than or equal to 1000000000"),
        ("max_data_bytes=9000000TiB", "max_data_bytes is '9000000TiB' but must be less than"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_one_line_that_names_it(override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(None, [override])
    assert "\n" not in str(caught.value)


def test_clip_is_what_the_step_clips_with():
    assert RecipeConfig(clip=0.5).zero_config.max_grad_norm == 0.5
    assert RecipeConfig(clip=None, zero={"max_grad_norm": 2.0}).zero_config.max_grad_norm == 2.0
    assert RecipeConfig(clip=None).zero_config.max_grad_norm is None


def test_paths_are_made_absolute_and_names_are_not(tmp_path):
    recipe = RecipeConfig(data=["stdlib", "text/*.txt", "/abs"], tokenizer="tok.json", model="hf:c.json").at(tmp_path)
    assert recipe.data == ("stdlib", str(tmp_path / "text/*.txt"), "/abs")
    assert recipe.tokenizer == str(tmp_path / "tok.json")
    assert recipe.model == f"hf:{tmp_path / 'c.json'}"
    assert recipe.init_from is None
    assert recipe.replace(init_from="weights").at(tmp_path).init_from == str(tmp_path / "weights")
    assert RecipeConfig().at(tmp_path).tokenizer == "bytes"


def test_the_learning_rate_rises_then_falls_to_its_floor():
    recipe = RecipeConfig(steps=100, warmup=0.1, min_lr_ratio=0.2)
    factors = [lr_factor(recipe, step) for step in range(101)]
    assert factors[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert factors[10] == 1.0
    assert all(a > b for a, b in itertools.pairwise(factors[10:100]))
    assert factors[99] == factors[100] == pytest.approx(0.2)
    assert lr_factor(RecipeConfig(steps=1, warmup=0.0), 0) == 1.0


def test_the_model_is_the_same_on_every_rank_and_leaves_the_random_state_alone():
    recipe = RecipeConfig(dim=32, num_layers=2)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = build_model(recipe, 256)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    second = build_model(recipe, 256)
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    third = build_model(recipe.replace(seed=1), 256)
    assert not torch.equal(third.embed.weight, first.embed.weight)


def test_a_token_sees_only_what_came_before_it():
    model = GPT(GPTConfig(vocab_size=50, seq_len=16, num_layers=2, num_heads=2, dim=16))
    tokens = torch.randint(0, 50, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 50
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_positions_matter():
    model = GPT(GPTConfig(vocab_size=50, seq_len=8, num_layers=1, num_heads=2, dim=16))
    torch.nn.init.normal_(model.embed.weight)
    torch.nn.init.normal_(model.blocks[0].attention.qkv.weight, std=0.5)
    torch.nn.init.normal_(model.blocks[0].attention.out.weight, std=0.5)
    with torch.no_grad():
        one, other = model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[2, 1, 3]]))
    assert not torch.allclose(one[0, -1], other[0, -1])


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_may_share_the_embedding(tied):
    model = GPT(GPTConfig(vocab_size=50, seq_len=8, num_layers=1, num_heads=2, dim=16, tie_embeddings=tied))
    assert (model.head.weight is model.embed.weight) is tied


def test_a_sequence_longer_than_the_model_is_refused():
    model = GPT(GPTConfig(vocab_size=50, seq_len=8, num_layers=1, num_heads=2, dim=16))
    with pytest.raises(ConfigError, match="9 tokens, the model was built for seq_len 8"):
        model(torch.zeros(1, 9, dtype=torch.long))


def test_matrices_decay_and_vectors_do_not():
    recipe = RecipeConfig(dim=32, weight_decay=0.3)
    model = build_model(recipe, 256)
    matrices, vectors = param_groups(recipe, model)
    assert {p.dim() for p in matrices["params"]} == {2}
    assert {p.dim() for p in vectors["params"]} == {1}
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


def test_muon_gets_the_matrices_of_blocks_and_adamw_everything_else():
    recipe = RecipeConfig(dim=32, num_layers=2, optimizer="muon", lr=0.02, weight_decay=0.3)
    model = build_model(recipe, 256)
    names = {id(param): name for name, param in model.named_parameters()}
    muon, adamw = optimizers(recipe, model)
    (group,) = muon.param_groups
    parts = ("qkv.weight", "out.weight", "up.weight", "down.weight")
    assert all(names[id(param)].startswith("blocks.") and names[id(param)].endswith(parts) for param in group["params"])
    assert len(group["params"]) == 2 * 4
    assert (group["lr"], group["weight_decay"], group["adjust_lr_fn"]) == (0.02, 0.3, "match_rms_adamw")
    others = {names[id(param)] for group in adamw.param_groups for param in group["params"]}
    assert {"embed.weight", "head.weight", "norm.weight", "blocks.0.mlp.up.bias"} <= others
    assert len(others) + 8 == len(names)
    with pytest.raises(ConfigError, match=r"the model has no nn.ModuleList with matrices"):
        optimizers(recipe, nn.Linear(3, 3))
    with pytest.raises(ConfigError, match=r"zero.moments is 'int8', but optimizer=muon keeps its states in fp32"):
        recipe.replace(zero={"moments": "int8"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_positions": 16}, "has 16 positions, but seq_len is 32"),
        ({"vocab_size": 100}, "vocab_size 100, the tokenizer has 256 tokens"),
        ({"model_type": "nonsense"}, "not the config of a causal language model"),
    ],
)
def test_a_transformers_config_that_does_not_fit_is_one_line(tmp_path, change, message):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG | change))
    with pytest.raises(ConfigError, match=message) as caught:
        build_model(RecipeConfig(model=f"hf:{tmp_path / 'config.json'}", seq_len=32), 256)
    assert "\n" not in str(caught.value)


def test_a_missing_transformers_config_is_named(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=r"no such file .*missing\.json"):
        build_model(RecipeConfig(model=f"hf:{tmp_path / 'missing.json'}"), 256)
