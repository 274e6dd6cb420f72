"""Text as a corpus: every micro-batch is windows of one long row of tokens, drawn by its place alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayzero.recipes.data.batch import Batch, Place, Prompt
from rayzero.recipes.data.text import Text, Tokenizer, about_files, batch_seed, eval_batch, train_batch
from rayzero.recipes.data.unigram import unigram_log_probs, unigram_loss

_PROMPTS = 2
_PROMPT_TOKENS = 24


class WindowCorpus:
    """Knows tokens and the recipe's sizes; not files."""

    def __init__(
        self, text: Text, tokenizer: Tokenizer, *, seed: int, batch_size: int, seq_len: int, eval_batches: int
    ) -> None:
        self.text, self._tokenizer = text, tokenizer
        self._seed, self._size, self._seq_len, self._eval_batches = seed, batch_size, seq_len, eval_batches
        self.vocab_size, self.about = text.vocab_size, about_files(text.num_files, text.size_bytes)

    def train_batch(self, place: Place) -> Batch:
        seed = batch_seed(self._seed, place.step, place.rank, place.micro_batch)
        return Batch(*train_batch(self.text.train, size=self._size, seq_len=self._seq_len, seed=seed))

    def eval_batch(self, index: int) -> Batch:
        """The batches are spread evenly over the whole validation text."""
        size, seq_len = self._size, self._seq_len
        found = eval_batch(
            self.text.validation, index=index, num_batches=self._eval_batches, size=size, seq_len=seq_len
        )
        return Batch(*found)

    def baseline(self) -> float:
        log_probs = unigram_log_probs(self.text.train, self.vocab_size)
        return unigram_loss(log_probs, (self.eval_batch(index).targets for index in range(self._eval_batches)))

    def prompts(self, texts: Sequence[str]) -> list[Prompt]:
        if texts:
            return [Prompt(tokens=self._tokenizer.encode(text.encode()).tolist(), shown=text) for text in texts]
        length = min(_PROMPT_TOKENS, self._seq_len)
        rows = [eval_batch(self.text.validation, index=i, num_batches=_PROMPTS, size=1, seq_len=self._seq_len)[0][0]
                for i in range(_PROMPTS)]  # fmt: skip
        pieces = [row[:length].tolist() for row in rows]
        return [Prompt(tokens=piece, shown=self.decode(piece)) for piece in pieces]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def states(self) -> dict[str, Any]:
        return {}
