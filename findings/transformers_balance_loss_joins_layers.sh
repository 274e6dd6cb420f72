#!/usr/bin/env bash
# transformers 5.23.0: a mixture of experts of which each layer uses one expert only can have the balance loss of a perfect one.
#
# Expected: the load balancing loss looks at each router: a layer that sends all tokens to one of its experts has the
#   largest loss there is (the number of experts), a layer that shares them evenly the smallest (1).
# Seen: load_balancing_loss_func joins the tokens of all layers before it counts, so layers balance each other. With four
#   layers of four experts, a model of which each layer sends every token to one expert, but to another number in each
#   layer, has the loss 1.00, as one whose routers choose evenly. If it is the same number in all layers, the loss is 4.00,
#   though the two models differ only in how experts are numbered. At 1.00 the loss is at its least, so it pushes no token
#   away. A balanced loss in the log does not say that any layer is balanced. Mixtral, Qwen3-MoE and OLMoE share the code.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 torch==2.13.0 numpy==2.4.6
cat >"$folder/layers.py" <<'PY'
import sys

import torch
import transformers
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

LAYERS = EXPERTS = 4
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": LAYERS,
         "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 1, "output_router_logits": True}
MODELS = {
    "Mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=EXPERTS)),
    "Qwen3Moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, moe_intermediate_size=32, head_dim=16)),
    "OLMoE": lambda: OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=EXPERTS)),
}


def balance(kind: str, chosen: list[int] | None) -> tuple[float, list[int]]:
    """(balance loss, experts that have a token, by layer) when layer i's router prefers expert ``chosen[i]``; None: none."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    assert len(routers) == LAYERS
    if chosen is not None:
        # All tokens have one direction in common, which the router reads: it sends each of them to its expert.
        with torch.no_grad():
            for norm in (layer.post_attention_layernorm for layer in model.model.layers):
                norm.weight.zero_()
                norm.weight[0] = 1.0
            model.model.embed_tokens.weight[:, 0] = 50.0
            for router, expert in zip(routers, chosen, strict=True):
                router.weight.zero_()
                router.weight[expert, 0] = 10.0
    answer = model(input_ids=torch.randint(64, (8, 128)))
    used = [len(logits.reshape(-1, EXPERTS).argmax(-1).unique()) for logits in answer.router_logits]
    return round(answer.aux_loss.item(), 2), used


found = {}
for kind in MODELS:
    found[kind] = {"even": balance(kind, None), "each layer its own": balance(kind, list(range(LAYERS))),
                   "all the same": balance(kind, [0] * LAYERS)}
print(f"transformers {transformers.__version__}, torch {torch.__version__}: (balance loss, used experts by layer) of "
      f"{EXPERTS}, by how routers choose:")
for kind, values in found.items():
    print(f"  {kind}: {values}")
for values in found.values():
    (even, shared), (each, used), (same, also) = values["even"], values["each layer its own"], values["all the same"]
    if not (shared == [EXPERTS] * LAYERS and used == also == [1] * LAYERS and even < 1.1 and each < 1.01 and same > 3.9):
        sys.exit(1)
PY
"$folder/venv/bin/python" "$folder/layers.py" 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
