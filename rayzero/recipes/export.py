"""The folder ``model/`` of a finished run: weights, and what transformers needs to read them."""

from __future__ import annotations

import shutil
from pathlib import Path

from rayzero.checkpoint import export_full
from rayzero.recipes.recipe import HF_PREFIX, RecipeConfig

FOLDER = "model"

_OF_TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def export_model(recipe: RecipeConfig, checkpoint: Path, run_dir: Path) -> Path:
    """Write a checkpoint's fp32 masters as ``model/model.safetensors``, with the config of a transformers model and the
    files of its tokenizer, so that ``from_pretrained`` reads the folder. Replaces an earlier one. Raises
    CheckpointError if it cannot be written."""
    folder = run_dir / FOLDER
    export_full(checkpoint, folder / "model.safetensors", overwrite=True)
    if recipe.model.startswith(HF_PREFIX):
        shutil.copyfile(recipe.model.removeprefix(HF_PREFIX), folder / "config.json")
    tokenizer = Path(recipe.tokenizer)
    if tokenizer.is_dir():
        for name in _OF_TOKENIZERS:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, folder / name)
    elif tokenizer.is_file():
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
    return folder
