"""Examples from .jsonl files as a corpus: packed rows in memory, in another order in each epoch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from rayzero.errors import DataError
from rayzero.quantities import count
from rayzero.recipes.data.batch import IGNORED, Batch, Place, Prompt
from rayzero.recipes.data.examples import ExampleReader
from rayzero.recipes.data.packing import Row, batch_of, pack
from rayzero.recipes.data.text import Tokenizer, about_files, batch_seed
from rayzero.recipes.data.unigram import unigram_log_probs

EXAMPLES_FILE = ".jsonl"  # the ending of a file of examples

_PROMPTS = 2

Line = tuple[Mapping[str, Any], str]  # what it says, where it is


def read_lines(files: Sequence[Path], reader: ExampleReader) -> tuple[list[Line], int]:
    """(the examples of files, bytes read). Raises DataError for a file that cannot be read, and for a line that is
    none."""
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


class ExampleCorpus:
    """Rows of examples. A micro-batch is the next rows of its epoch's order: every row comes once an epoch, whatever
    the number of ranks."""

    def __init__(
        self,
        lines: Sequence[Line],
        reader: ExampleReader,
        tokenizer: Tokenizer,
        *,
        size_bytes: int,
        num_files: int,
        seed: int,
        batch_size: int,
        seq_len: int,
        together: bool,
        validation_fraction: float,
    ) -> None:
        """Raises DataError if there is nothing to learn, or to validate with."""
        training, self._kept = split_lines(lines, validation_fraction)
        self._reader, self._tokenizer = reader, tokenizer
        self._rows, self._eval_rows = (self._packed(side, seq_len, together) for side in (training, self._kept))
        self._seed, self._size = seed, batch_size
        self.vocab_size = tokenizer.vocab_size
        self.about = f"{count(len(lines), 'example')} of {about_files(num_files, size_bytes)}"
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def _packed(self, lines: Sequence[Line], seq_len: int, together: bool) -> list[Row]:
        rows = pack((self._reader.read(*line) for line in lines), seq_len, together=together)
        if not rows:
            raise DataError(
                f"data: nothing of {count(len(lines), 'example')} is learned within seq_len {seq_len}: answers begin "
                "later, or there are none; give a larger seq_len, or train_on=all"
            )
        return rows

    def _shuffled(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(batch_seed(self._seed, epoch, 0, 0))
        return torch.randperm(len(self._rows), generator=generator, device="cpu").tolist()

    def train_batch(self, place: Place) -> Batch:
        places = (divmod(place.index * self._size + at, len(self._rows)) for at in range(self._size))
        return batch_of([self._rows[self._order(epoch)[at]] for epoch, at in places])

    def eval_batch(self, index: int) -> Batch:
        first, rows = index * self._size, self._eval_rows
        return batch_of([rows[(first + at) % len(rows)] for at in range(self._size)])

    def baseline(self) -> float:
        return counted_baseline(self._rows, self._eval_rows, self.vocab_size)

    def prompts(self, texts: Sequence[str]) -> list[Prompt]:
        if texts:
            as_chat = any("messages" in told for told, _ in self._kept)
            return [self._reader.question(text, as_chat=as_chat) for text in texts]
        return list(self._asked())[:_PROMPTS]

    def _asked(self) -> Iterator[Prompt]:
        for told, where in self._kept:
            prompt = self._reader.prompt(told, where)
            if prompt is not None:
                yield prompt

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def states(self) -> dict[str, Any]:
        return {}


def counted_baseline(rows: Sequence[Row], eval_rows: Sequence[Row], vocab_size: int) -> float:
    """Loss in nats, on what ``eval_rows`` learn, of a model that only counts what ``rows`` learn."""
    learned, asked = (torch.cat([row.targets[row.targets != IGNORED] for row in side]) for side in (rows, eval_rows))
    return -float(unigram_log_probs(learned, vocab_size)[asked.long()].mean())
