#!/usr/bin/env bash
# transformers 5.23.0: gradient_accumulation_steps=8 makes a mixture of experts' balance loss eight times as strong.
#
# Expected: Trainer's gradient is that of the whole batch, in however many parts it comes: 8 x 1 is 1 x 8. That is why
#   it hands num_items_in_batch to the model.
# Seen: so it is for the cross entropy, which is divided by the tokens of all parts. Because the model takes that count,
#   Trainer no longer divides the loss by the number of parts; but the model adds router_aux_loss_coef times a mean over
#   its own part to each. Parts that are all the same sequence show it exactly: with 1, 2 and 8 parts the balance loss
#   in the logged loss and in the routers' gradient is 1, 2 and 8 times what the config asks for. Somebody who halves the
#   batch for memory and doubles the steps doubles the coefficient; the loss in the log seems to be worse for no reason,
#   and evaluation, which has no parts, does not show it. Without output_router_logits all is equal.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 \
  numpy==2.4.6
cat >"$folder/router.py" <<'PY'
import sys

import torch
import transformers
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainerCallback, TrainingArguments

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SEQUENCE = {"input_ids": list(range(1, 13)), "labels": list(range(1, 13))}


class Gradients(TrainerCallback):
    """Keeps the router's gradient of the step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        self.router = next(param.grad.clone() for name, param in model.named_parameters() if ".gate." in name)


def trained(parts: int, coefficient: float) -> tuple[float, torch.Tensor]:
    """(logged loss, router's gradient) of one step with eight equal sequences."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4,
                                             output_router_logits=True, router_aux_loss_coef=coefficient))
    seen = Gradients()
    args = TrainingArguments(sys.argv[1], per_device_train_batch_size=8 // parts, gradient_accumulation_steps=parts,
                             max_steps=1, max_grad_norm=0, report_to=[], use_cpu=True, disable_tqdm=True,
                             save_strategy="no")
    result = Trainer(model, args, train_dataset=[SEQUENCE] * 8, callbacks=[seen]).train()
    return result.training_loss, seen.router


losses, gradients = {}, {}
for parts in (1, 2, 8):
    (with_balance, router), (without, router_without) = trained(parts, 0.5), trained(parts, 0.0)
    losses[parts], gradients[parts] = with_balance - without, (router - router_without).norm().item()
found = {parts: (round(losses[parts] / losses[1], 2), round(gradients[parts] / gradients[1], 2)) for parts in losses}
print(f"transformers {transformers.__version__}, torch {torch.__version__}: balance loss in (log, router's gradient) by "
      f"gradient_accumulation_steps, over that with 1: {found}")
sys.exit(any(abs(value - parts) > 0.05 for parts, values in found.items() for value in values))
PY
"$folder/venv/bin/python" "$folder/router.py" "$folder/out" 2>"$folder/log" | grep "^transformers " || {
  tail -n 20 "$folder/log"
  exit 1
}
