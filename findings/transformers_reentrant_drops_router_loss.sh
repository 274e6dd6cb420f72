#!/usr/bin/env bash
# transformers 5.23.0: with use_reentrant=True, a mixture of experts trains without its balance loss, which the log shows.
#
# Expected: gradient checkpointing changes memory and time, not gradients, and both of torch's kinds do so for a decoder.
# Seen: with use_reentrant=False all gradients are those without checkpointing. With True, the loss has the same bits and
#   the router's gradient is exactly that of router_aux_loss_coef=0. The model takes router_logits out of its layers by
#   hooks; torch's reentrant kind runs a layer first without autograd, and what a hook has kept from that run is a
#   constant. The load balancing loss made of it is added to the loss, is logged, and has no gradient. Nothing warns,
#   since the rest of the loss has one. Routers are left to collapse in just the runs that need the memory.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 torch==2.13.0 numpy==2.4.6
cat >"$folder/router.py" <<'PY'
import sys

import torch
import transformers
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "num_experts_per_tok": 2, "output_router_logits": True}
TOKENS = torch.arange(24).reshape(2, 12)


def trained(kind: str, reentrant: bool | None, coefficient: float = 0.5) -> tuple[float, list[torch.Tensor]]:
    """(loss, gradients of the routers) of one backward; ``reentrant`` None: without checkpointing."""
    torch.manual_seed(0)
    if kind == "Mixtral":
        model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, router_aux_loss_coef=coefficient))
    else:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=32, head_dim=16,
                                                   router_aux_loss_coef=coefficient))
    model.train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss.item(), [param.grad for name, param in model.named_parameters() if name.endswith("mlp.gate.weight")]


def are_close(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=1e-3, atol=1e-6) for one, other in zip(left, right, strict=True))


found = {}
for kind in ("Mixtral", "Qwen3Moe"):
    loss, right = trained(kind, None)
    _, without_balance = trained(kind, None, 0.0)
    assert len(right) == 2 and not are_close(right, without_balance)
    for reentrant in (False, True):
        same_loss, gradients = trained(kind, reentrant)
        assert same_loss == loss
        found[kind, reentrant] = (are_close(gradients, right), are_close(gradients, without_balance))
print(f"transformers {transformers.__version__}, torch {torch.__version__}: by (model, use_reentrant), with equal losses: "
      f"routers' gradients are (right, those without the balance loss): {found}")
sys.exit(any(value != ((False, True) if reentrant else (True, False)) for (_, reentrant), value in found.items()))
PY
"$folder/venv/bin/python" "$folder/router.py" 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
