"""Tiny Hugging Face models with random weights, made offline, and a batch for each.

Every hidden size is a multiple of 64, so that no parameter is padded and single-rank results can be bit-equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCAB = 128


def gpt2(dropout: float = 0.0, **settings: Any) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=64,
            n_embd=64,
            n_layer=3,
            n_head=2,
            bos_token_id=1,
            eos_token_id=None,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            **settings,
        )
    )


def llama(**settings: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**_decoder(), **settings))


def qwen3(**settings: Any) -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**_decoder(), head_dim=32, tie_word_embeddings=True, **settings))


def mixtral(**settings: Any) -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(**_decoder(), num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, **settings)
    )


def _decoder() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }


def t5(**settings: Any) -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=64,
            d_kv=32,
            d_ff=128,
            num_layers=2,
            num_heads=2,
            pad_token_id=0,
            eos_token_id=None,
            decoder_start_token_id=0,
            dropout_rate=0.0,
            **settings,
        )
    )


def bert(**settings: Any) -> nn.Module:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=128,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **settings,
        )
    )


def vit(**settings: Any) -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=128,
            image_size=16,
            patch_size=8,
            num_labels=5,
            **settings,
        )
    )


MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "gpt2": gpt2,
    "llama": llama,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "t5": t5,
    "bert": bert,
    "vit": vit,
}
GENERATING = ("gpt2", "llama", "qwen3", "mixtral", "t5")


def batch(name: str, step: int, rank: int = 0, *, size: int = 2, length: int = 12) -> dict[str, Tensor]:
    """A rank's keyword arguments for a step, always the same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if name == "vit":
        return {
            "pixel_values": torch.randn(size, 3, 16, 16, generator=generator),
            "labels": torch.randint(0, 5, (size,), generator=generator),
        }
    ids = torch.randint(2, VOCAB, (size, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, -3:] = 0  # padded on the right
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
