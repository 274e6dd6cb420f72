"""transformers' architectures: one model of each type, shrunk from its default config, on made-up inputs."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
import transformers.models.llama.modeling_llama  # what most types import: here, not in each case's process
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .beside import project, trained_beside_plain
from .trial import NOT_TRIED, Case, Outcome

TITLE = "transformers' architectures"
INTRO = """
One class of each model type, with random weights and a config that is shrunk from its default, trains three steps on
made-up inputs: with plain PyTorch (AdamW, fused, fp32), and with RayZero in the same process and with the smallest
budget that it takes, so that units come and go. *same*: weights and losses are equal bit for bit. *not tried*: the
model does not train here with plain PyTorch either: its default config cannot be shrunk this way, its inputs are not
known to this sweep, or a package is missing.
"""
PACKAGES = ["transformers", "torch"]

# Tasks in the order in which a type's class is looked for.
_TASKS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_TEXT_TO_TEXT",
    "IMAGE_CLASSIFICATION",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "OBJECT_DETECTION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "TIME_SERIES_PREDICTION",
    "SEQUENCE_CLASSIFICATION",
)
_VOCAB, _TOKENS, _IMAGE = 128, 12, 32

# What a shrunk config has, where its default has a number by this name.
_SIZES = {
    "vocab_size": _VOCAB,
    "text_vocab_size": _VOCAB,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "model_dim": 32,
    "embed_dim": 32,
    "word_embed_proj_dim": 32,
    "embedding_size": 32,
    "d_embed": 32,
    "ffn_hidden_size": 64,
    "intermediate_size": 64,
    "d_ff": 64,
    "n_inner": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "hidden_dim": 64,
    "d_inner": 64,
    "ffn_dim": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "num_hidden_layers": 3,
    "num_layers": 3,
    "n_layer": 3,
    "n_layers": 3,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "depth": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "attention_head_dim": 8,
    "d_head": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_num_experts": 4,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_topk": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_sequence_length": 64,
    "n_ctx": 64,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "first_k_dense_replace": 1,
    "image_size": _IMAGE,
    "patch_size": 8,
    "num_channels": 3,
    "projection_dim": 32,
    "num_mel_bins": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "state_size": 16,
    "conv_dim": 32,
    "attention_window": 8,
    "lru_width": 32,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_DERIVED = (  # follow from sizes, or count layers: a shrunk config makes its own
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "attention_types",
    "rope_scaling",
    "rope_parameters",
    "id2label",
    "label2id",
)


def cases() -> Iterator[Case]:
    """A case for each model type that has a class for one of the tasks, by both names."""
    logging.disable(logging.WARNING)  # what transformers says of made-up configs
    seen: set[str] = set()
    for task in _TASKS:
        for kind, classes in getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            name = classes if isinstance(classes, str) else classes[0]
            if kind not in seen and kind in CONFIG_MAPPING:
                seen.add(kind)
                yield Case(f"{kind}: {name}", partial(_case, kind, name))


def _case(kind: str, name: str) -> Outcome:
    try:
        cls = getattr(transformers, name)
        config = shrunk(CONFIG_MAPPING[kind])
        inputs = _inputs_that_work(cls, config)
    except Exception as exc:  # the edge to foreign libraries: what they raise without RayZero
        return Outcome(NOT_TRIED, f"{type(exc).__name__}: {exc}")

    def loss(model: nn.Module, step: int) -> Tensor:
        outputs = model(**_made(inputs, config, cls, step))
        found = outputs.get("loss")
        return project(outputs, step) if found is None else found

    return trained_beside_plain(partial(cls, config), loss)


def shrunk(cls: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A config of this class with small sizes. Raises whatever the class raises for them."""
    default = cls()
    values = {
        name: value
        for name, value in default.to_dict().items()
        if name in inspect.signature(cls).parameters and name not in _DERIVED and name not in cls.sub_configs
    }
    small = {name: _small(name, value) for name, value in values.items() if _small(name, value) != value}
    for name in cls.sub_configs:
        sub = getattr(default, name)
        if isinstance(sub, PreTrainedConfig):
            small[name] = shrunk(type(sub))
    return cls(**small)


def _small(name: str, value: Any) -> Any:
    if name.endswith("_token_id") and isinstance(value, int) and value >= 10:
        return sum(map(ord, name)) % 10  # inputs have none of them
    if type(value) is int and name in _SIZES:
        return min(value, _SIZES[name]) if value > 0 else value
    return value


# ---- inputs -----------------------------------------------------------------------------------------------------

Inputs = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def _inputs_that_work(cls: Any, config: PreTrainedConfig) -> Inputs:
    """The first of the inputs that a model of this class takes. Raises what it raises for the last."""
    torch.manual_seed(0)
    model = cls(config).train()
    takes = inspect.signature(model.forward).parameters
    last: Exception = ValueError(f"no known inputs: {', '.join(takes)[:120]}")
    for inputs in _candidates(config, model.main_input_name):
        if not inputs.keys() <= takes.keys():
            continue
        try:
            with torch.no_grad():
                model(**_made(inputs, config, cls, 0))
            return inputs
        except Exception as exc:  # the next one may fit
            last = exc
    raise last


def _candidates(config: PreTrainedConfig, main: str) -> Iterator[Inputs]:
    text = getattr(config, "text_config", config)
    vision = getattr(config, "vision_config", config)
    size, channels = getattr(vision, "image_size", None) or _IMAGE, getattr(vision, "num_channels", 3)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
    ids: Inputs = {"input_ids": (torch.int64, (2, _TOKENS))}
    decoder: Inputs = {"decoder_input_ids": (torch.int64, (2, _TOKENS))}
    image: Inputs = {"pixel_values": (torch.float32, (2, channels, height, width))}
    mels = getattr(config, "num_mel_bins", 16)
    speech: list[Inputs] = [
        {"input_features": (torch.float32, (2, mels, 2 * (getattr(config, "max_source_positions", None) or 32)))},
        {"input_features": (torch.float32, (2, 64, mels))},
        {"input_values": (torch.float32, (2, 4000))},
        {"input_values": (torch.float32, (2, 1, 4000))},
        {"input_values": (torch.float32, (2, getattr(config, "max_length", None) or 64, mels))},
    ]
    if main == "input_ids" or text is not config:
        yield ids | decoder if config.is_encoder_decoder else ids
        yield ids
    yield image
    yield ids | image
    yield {"pixel_values": (torch.float32, (2, getattr(config, "num_frames", 2), channels, height, width))}
    for each in speech:
        yield each | decoder if config.is_encoder_decoder else each
        yield each
    length = getattr(config, "context_length", None) or 32
    yield {"past_values": (torch.float32, (2, length, getattr(config, "num_input_channels", 1)))}
    yield {"past_values": (torch.float32, (2, length))}


def _made(inputs: Inputs, config: PreTrainedConfig, cls: Any, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    made = {
        name: torch.randint(10, _VOCAB, shape, generator=generator)
        if dtype is torch.int64
        else torch.randn(shape, generator=generator)
        for name, (dtype, shape) in inputs.items()
    }
    if cls.__name__.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")) and made.keys() == {"input_ids"}:
        made["labels"] = made["input_ids"]
    return made
