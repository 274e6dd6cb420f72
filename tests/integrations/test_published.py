"""Checkpoints with the names that transformers publishes: they start our models, and ours become such. A follower gives
those of an export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    LlamaModel,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    TrainingArguments,
    conversion_mapping,
    core_model_loading,
)
from transformers.core_model_loading import ConversionOps, WeightConverter

import rayzero
from rayzero import ZeroConfig
from rayzero.convert.conversion import convert
from rayzero.convert.translation import with_model_names
from rayzero.convert.weights import declare_weight
from rayzero.engine.context import RankContext
from rayzero.engine.start.initial_values import require_weights
from rayzero.errors import CheckpointError, ConfigError, UnsupportedError
from rayzero.integrations.transformers import Trainer, save_pretrained
from rayzero.testing import run_ranks
from tests.support import needs

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


SOURCES: Mapping[str, Callable[[nn.Module, Path], object]] = {
    "folder": lambda model, folder: saved_by_transformers(model, folder),
    "mapping": lambda model, folder: published_by(model, folder),
    "stream": lambda model, folder: rayzero.Weights(iter(published_by(model, folder).items())),
    "stream, backwards": lambda model, folder: iter(list(published_by(model, folder).items())[::-1]),
    "mapping of its own names": lambda model, folder: model.state_dict(),
    "stream of its own names": lambda model, folder: ((key, value) for key, value in model.state_dict().items()),
}


def saved_by_transformers(model: nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


def published_by(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_published_starts_a_model(name: str, source: str, tmp_path: Path) -> None:
    model = filled(MODELS[name]())
    require_equal(started(empty(MODELS[name]), SOURCES[source](model, tmp_path)), model.state_dict())


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


def test_published_weights_become_a_checkpoint_to_resume_from(tmp_path: Path) -> None:
    model = filled(mixtral())
    model.save_pretrained(tmp_path / "published")
    convert(tmp_path / "published", tmp_path / "start", to="rayzero")
    twin = empty(mixtral)
    twin, _ = rayzero.prepare(twin, torch.optim.AdamW(twin.parameters()), resume=tmp_path / "start")
    require_equal(rayzero.full_state_dict(twin), model.state_dict())


def test_what_save_pretrained_of_ours_wrote_starts_a_model(tmp_path: Path) -> None:
    model = filled(mixtral())
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    prepared, _ = rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    save_pretrained(prepared, tmp_path)
    require_weights(empty(mixtral), str(tmp_path))  # what a recipe with init_from asks first
    require_equal(started(empty(mixtral), tmp_path), expected)


def test_a_stream_without_strict_loses_no_published_name(tmp_path: Path) -> None:
    """Names that the model lacks are left out then: the experts' would be."""
    model = filled(mixtral())
    stream = rayzero.Weights(iter(published_by(model, tmp_path).items()), strict=False)
    require_equal(started(mixtral(), stream), model.state_dict())


def test_a_stream_may_have_what_from_pretrained_drops(tmp_path: Path) -> None:
    model = filled(llama())
    tensors = published_by(model, tmp_path)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    require_equal(started(empty(llama), iter((old | tensors).items())), model.state_dict())
    with pytest.raises(CheckpointError, match=r"the model lacks 'model\.layers\.9"):
        started(empty(llama), iter((tensors | {"model.layers.9.weight": torch.ones(8)}).items()))


def test_a_stream_holds_a_merged_tensors_parts_and_no_more(tmp_path: Path) -> None:
    tensors = sorted(published_by(filled(mixtral()), tmp_path).items())
    model = mixtral()
    held = {name: declare_weight(name, value) for name, value in model.state_dict().items()}
    taken = 0

    def counted() -> Iterator[tuple[str, Tensor]]:
        nonlocal taken
        for item in tensors:
            taken += 1
            yield item

    at = {name: taken for name, _ in with_model_names(model, held, counted(), "the stream")}
    numbers = {name: number for number, (name, _) in enumerate(tensors, start=1)}
    for layer in range(len(model.model.layers)):
        last = max(number for name, number in numbers.items() if f"layers.{layer}.block_sparse_moe.experts" in name)
        experts = [name for name in held if f"layers.{layer}." in name and "experts" in name]
        assert experts
        assert max(at[name] for name in experts) == last


def test_a_stream_that_ends_within_a_merged_tensor_is_refused(tmp_path: Path) -> None:
    tensors = sorted(published_by(filled(mixtral()), tmp_path).items())
    lost = next(name for name, _ in tensors if "experts.1.w1" in name)
    with pytest.raises(CheckpointError, match=r"experts.*gate_up_proj"):
        started(empty(mixtral), (item for item in tensors if item[0] != lost))


def test_a_name_that_comes_twice_within_a_merged_tensor_is_refused(tmp_path: Path) -> None:
    tensors = sorted(published_by(filled(mixtral()), tmp_path).items())
    twice = next(item for item in tensors if "experts.0.w1" in item[0])
    with pytest.raises(CheckpointError, match=r"experts\.0\.w1\.weight' comes twice"):
        started(empty(mixtral), iter([twice, *tensors]))


def test_the_written_config_says_the_dtype_that_was_written(tmp_path: Path) -> None:
    """from_pretrained makes a model in the dtype of its config: one that says bf16 would round fp32 masters."""
    model = filled(llama(dtype=torch.bfloat16))
    checkpoint = saved(model, tmp_path / "run")
    for dtype in (None, torch.bfloat16):
        convert(checkpoint, tmp_path / str(dtype), dtype=dtype)
        read = loaded(type(model), tmp_path / str(dtype))
        assert read.dtype == (dtype or torch.float32)
        for name, value in model.state_dict().items():
            assert torch.equal(read.state_dict()[name], value.to(read.dtype)), name


def test_a_config_of_another_model_leaves_the_names_and_says_so(tmp_path: Path) -> None:
    checkpoint = saved(filled(llama()), tmp_path / "run")
    mixtral().config.save_pretrained(tmp_path / "run")
    done = convert(checkpoint, tmp_path / "hf")
    assert "under their own names, because" in str(done)
    assert "is of no model that has them" in str(done)
    assert not (tmp_path / "hf" / "config.json").exists()


def test_a_config_may_be_given_by_its_folder_and_without_one_the_names_are_said(tmp_path: Path) -> None:
    model = filled(mixtral())
    checkpoint = saved(model, tmp_path / "run")
    for file in (tmp_path / "run").rglob("config.json"):
        file.unlink()
    said = str(convert(checkpoint, tmp_path / "plain"))
    assert "under their own names, because no config.json is beside it: --config FILE gives the published ones" in said
    model.config.save_pretrained(tmp_path / "described")
    convert(checkpoint, tmp_path / "hf", config=tmp_path / "described")
    read = loaded(type(model), tmp_path / "hf").state_dict()
    assert all(torch.equal(read[name], value) for name, value in model.state_dict().items())


def test_a_config_that_is_none_of_transformers_is_refused_if_it_was_asked_for(tmp_path: Path) -> None:
    checkpoint = saved(filled(llama()), tmp_path / "run")
    (tmp_path / "mine.json").write_text('{"lr": 0.1}')
    with pytest.raises(ConfigError, match=r"mine.json names no model_type; give the config.json"):
        convert(checkpoint, tmp_path / "hf", config=tmp_path / "mine.json")
    (tmp_path / "run" / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": "many"}')
    with pytest.raises(CheckpointError, match=r"config.json makes no model of transformers"):
        convert(checkpoint, tmp_path / "hf")


class Halved(ConversionOps):
    """An operation that computes."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        return {target_patterns[0]: next(iter(input_dict.values()))[0] / 2}

    @property
    def reverse_op(self) -> ConversionOps:
        return Halved()


def test_an_operation_that_computes_is_refused_by_name_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = filled(llama())
    model.save_pretrained(tmp_path / "published")
    checkpoint = saved(filled(llama()), tmp_path / "run")
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # fills the cache
    mapping = [WeightConverter("self_attn.q_proj.weight", "self_attn.q_proj.weight", operations=[Halved()])]
    known = dict(conversion_mapping._checkpoint_conversion_mapping_cache) | {"llama": mapping}
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", known)
    says = r"needs transformers' Halved, which cannot be streamed: div makes values"
    with pytest.raises(UnsupportedError, match=rf"'model.layers.0.self_attn.q_proj.weight' {says}"):
        started(empty(llama), tmp_path / "published")
    with pytest.raises(UnsupportedError, match=says):
        convert(checkpoint, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_experts_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    published = published_by(filled(mixtral()), tmp_path)
    expert = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    with pytest.raises(CheckpointError, match=r"gate_up_proj' cannot be made by transformers' MergeModulelist"):
        started(empty(mixtral), published | {expert: torch.zeros(3, 3)})
    del published[expert]
    with pytest.raises(CheckpointError, match=r"gate_up_proj' cannot be made by|has the shape"):
        started(empty(mixtral), published)


def test_a_version_of_transformers_without_the_mapping_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixtral().save_pretrained(tmp_path)
    monkeypatch.delattr(core_model_loading, "rename_source_key")
    with pytest.raises(UnsupportedError, match=r"has no core_model_loading.rename_source_key, which says how"):
        started(empty(mixtral), tmp_path)


def test_the_best_checkpoint_comes_back_whole(tmp_path: Path) -> None:
    """transformers 5.23 loads it with the published names as they are, which leaves experts as they were."""
    best = filled(mixtral())
    best.save_pretrained(tmp_path / "best")
    args = TrainingArguments(output_dir=str(tmp_path / "out"), report_to="none", use_cpu=True)
    trainer = Trainer(model=mixtral(), args=args)
    trainer.state.best_model_checkpoint = str(tmp_path / "best")
    trainer._load_best_model()
    require_equal(trainer.model.state_dict(), best.state_dict())
    again = Trainer(model=mixtral(), args=args)
    again._load_from_checkpoint(str(tmp_path / "best"))
    require_equal(again.model.state_dict(), best.state_dict())


# ---- a follower -----------------------------------------------------------------------------------------------------


@needs.shared_memory
@pytest.mark.spread(2)
@pytest.mark.parametrize("build", [mixtral, qwen3, vit, llama], ids=["experts", "tied", "renamed", "as they are"])
def test_a_version_has_the_names_shapes_and_bits_of_its_export(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    base, target = build(), build().bfloat16()
    assert isinstance(base, PreTrainedModel)
    base.config.save_pretrained(tmp_path)

    def train(context: RankContext) -> None:
        model, optimizer = rayzero.prepare(
            base, torch.optim.SGD(base.parameters(), lr=0.1), ZeroConfig(precision="bf16", shard_bytes="32KiB")
        )
        sum(parameter.float().square().sum() for parameter in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
        rayzero.save_checkpoint(optimizer, tmp_path / "step-1")
        convert(tmp_path / "step-1", tmp_path / "hf", dtype=torch.bfloat16)
        exported = load_file(tmp_path / "hf" / "model.safetensors")
        follower = rayzero.follow(context.run, config=tmp_path / "config.json")
        followed = dict(follower.read(1))
        assert followed.keys() == exported.keys() == follower.declared.keys()
        for name, tensor in exported.items():
            assert followed[name].dtype == tensor.dtype, name
            assert torch.equal(followed[name], tensor), name
        assert follower.into(target) == 1  # under the names of its parameters
        whole = rayzero.full_state_dict(model)
        assert all(torch.equal(tensor, whole[name].bfloat16()) for name, tensor in target.named_parameters())

    run_ranks(train, 1, 2, "shm")
