"""Small configs of transformers' models, made by shrinking the default one of each, without a list of models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

_MOST = 60_000_000  # parameters of a model that is tried

_Shrink = Callable[[int], int]


def _at_most(most: int) -> _Shrink:
    return lambda value: min(value, most)


_COUNTS: dict[str, _Shrink] = {
    r"(^|_)vocab_size(_|$)": _at_most(160),
    r"_token_id$|_token_index$": _at_most(3),
    r"(^|_)(n|num)_(\w+_)?layers?$|^(encoder|decoder)_layers$|^depth$|^num_blocks$": _at_most(2),
    r"position": _at_most(64),
    r"^(n|num|moe_num)_(\w+_)?experts$|^n_routed_experts$": _at_most(4),
    r"experts_per_tok|^moe_k$|^moe_topk$|^top_k_experts$|^topk_group$|^n_group$": _at_most(2),
}
_WIDTHS: dict[str, _Shrink] = {
    r"^(hidden_size|d_model|n_embd|embed_dim|dim|emb_dim|encoder_dim)$": _at_most(32),
    r"(intermediate_size|ffn_dim|d_ff|n_inner|mlp_dim|feedforward_dim|ffn_hidden_size)$": _at_most(48),
    r"(key_value_heads|kv_heads)$": _at_most(2),
    r"(attention_heads|^n_heads?|^num_heads)$": _at_most(4),
    r"^(head_dim|d_kv|kv_channels|v_head_dim|qk_nope_head_dim|qk_rope_head_dim)$": _at_most(8),
    r"lora_rank$": _at_most(16),
    r"^image_size$": _at_most(32),
    r"^patch_size$": _at_most(8),
}
_LEVELS = (
    _COUNTS | _WIDTHS,
    _COUNTS | _WIDTHS | {r"(key_value_heads|kv_heads)$": _at_most(4)},
    _COUNTS | {r"(intermediate_size|ffn_dim)$": _at_most(48)},
    _COUNTS,
    {},
)


def tiny_config(model_class: Any) -> Any:
    """A config with which ``model_class`` can be made, as small as the rules make it. Raises the error of the least
    shrunk one if none can."""
    error = Exception()
    for rules in _LEVELS:
        try:
            config = _shrunk(model_class.config_class(), rules)
            with torch.device("meta"):
                model = model_class(config)
        except Exception as exc:  # rules know no model; what does not go together is tried with fewer of them
            error = exc
            continue
        if sum(param.numel() for param in model.parameters()) <= _MOST:
            return config
        error = ValueError(f"each config makes more than {_MOST:,} parameters")
    raise error


def _shrunk(config: Any, rules: dict[str, _Shrink]) -> Any:
    """The config with smaller numbers; what its constructor computes from them is computed again."""
    return type(config)(**dict(_changes(config, rules)))


def _changes(config: Any, rules: dict[str, _Shrink]) -> Iterator[tuple[str, Any]]:
    layers = getattr(config, "num_hidden_layers", None)
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == layers and layers > 2 and rules:
            yield key, value[:2]  # one entry a layer
        elif isinstance(value, transformers.PreTrainedConfig):
            yield key, _shrunk(value, rules)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            for pattern, shrink in rules.items():
                if re.search(pattern, key):
                    yield key, shrink(value)
                    break
