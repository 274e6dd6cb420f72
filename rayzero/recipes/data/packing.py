"""Rows of a fixed length from examples of any length.

Neighbouring examples share a row, as many as fit whole. What does not fit into a row alone is cut: a text into several
pieces, of which none is lost; a chat or a completion at its end, because its beginning is what the rest answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rayzero.recipes.data.batch import IGNORED, Batch
from rayzero.recipes.data.examples import Example

__all__ = ["Packer", "Row", "batch_of", "pack"]

_PADDING = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One row; all tensors are int32 of shape (seq_len,), to take less room than a batch."""

    inputs: Tensor
    targets: Tensor
    positions: Tensor


class Packer:
    """Collects examples until they fill a row. What waits is its state."""

    def __init__(self, seq_len: int, *, together: bool = True) -> None:
        """``together``: several examples may share a row."""
        self._seq_len, self._together = seq_len, together
        self.waiting: list[Example] = []

    def add(self, example: Example) -> list[Row]:
        """The rows that this example completes, none or more. One without a learned token after its first is left
        out."""
        return [row for piece in self._pieces(example) for row in self._place(piece)]

    def rest(self) -> list[Row]:
        """A row of what waits; nothing waits then."""
        waiting, self.waiting = self.waiting, []
        return [self._row(waiting)] if waiting else []

    def _pieces(self, example: Example) -> Iterator[Example]:
        """Of at most seq_len + 1 tokens. A piece begins with the last token of the one before."""
        most = self._seq_len + 1
        ends = len(example) - 1 if all(example.learned) else 1  # only a text goes on in another row
        for start in range(0, ends, self._seq_len):
            piece = Example(example.tokens[start : start + most], example.learned[start : start + most])
            if any(piece.learned[1:]):
                yield piece

    def _place(self, piece: Example) -> list[Row]:
        used = sum(len(one) - 1 for one in self.waiting)
        full = bool(self.waiting) and (not self._together or used + len(piece) - 1 > self._seq_len)
        rows = self.rest() if full else []
        self.waiting.append(piece)
        return rows

    def _row(self, examples: Iterable[Example]) -> Row:
        inputs: list[int] = []
        targets: list[int] = []
        positions: list[int] = []
        for one in examples:
            inputs += one.tokens[:-1]
            after = zip(one.tokens[1:], one.learned[1:], strict=True)
            targets += [token if learned else IGNORED for token, learned in after]
            positions += range(len(one) - 1)
        left = self._seq_len - len(inputs)
        inputs, targets = inputs + [_PADDING] * left, targets + [IGNORED] * left
        return Row(
            *(
                torch.tensor(row, dtype=torch.int32, device="cpu")
                for row in (inputs, targets, positions + list(range(left)))
            )
        )


def pack(examples: Iterable[Example], seq_len: int, *, together: bool) -> list[Row]:
    """All rows of some examples, in order."""
    packer = Packer(seq_len, together=together)
    rows = [row for example in examples for row in packer.add(example)]
    return rows + packer.rest()


def batch_of(rows: list[Row]) -> Batch:
    """Rows as a micro-batch."""
    inputs, targets, positions = (
        torch.stack([getattr(row, name) for row in rows]).long() for name in ("inputs", "targets", "positions")
    )
    return Batch(inputs, targets, positions)
