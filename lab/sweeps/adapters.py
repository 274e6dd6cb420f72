"""PEFT's tuners on a tiny Llama and a tiny GPT-2, each with its own defaults but for sizes."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import peft
import torch
import transformers
import transformers.models.gpt2.modeling_gpt2  # here, not in each case's process
import transformers.models.llama.modeling_llama
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import Tensor, nn

from .beside import trained_beside_plain
from .trial import Case, Outcome

TITLE = "PEFT's tuners"
INTRO = """
Each tuner of PEFT on a Llama and on a GPT-2 of three small layers trains three steps as a causal language model: with
plain PyTorch (AdamW, fused, fp32), and with RayZero in the same process and with the smallest budget that it takes, so
that units come and go. *same*: all weights, the frozen ones too, and losses are equal bit for bit. *not tried*: PEFT
refuses the tuner for this model, or wants data or files of its own.
"""
PACKAGES = ["peft", "transformers", "torch"]

_VOCAB, _TOKENS = 128, 12
_SIZES: dict[str, Any] = {
    "r": 4,
    "num_virtual_tokens": 3,
    "adapter_len": 3,
    "adapter_layers": 2,
    "total_step": 10,
    "block_size": 8,
    "n_frequency": 16,
    "projection_prng_key": 1,
    "num_vectors": 16,
    "vector_length": 4,
    "encoder_hidden_size": 16,
    "task_type": "CAUSAL_LM",
    "rank": 4,
    "oft_block_size": 4,
    "boft_block_size": 4,
    "num_tasks": 1,
}
_TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}
_OWN: dict[str, dict[str, Any]] = {  # where the sizes above do not fit together
    "IA3": {"feedforward_modules": []},
    "LN_TUNING": {"target_modules": ["input_layernorm", "norm", "ln_1", "ln_f"]},
    "TRAINABLE_TOKENS": {"target_modules": None, "token_indices": [1, 2, 30]},
    "ADAPTION_PROMPT": {"target_modules": None},
    "OFT": {"r": 0},
    "BOFT": {"boft_block_num": 0},
    "CPT": {
        "cpt_token_ids": [1, 2, 3],
        "cpt_tokens_type_mask": [1, 2, 4],
        "cpt_mask": [1, 1, 1],
        "num_virtual_tokens": None,
    },
}
_LORA: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True},
    "rsLoRA": {"use_rslora": True},
    "PiSSA": {"init_lora_weights": "pissa"},
    "OLoRA": {"init_lora_weights": "olora"},
    "all linear layers": {"target_modules": "all-linear"},
    "the embeddings": {"target_modules": ["embed_tokens", "wte"]},
    "the head is trained, too": {"modules_to_save": ["lm_head"]},
    "some tokens are trained, too": {"trainable_token_indices": [1, 2, 30]},
    "biases": {"bias": "all"},
    "dropout": {"lora_dropout": 0.1},
}


def cases() -> Iterator[Case]:
    """A case for each tuner and model, and more for LoRA."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for base in _TARGETS:
        for kind in PEFT_TYPE_TO_CONFIG_MAPPING:
            yield Case(f"{kind.value} on {base}", partial(_case, base, kind.value, {}))
        for name, options in _LORA.items():
            yield Case(f"LORA on {base}: {name}", partial(_case, base, "LORA", options))


def _case(base: str, kind: str, options: dict[str, Any]) -> Outcome:
    return trained_beside_plain(partial(_adapted, base, kind, options), _loss)


def _adapted(base: str, kind: str, options: dict[str, Any]) -> nn.Module:
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)]
    fields = {field.name for field in dataclasses.fields(config_class)}
    wanted = _SIZES | {"target_modules": _TARGETS[base]} | _OWN.get(kind, {}) | options
    config = config_class(**{name: value for name, value in wanted.items() if name in fields and value is not None})
    model: nn.Module = peft.get_peft_model(_base(base), config)
    return model


def _base(name: str) -> transformers.PreTrainedModel:
    if name == "gpt2":
        small = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64, vocab_size=_VOCAB)
        return transformers.GPT2LMHeadModel(small)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=_VOCAB, max_position_embeddings=64,
        )
    )  # fmt: skip


def _loss(model: nn.Module, step: int) -> Tensor:
    ids = torch.randint(10, _VOCAB, (2, _TOKENS), generator=torch.Generator().manual_seed(step))
    loss: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
    return loss
