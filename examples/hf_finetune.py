"""Fine-tunes a Hugging Face model with transformers' Trainer on RayZero; only one import differs.

Runs offline: a tiny GPT-2 with random weights learns this repository's README, byte by byte. Prints the losses, the
model's continuation of a prompt, and whether ``from_pretrained`` reads the saved weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
from transformers.utils import logging

import rayzero
from rayzero.integrations.transformers import Trainer  # was: from transformers import Trainer

TEXT = Path(__file__).parents[1] / "README.md"
LENGTH = 48


def examples() -> list[dict[str, torch.Tensor]]:
    """The text in pieces of LENGTH tokens, int64. The labels equal the inputs, because the model shifts them."""
    text = torch.tensor(list(TEXT.read_bytes()))
    pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()

    logging.disable_progress_bar()
    torch.manual_seed(0)
    shape = {"n_positions": 128, "n_embd": 128, "n_layer": args.layers, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, pad_token_id=0, **shape))
    with TemporaryDirectory() as directory:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=directory,
                max_steps=args.steps,
                per_device_train_batch_size=8,
                learning_rate=2e-3,
                lr_scheduler_type="cosine",
                max_grad_norm=1.0,
                logging_steps=20,
                save_steps=args.steps,
                dataloader_pin_memory=False,
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=examples(),
            eval_dataset=examples()[:16],
            zero_config=rayzero.ZeroConfig(gpu_param_memory_budget=2 << 20, prefetch_buffer_size=1),
        )
        trainer.train()
        print(f"evaluation loss {trainer.evaluate()['eval_loss']:.3f}")

        prompt = torch.tensor([list(b"RayZero ")], device=trainer.args.device)
        written = trainer.model.generate(prompt, max_new_tokens=40, do_sample=False)
        print("the model writes:", bytes(written[0].tolist()).decode(errors="replace"))

        saved = Path(directory) / f"checkpoint-{args.steps}"
        again = GPT2LMHeadModel.from_pretrained(saved)
        masters = rayzero.full_state_dict(trainer.model)
        same = all(torch.equal(again.state_dict()[k], v) for k, v in masters.items())
        print(f"from_pretrained({saved.name}) gives the same weights: {same}")


if __name__ == "__main__":
    main()
