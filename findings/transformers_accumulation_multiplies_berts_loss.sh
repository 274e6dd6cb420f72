#!/usr/bin/env bash
# transformers 5.23.0: gradient_accumulation_steps=8 makes the whole gradient of BERT, T5 and classifiers 8 times as large.
#
# Expected: eight parts of one sequence have the gradient and the logged loss of one part of eight, for any model of the
#   package: either the model divides by num_items_in_batch or Trainer divides by the number of parts.
# Seen: so it is for causal language models and ModernBERT. For the masked language models of BERT and RoBERTa, for T5, BART
#   and the classifiers of sequences and tokens, gradient and loss are 8 times those of one part. Trainer leaves the
#   division to a model whose forward takes **kwargs; these take it, as nearly all of the package does for options of
#   attention, and make a plain mean of their own part. AdamW hides the size of a gradient, so runs go well, but
#   max_grad_norm, which is 1.0 by default, clips at an eighth of what was meant, and SGD steps 8 times as far. One part
#   shows nothing, and evaluation has no parts. The balance loss of experts has this in models that are right else
#   (transformers_accumulation_multiplies_router_loss.sh). An open issue has it (huggingface/transformers#47688).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 \
  numpy==2.4.6
cat >"$folder/parts.py" <<'PY'
import sys

import torch
import transformers as hf
from transformers import Trainer, TrainerCallback, TrainingArguments

IDS = list(range(1, 13))
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = hf.LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=0, num_labels=3)
BERT = hf.BertConfig(**SIZES, **STILL, num_labels=3)
T5 = hf.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
                 decoder_start_token_id=0)
KINDS = [
    (hf.LlamaForCausalLM, LLAMA, IDS), (hf.ModernBertForMaskedLM, hf.ModernBertConfig(**SIZES, pad_token_id=0), IDS),
    (hf.BertForMaskedLM, BERT, IDS), (hf.RobertaForMaskedLM, hf.RobertaConfig(**SIZES, **STILL, pad_token_id=0), IDS),
    (hf.T5ForConditionalGeneration, T5, IDS), (hf.BertForSequenceClassification, BERT, 1),
    (hf.LlamaForSequenceClassification, LLAMA, 1), (hf.LlamaForTokenClassification, LLAMA, [1] * 12),
]


class Gradient(TrainerCallback):
    """Keeps the norm of the step's gradient."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        self.norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()


def trained(kind, config, labels, parts: int) -> tuple[float, float]:
    """(logged loss, norm of the gradient) of one step with eight equal sequences."""
    torch.manual_seed(0)
    seen = Gradient()
    args = TrainingArguments(sys.argv[1], per_device_train_batch_size=8 // parts, gradient_accumulation_steps=parts,
                             max_steps=1, max_grad_norm=0, report_to=[], use_cpu=True, disable_tqdm=True,
                             save_strategy="no")
    data = [{"input_ids": IDS, "labels": labels}] * 8
    result = Trainer(kind(config), args, train_dataset=data, callbacks=[seen]).train()
    return result.training_loss, seen.norm


print(f"hf: transformers {hf.__version__}, torch {torch.__version__}: (loss, gradient) of 8 parts over those of one")
found = {}
for kind, config, labels in KINDS:
    one, eight = (trained(kind, config, labels, parts) for parts in (1, 8))
    found[kind.__name__] = tuple(round(late / early, 2) for late, early in zip(eight, one, strict=True))
    print(f"hf:   {kind.__name__}: {found[kind.__name__]}")
expected = [1.0] * 2 + [8.0] * 6
sys.exit(any(abs(value - right) > 0.02 for right, values in zip(expected, found.values(), strict=True) for value in values))
PY
"$folder/venv/bin/python" "$folder/parts.py" "$folder/out" 2>"$folder/log" | sed -n 's/^hf: //p' || {
  tail -n 20 "$folder/log"
  exit 1
}
