"""Checkpoints with the names that transformers publishes: they start our models, and ours become such."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    LlamaModel,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

import rayzero
from rayzero.checkpoint.convert import convert

from .zoo import llama, mixtral, qwen3, vit


def qwen2_vl() -> nn.Module:
    text = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text | heads | rope, vision_config=vision))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "names that change": vit,
    "experts that are merged": mixtral,
    "tied": qwen3,
    "vision and language": qwen2_vl,
    "nothing to do": llama,
}


def filled(model: nn.Module) -> nn.Module:
    """The model, with other values in every place, so that no exchange goes unseen."""
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(torch.rand(param.shape, generator=torch.Generator().manual_seed(number)) - 0.5)
    return model


def empty(build: Callable[[], nn.Module]) -> nn.Module:
    with rayzero.empty_parameters():
        return build()


def started(model: nn.Module, weights: object) -> dict[str, Tensor]:
    """The state of a model that starts from weights."""
    model, _ = rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), weights=weights)  # type: ignore[arg-type]
    return rayzero.full_state_dict(model)


def require_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def saved(model: nn.Module, folder: Path) -> Path:
    """A checkpoint of ours with the model's values, and transformers' config beside it."""
    _, optimizer = rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rayzero.save_checkpoint(optimizer, folder / "step-000000")
    model.config.save_pretrained(folder)
    return folder / "step-000000"


def loaded(kind: type[PreTrainedModel], folder: Path) -> PreTrainedModel:
    """What transformers reads; nothing is missing or left over."""
    assert (folder / "config.json").is_file()  # without one, transformers makes a model of the default size
    model, said = kind.from_pretrained(folder, output_loading_info=True)
    for wrong in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs", "conversion_errors"):
        assert not said.get(wrong), f"{wrong}: {said[wrong]}"
    return model


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_saved_starts_a_model(name: str, tmp_path: Path) -> None:
    model = filled(MODELS[name]())
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    require_equal(started(empty(MODELS[name]), tmp_path), model.state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_checkpoint_is_what_transformers_reads(name: str, tmp_path: Path) -> None:
    model = filled(MODELS[name]())
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    checkpoint = saved(model, tmp_path / "run")
    convert(checkpoint, tmp_path / "hf", max_bytes=100_000)
    require_equal(loaded(type(model), tmp_path / "hf").state_dict(), expected)
    again = filled(MODELS[name]())
    again.save_pretrained(tmp_path / "theirs")
    assert names_in(tmp_path / "hf") == names_in(tmp_path / "theirs")


def names_in(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


def test_a_head_comes_and_goes(tmp_path: Path) -> None:
    """The weights of a causal model start its base model without the head, and the base's start it with a head."""
    whole = filled(llama())
    whole.save_pretrained(tmp_path / "whole")
    base = whole.model
    base.save_pretrained(tmp_path / "base")
    twin = empty(lambda: LlamaModel(whole.config))
    require_equal(started(twin, rayzero.Weights(tmp_path / "whole", strict=False)), base.state_dict())
    other = llama()
    expected = {f"model.{name}": value for name, value in base.state_dict().items()}
    expected["lm_head.weight"] = other.lm_head.weight.detach().clone()
    require_equal(started(other, rayzero.Weights(tmp_path / "base", strict=False)), expected)
