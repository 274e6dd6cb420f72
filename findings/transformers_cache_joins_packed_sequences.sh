#!/usr/bin/env bash
# transformers 5.23.0, sdpa and eager: packed sequences see each other unless the call says use_cache=False.
#
# Expected: a row with several sequences, position_ids that begin again at 0 and no attention_mask, is kept apart by the
#   mask that transformers makes of position_ids for sdpa and eager, in training and in evaluation. (Its guide asks for
#   FlashAttention, whose kernels need no mask; this mask is what the two others have instead.)
# Seen: it is made only where there is no cache. use_cache is True in a model's config, so a plain model(**batch) makes an
#   empty cache first, in train() as in eval(), and with a cache, position_ids are no longer read as packing. Each
#   sequence then attends to all those before it in the row, at positions that begin again. Nothing warns, shapes and the
#   count of labels are right, and the loss is that of another model. Trainer sets use_cache to False in the config, and
#   so does activation checkpointing, so what was tried with those works, and the same batch in a loop of one's own or in
#   a perplexity check on a model that was just loaded does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 torch==2.13.0 numpy==2.4.6
cat >"$folder/packed.py" <<'PY'
import sys

import torch
import transformers
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def reach(attention: str, training: bool, **options: bool) -> float:
    """How much the logits of a row's second sequence move when the tokens of its first are others."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=attention)).train(training)
    collate = DataCollatorWithFlattening(return_tensors="pt")
    logits = []
    for first in ([1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]):
        batch = collate([{"input_ids": first}, {"input_ids": [7, 8, 9, 10, 11, 12]}])
        assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5] * 2] and "attention_mask" not in batch
        logits.append(model(**batch, **options).logits[:, 6:])
    return (logits[0] - logits[1]).abs().max().item()


kinds = [(attention, training) for attention in ("sdpa", "eager") for training in (True, False)]
plain = [reach(*kind) for kind in kinds]
without = [reach(*kind, use_cache=False) for kind in kinds]
print(f"transformers {transformers.__version__}, torch {torch.__version__}: other tokens in the first sequence move the "
      f"second's logits by {min(plain):.3f} to {max(plain):.3f} in a plain call, by {max(without):.3f} with use_cache=False")
sys.exit(not (min(plain) > 0.01 and max(without) == 0.0))
PY
"$folder/venv/bin/python" "$folder/packed.py" 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
