"""Examples from .jsonl files as a corpus: packed rows in memory, in another order in each epoch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from rayzero.errors import DataError
from rayzero.quantities import count
from rayzero.recipes.data.batch import IGNORED, Batch, Corpus, Place, Prompt
from rayzero.recipes.data.examples import ExampleReader, Row, batch_of, pack
from rayzero.recipes.data.text import batch_seed, unigram_log_probs
from rayzero.recipes.recipe import RecipeConfig

EXAMPLES_FILE = ".jsonl"  # the ending of a file of examples

PROMPTS = 2

Line = tuple[Mapping[str, Any], str]  # what it says, where it is


def read_lines(files: Sequence[Path], reader: ExampleReader) -> tuple[list[Line], int]:
    """(the examples of files, bytes read). Raises DataError for a file that cannot be read, or a line that is none."""
    found: list[Line] = []
    size = 0
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data: cannot read {path}: {error}") from error
        size += len(text.encode())
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                found.append((reader.parse(line, where := f"{path} line {number}"), where))
    return found, size


def split_lines(lines: Sequence[Line], fraction: float) -> tuple[list[Line], list[Line]]:
    """(training, validation): by the hash of what they say, so that copies stay on one side; each has at least one
    example. Raises DataError if that is not possible."""
    draws = {json.dumps(told, sort_keys=True): 0.0 for told, _ in lines}
    for text in draws:
        draws[text] = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    if len(draws) < 2:
        raise DataError(f"data: {count(len(draws), 'example')} cannot be split into training and validation; give more")
    ordered = sorted(draws.values())
    below = ordered[min(len(ordered) - 1, max(1, round(len(ordered) * fraction)))]
    sides: tuple[list[Line], list[Line]] = ([], [])
    for line in lines:
        sides[draws[json.dumps(line[0], sort_keys=True)] < below].append(line)
    return sides


class ExamplesCorpus(Corpus):
    """Rows of examples, of which the first or a share are kept for validation."""

    def __init__(self, reader: ExampleReader, kept: Sequence[Line], eval_rows: Sequence[Row]) -> None:
        super().__init__(reader.tokenizer)
        self._reader, self._kept, self._eval_rows = reader, kept, eval_rows

    def prompts(self, texts: Sequence[str]) -> list[Prompt]:
        if texts:
            as_chat = any("messages" in told for told, _ in self._kept)
            return [self._reader.question(text, as_chat=as_chat) for text in texts]
        asked = (self._reader.prompt(*line) for line in self._kept)
        return list(islice((prompt for prompt in asked if prompt is not None), PROMPTS))

    def _counted(self, rows: Sequence[Row]) -> float:
        """Loss in nats, on what the validation's rows learn, of a model that only counts what ``rows`` learn."""
        sides = (rows, self._eval_rows)
        learned, asked = (torch.cat([row.targets[row.targets != IGNORED] for row in side]) for side in sides)
        return -float(unigram_log_probs(learned, self.vocab_size)[asked.long()].mean())


class ExampleCorpus(ExamplesCorpus):
    """A micro-batch is the next rows of its epoch's order: each row comes once an epoch, whatever the ranks."""

    def __init__(self, lines: Sequence[Line], reader: ExampleReader, files: str, recipe: RecipeConfig) -> None:
        """``files``: in words. Raises DataError if there is nothing to learn, or to validate with."""
        training, kept = split_lines(lines, recipe.validation_fraction)
        self._recipe = recipe
        self._rows, eval_rows = (self._packed(reader, side) for side in (training, kept))
        super().__init__(reader, kept, eval_rows)
        self.about = f"{count(len(lines), 'example')} of {files}"
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def _packed(self, reader: ExampleReader, lines: Sequence[Line]) -> list[Row]:
        seq_len = self._recipe.seq_len
        rows = pack((reader.read(*line) for line in lines), seq_len, together=self._recipe.packing)
        if not rows:
            raise DataError(
                f"data: nothing of {count(len(lines), 'example')} is learned within seq_len {seq_len}: answers begin "
                "later, or there are none; give a larger seq_len, or train_on=all"
            )
        return rows

    def _shuffled(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(batch_seed(self._recipe.seed, epoch, 0, 0))
        return torch.randperm(len(self._rows), generator=generator, device="cpu").tolist()

    def train_batch(self, place: Place) -> Batch:
        size = self._recipe.batch_size
        places = (divmod(place.index * size + at, len(self._rows)) for at in range(size))
        return batch_of([self._rows[self._order(epoch)[at]] for epoch, at in places])

    def eval_batch(self, index: int) -> Batch:
        size, rows = self._recipe.batch_size, self._eval_rows
        return batch_of([rows[(index * size + at) % len(rows)] for at in range(size)])

    def baseline(self) -> float:
        return self._counted(self._rows)
