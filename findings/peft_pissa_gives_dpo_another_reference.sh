#!/usr/bin/env bash
# peft 0.21.2 with trl 1.16.0: LoRA's starting values choose DPO's reference model, which is then a model nobody has.
#
# Expected: before its first update, a DPO run's policy is its reference: rewards are 0 and the loss is ln 2. With LoRA the
#   reference is the same model under disable_adapter(), which peft documents as the base model's answers.
# Seen: so it is with init_lora_weights=True, "gaussian" or "orthogonal". With "pissa" and "olora" (the first promises
#   quicker convergence, and both begin with the base model's outputs, too) the principal part of each weight has moved
#   into the adapter, and is subtracted from the base in place. disable_adapter() then answers with what is left. The first
#   loss is 0.9, the rewards are not 0, and the run is held close to a model that was cut down. unload() and
#   delete_adapter() leave that one, too. peft asks for care when such an adapter is saved (save as LoRA), and trl does
#   not look; there is no warning. It is the same in every trainer that takes disable_adapter() for the reference.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check peft==0.21.2 trl==1.16.0 transformers==5.23.0 \
  accelerate==1.15.0 datasets==5.2.0 torch==2.13.0 numpy==2.4.6
cat >"$folder/reference.py" <<'PY'
import sys
from math import log

import peft
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = {word: number for number, word in enumerate(["<pad>", "<eos>", *"abcdefghi"])}
TOKENS = torch.arange(12)[None]


def made() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, initializer_range=0.2)).eval()


def adapter(start: bool | str) -> LoraConfig:
    return LoraConfig(r=8, lora_alpha=8, target_modules="all-linear", init_lora_weights=start)


def moved(start: bool | str) -> dict[str, float]:
    """How far logits are from the base model's: with a new adapter, with it disabled, and once it is unloaded."""
    base = made()
    before = base(TOKENS).logits.detach()
    model = get_peft_model(base, adapter(start)).eval()
    logits = {"new": model(TOKENS).logits}
    with model.disable_adapter():
        logits["disabled"] = model(TOKENS).logits
    logits["unloaded"] = model.unload()(TOKENS).logits
    return {name: round((values - before).abs().max().item(), 3) for name, values in logits.items()}


def first_loss(start: bool | str) -> float:
    words = Tokenizer(models.WordLevel(WORDS, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    pairs = Dataset.from_list([{"prompt": "a b c", "chosen": " d e f", "rejected": " g h i"}] * 4)
    settings = trl.DPOConfig(sys.argv[1], max_steps=1, per_device_train_batch_size=4, logging_steps=1, report_to=[],
                             use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True)
    trainer = trl.DPOTrainer(made(), args=settings, train_dataset=pairs, processing_class=tokenizer,
                             peft_config=adapter(start))
    trainer.train()
    return trainer.state.log_history[0]["loss"]


found = {start: (moved(start), round(first_loss(start), 3)) for start in (True, "orthogonal", "pissa", "olora")}
print(f"peft {peft.__version__}, trl {trl.__version__}, torch {torch.__version__}: ln 2 is {log(2):.3f}")
for start, (logits, loss) in found.items():
    print(f"peft   init_lora_weights={start!r}: first DPO loss {loss}, logits away from the base model's: {logits}")
right = all(loss == 0.693 and max(logits.values()) < 0.001 for logits, loss in list(found.values())[:2])
wrong = all(abs(loss - 0.693) > 0.02 and logits["new"] < 0.001 and min(logits["disabled"], logits["unloaded"]) > 0.1
            for logits, loss in list(found.values())[2:])
sys.exit(not (right and wrong))
PY
HF_HOME="$folder/cache" "$folder/venv/bin/python" "$folder/reference.py" "$folder/out" 2>"$folder/log" | grep "^peft " || {
  tail -n 20 "$folder/log"
  exit 1
}
