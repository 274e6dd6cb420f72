"""Trains an existing LoRA adapter with TRL's DPOTrainer on RayZero; only the trainer's class differs.

Needs `pip install trl peft`. Runs offline: a tiny random Llama with an adapter learns to prefer words of its prompt.
TRL compares with a frozen copy of the adapter, which it switches to without gradients. Prints the losses, and the
reward of what is preferred over that of what is not.
"""

from __future__ import annotations

import argparse
import random
from tempfile import TemporaryDirectory
from typing import Any

import torch

import rayzero

WORDS = ["red", "green", "blue", "tall", "small", "old", "new", "cat", "dog", "sun", "sea", "one", "two", "three"]


def tokenizer() -> Any:
    """One token a word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({w: i for i, w in enumerate(["<pad>", "<eos>", *WORDS])}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def pairs(count: int) -> Any:
    """Prompts of three words; the preferred completion repeats one of them."""
    from datasets import Dataset

    draw = random.Random(0)
    rows = []
    for _ in range(count):
        prompt = draw.sample(WORDS, 3)
        other = draw.choice([word for word in WORDS if word not in prompt])
        rows.append({"prompt": " ".join(prompt) + " ", "chosen": draw.choice(prompt), "rejected": other})
    return Dataset.from_list(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer

    from rayzero.integrations.transformers import ZeroTraining

    class Mine(ZeroTraining, DPOTrainer):  # was: DPOTrainer
        pass

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=len(WORDS) + 2, pad_token_id=0, eos_token_id=1, bos_token_id=1, **shape, **heads)
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, lora_alpha=32, task_type="CAUSAL_LM"))
    with TemporaryDirectory() as directory:
        trainer = Mine(
            model=model,
            args=DPOConfig(
                output_dir=directory,
                max_steps=args.steps,
                per_device_train_batch_size=8,
                learning_rate=5e-3,
                logging_steps=20,
                save_strategy="no",
                bf16=False,
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=pairs(256),
            processing_class=tokenizer(),
            zero_config=rayzero.ZeroConfig(),
        )
        trainer.train()
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    print(f"margin of the preferred over the other: {last['rewards/margins']:.3f}")


if __name__ == "__main__":
    main()
