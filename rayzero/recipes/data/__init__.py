"""What a recipe trains on: finds out what its data is, and opens it."""

from __future__ import annotations

from pathlib import Path

from rayzero.errors import DataError
from rayzero.recipes.data.corpora import EXAMPLES_FILE, ExampleCorpus, ExampleReader, StreamCorpus, read_lines
from rayzero.recipes.data.text import (
    TOKEN_FILE,
    Corpus,
    Text,
    Tokenizer,
    WindowCorpus,
    about_files,
    find_files,
    load_text,
    load_tokens,
    make_tokenizer,
    require_enough,
)
from rayzero.recipes.recipe import STREAM_PREFIX, RecipeConfig

__all__ = ["recipe_corpus", "tokens_of"]


def recipe_corpus(recipe: RecipeConfig, rank: int = 0, world_size: int = 1) -> Corpus:
    """What a rank of the recipe trains on. Raises DataError or ConfigError if it cannot be read."""
    tokenizer = make_tokenizer(recipe.tokenizer)
    reader = ExampleReader(tokenizer, all_learned=recipe.train_on == "all")
    if recipe.data[0].startswith(STREAM_PREFIX):
        _require_alone(recipe, "a stream")
        return StreamCorpus(reader, recipe, rank, world_size)
    if _all_end_with(EXAMPLES_FILE, recipe):
        files = find_files(recipe.data)
        lines, size = read_lines(files, reader)
        return ExampleCorpus(lines, reader, about_files(len(files), size), recipe)
    return WindowCorpus(tokens_of(recipe, tokenizer), tokenizer, recipe)


def tokens_of(recipe: RecipeConfig, tokenizer: Tokenizer) -> Text:
    """The recipe's tokens, of text or of a file of tokens. Raises DataError if they cannot be read."""
    if _all_end_with(TOKEN_FILE, recipe):
        _require_alone(recipe, "a file of tokens")
        path = find_files(recipe.data)[0]
        text = load_tokens(path, tokenizer.vocab_size, validation_fraction=recipe.validation_fraction)
    else:
        text = load_text(
            recipe.data,
            tokenizer,
            validation_fraction=recipe.validation_fraction,
            split=recipe.split,
            max_bytes=recipe.max_data_bytes,
        )
    require_enough(text, recipe.seq_len)
    return text


def _all_end_with(ending: str, recipe: RecipeConfig) -> bool:
    """Whether the data is of this kind. Raises DataError if only a part of it is."""
    of_kind = [source for source in recipe.data if Path(source).suffix == ending]
    if of_kind and len(of_kind) < len(recipe.data):
        other = next(source for source in recipe.data if source not in of_kind)
        raise DataError(f"data: {of_kind[0]} and {other} are of two kinds; train on one after the other")
    return bool(of_kind)


def _require_alone(recipe: RecipeConfig, what: str) -> None:
    if len(recipe.data) > 1:
        raise DataError(f"data: {recipe.data[0]} is {what}, which is given alone, and not with {recipe.data[1]}")
