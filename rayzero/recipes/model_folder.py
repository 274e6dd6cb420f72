"""The folder ``model/`` of a finished run: weights, and what transformers needs to read them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from rayzero.convert.conversion import convert, export_full
from rayzero.convert.formats import Format
from rayzero.convert.formats.safetensors_folder import WHOLE_FILE
from rayzero.convert.published.translated_reader import CONFIG_FILE
from rayzero.recipes.recipe import HF_PREFIX, RecipeConfig

FOLDER = "model"

_OF_TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def export_model(recipe: RecipeConfig, checkpoint: Path, run_dir: Path) -> Path:
    """Write a checkpoint's fp32 masters as ``model/model.safetensors``; of a transformers model under the names that
    transformers publishes, with its config and the files of its tokenizer, so that ``from_pretrained`` reads the
    folder. Replaces an earlier one. Raises CheckpointError if it cannot be written."""
    folder = run_dir / FOLDER
    if recipe.model.startswith(HF_PREFIX):
        _export_published(checkpoint, Path(recipe.model.removeprefix(HF_PREFIX)), folder)
    else:
        export_full(checkpoint, folder / WHOLE_FILE, overwrite=True)
    tokenizer = Path(recipe.tokenizer)
    if tokenizer.is_dir():
        for name in _OF_TOKENIZERS:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, folder / name)
    elif tokenizer.is_file():
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
    return folder


def _export_published(checkpoint: Path, config: Path, folder: Path) -> None:
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)  # left by a process that was killed
    convert(checkpoint, new, to=Format.HF, max_bytes=sys.maxsize, config=config)
    if not (new / CONFIG_FILE).exists():  # no class has these names as they are: transformers finds out what fits
        shutil.copyfile(config, new / CONFIG_FILE)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
