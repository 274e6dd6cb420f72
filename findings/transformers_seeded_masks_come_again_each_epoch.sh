#!/usr/bin/env bash
# transformers 5.23.0 with torch 2.13.0: with a seed and workers, masked language modeling has the same masks in each epoch.
#
# Expected: DataCollatorForLanguageModeling draws new masks at each pass; seed=1 makes the draws reproducible. Without workers
#   it is so: in ten epochs with 15 %, four of five tokens have been masked at least once.
# Seen: with num_workers > 0 each pass starts new workers (persistent_workers=False, the default of DataLoader and of Trainer).
#   Each has the collator as it was before its first batch, and begins its generator at seed + worker again. The k-th batch of
#   each epoch gets the masks of the k-th batch of the first. Where samples keep their places (a stream, a file that was
#   shuffled once), each has one mask for the whole run: 85 % of the tokens are never predicted, and the random words
#   that stand in for some are always the same ones. With shuffle=True samples change places, and the places keep their masks.
#   persistent_workers=True, or no seed, is right; nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 torch==2.13.0 numpy==2.4.6
cat >"$folder/masks.py" <<'PY'
import sys

import torch
import transformers
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

EPOCHS, SAMPLES, TOKENS = 10, 64, 64
words = {word: number for number, word in enumerate(["[PAD]", "[MASK]", "[UNK]", *(f"word{i}" for i in range(100))])}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")),
                                    pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]")
torch.manual_seed(0)
samples = [{"input_ids": row.tolist()} for row in torch.randint(3, len(words), (SAMPLES, TOKENS))]


def masked(seed: int | None, workers: int, *, persistent: bool = False) -> tuple[float, int]:
    """(share of tokens that any epoch has masked, number of epochs whose masks are those of the first)."""
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15, seed=seed)
    loader = DataLoader(samples, batch_size=8, num_workers=workers, persistent_workers=persistent, collate_fn=collator)
    epochs = torch.stack([torch.cat([batch["labels"] != -100 for batch in loader]) for _ in range(EPOCHS)])
    return round(epochs.any(0).float().mean().item(), 3), int((epochs == epochs[0]).flatten(1).all(1).sum())


found = {
    "seed, no workers": masked(1, 0),
    "no seed, 2 workers": masked(None, 2),
    "seed, 2 workers that persist": masked(1, 2, persistent=True),
    "seed, 2 workers": masked(1, 2),
}
print(f"transformers {transformers.__version__}, torch {torch.__version__}: share of tokens masked in any of {EPOCHS} epochs, "
      f"and epochs that have the masks of the first: {found}")
*right, (share, same) = found.values()
sys.exit(not (all(each > 0.75 and equal == 1 for each, equal in right) and share < 0.17 and same == EPOCHS))
PY
"$folder/venv/bin/python" -W ignore "$folder/masks.py" 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
