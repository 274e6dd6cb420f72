"""A data set of the package ``datasets`` as a corpus, streamed: each rank reads its own share, and never all of it.

The first examples are kept for validation. How far a rank has read is tracked, so a resumed run goes on there; it needs
as many ranks as before, because each knows only its own share.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from rayzero.errors import ConfigError, DataError
from rayzero.quantities import count
from rayzero.recipes.data.batch import Batch, Place, Prompt
from rayzero.recipes.data.chats import PROMPTS, ExamplesCorpus, Line
from rayzero.recipes.data.examples import Example, ExampleReader, Packer, Row, batch_of
from rayzero.recipes.recipe import STREAM_PREFIX, RecipeConfig

_COUNTED = 256  # rows that the baseline counts


def open_stream(source: str) -> Any:
    """The streamed data set that ``datasets:NAME_OR_FOLDER[:SPLIT]`` names. Raises ConfigError if the package is not
    installed, DataError if there is no such data set."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"data={source!r} needs the package datasets: pip install 'rayzero[datasets]'") from error
    name, _, split = source.removeprefix(STREAM_PREFIX).partition(":")
    try:
        return datasets.load_dataset(name, split=split or "train", streaming=True)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"data: cannot open {source}: {' '.join(str(error).split())[:300]}") from error


class RankStream:
    """One rank's share of a stream, as rows, epoch after epoch. ``state_dict`` says how far it is."""

    def __init__(self, share: Any, reader: ExampleReader, packer: Packer, where: str, ranks: tuple[int, int]) -> None:
        """``ranks``: this one, and how many there are."""
        self._share, self._reader, self._packer, self._where = share, reader, packer, where
        self._ranks, self._epoch, self._ready = ranks, 0, list[Row]()
        self._examples: Iterator[Mapping[str, Any]] = iter(share)

    def rows(self, number: int) -> list[Row]:
        """The next rows. Raises DataError if an epoch has none."""
        fruitless = False
        while len(self._ready) < number:
            told = next(self._examples, None)
            if told is not None:
                self._ready += self._packer.add(self._reader.read(told, self._where))
                fruitless = fruitless and not self._ready
            elif fruitless:
                raise DataError(f"data: {self._where} has nothing to learn for rank {self._ranks[0]}")
            else:
                fruitless = not self._ready
                self._ready += self._packer.rest()
                self._epoch += 1
                self._share.set_epoch(self._epoch)
                self._examples = iter(self._share)
        found, self._ready = self._ready[:number], self._ready[number:]
        return found

    def state_dict(self) -> dict[str, Any]:
        """For ``rayzero.track``: numbers, text and tensors."""
        return {
            "ranks": list(self._ranks),
            "epoch": self._epoch,
            "share": json.dumps(self._share.state_dict()),
            "waiting": [[one.tokens, [int(learned) for learned in one.learned]] for one in self._packer.waiting],
            "ready": [[row.inputs, row.targets, row.positions] for row in self._ready],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there. Raises ConfigError if other ranks read the stream then."""
        rank, number = state["ranks"]
        if (rank, number) != self._ranks:
            raise ConfigError(
                f"the checkpoint's {count(number, 'rank')} each read a share of {self._where}, so the run cannot go on "
                f"with {self._ranks[1]}; set scaling.num_workers={number}"
            )
        self._epoch = state["epoch"]
        self._share.load_state_dict(json.loads(state["share"]))
        self._examples = iter(self._share)
        self._packer.waiting = [
            Example([int(token) for token in tokens], [bool(one) for one in learned])
            for tokens, learned in state["waiting"]
        ]
        self._ready = [Row(*row) for row in state["ready"]]


class StreamCorpus(ExamplesCorpus):
    """Rows of a stream: of its first examples for validation, of a rank's share of the others for training."""

    def __init__(self, reader: ExampleReader, recipe: RecipeConfig, rank: int, world_size: int) -> None:
        """Raises DataError if there are too few examples for validation."""
        self.about, self._recipe = recipe.data[0], recipe
        self._whole = whole = open_stream(self.about)
        super().__init__(reader, *self._validation(reader))
        from datasets.distributed import split_dataset_by_node

        share = split_dataset_by_node(whole.skip(len(self._kept)), rank=rank, world_size=world_size)
        self._stream = RankStream(share, reader, self._packer(), self.about, (rank, world_size))

    def _packer(self) -> Packer:
        return Packer(self._recipe.seq_len, together=self._recipe.packing)

    def _validation(self, reader: ExampleReader) -> tuple[list[Line], list[Row]]:
        """The first examples, as many as fill the validation's rows, and these rows."""
        most = self._recipe.eval_batches * self._recipe.batch_size
        kept: list[Line] = []
        packer, rows = self._packer(), list[Row]()
        for told in self._whole:
            if len(rows) >= most:
                break
            kept.append((told, self.about))
            rows += packer.add(reader.read(told, self.about))
        if len(rows) < most:
            raise DataError(
                f"data: {self.about} has {count(len(kept), 'example')}, too few for {count(most, 'row')} of "
                "validation; lower eval_batches or batch_size"
            )
        return kept, rows[:most]

    def _first_rows(self) -> Iterator[Row]:
        packer = self._packer()
        for told in self._whole.skip(len(self._kept)):
            yield from packer.add(self._reader.read(told, self.about))
        yield from packer.rest()

    def train_batch(self, place: Place) -> Batch:
        return batch_of(self._stream.rows(self._recipe.batch_size))

    def eval_batch(self, index: int) -> Batch:
        size = self._recipe.batch_size
        return batch_of(self._eval_rows[index * size : (index + 1) * size])

    def baseline(self) -> float:
        return self._counted(list(islice(self._first_rows(), _COUNTED)))

    def prompts(self, texts: Sequence[str]) -> list[Prompt]:
        """Of texts, whose examples ask nothing, the first halves."""
        return super().prompts(texts) or [
            Prompt(tokens=half, shown=self.tokenizer.decode(half))
            for tokens in (self._reader.read(*line).tokens for line in self._kept[:PROMPTS])
            if (half := tokens[: len(tokens) // 2])
        ]

    def states(self) -> dict[str, Any]:
        return {"stream": self._stream}
