"""Examples as a corpus, from lines of JSON: {"messages": [...]}, {"text": ...}, or {"prompt": ..., "completion": ...}.
From .jsonl files they are packed rows in memory, in another order in each epoch; or they are streamed from a data set
of the package ``datasets``.

An example is tokens and which of them are learned. Of a chat these are the assistant's messages; of a prompt, its
completion; of a text, everything.

[Note: packing] Rows have a fixed length. Neighbouring examples share one, as many as fit whole. What does not fit into
a row alone is cut: a text into several pieces, of which none is lost; a chat or a completion at its end, because its
beginning is what the rest answers.

[Note: streams] Of a stream each rank reads its own share, and never all of it. The first examples are kept for
validation. How far a rank has read is tracked, so a resumed run goes on there; it needs as many ranks as before,
because each knows only its own share.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayzero.errors import ConfigError, DataError
from rayzero.files import parse_json
from rayzero.quantities import count
from rayzero.recipes.data.text import (
    IGNORED,
    Batch,
    Corpus,
    FolderTokenizer,
    Place,
    Prompt,
    Tokenizer,
    batch_seed,
    unigram_log_probs,
)
from rayzero.recipes.recipe import STREAM_PREFIX, RecipeConfig

Message = Mapping[str, str]

_ASSISTANT = "assistant"
_PADDING = 0
_END = "<|end|>\n"  # of a message, where the tokenizer has no template of its own


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens, and which of them are learned."""

    tokens: list[int]
    learned: list[bool]

    def __len__(self) -> int:
        return len(self.tokens)


class ExampleReader:
    """Turns what a line says into tokens. Knows templates; not files."""

    def __init__(self, tokenizer: Tokenizer, *, all_learned: bool = False) -> None:
        """``all_learned``: prompts and other people's messages too."""
        self.tokenizer, self._all = tokenizer, all_learned
        found = tokenizer.of_transformers if isinstance(tokenizer, FolderTokenizer) else None
        self._template = found if found is not None and found.chat_template else None
        eos = getattr(found, "eos_token_id", None)
        self._after_text = [] if eos is None else [int(eos)]
        self._stop = self._after_text or self._tokens(_END.rstrip())  # of an answer

    def parse(self, line: str, where: str) -> Mapping[str, Any]:
        """What a line of JSON says. Raises DataError, naming ``where``."""
        try:
            told = parse_json(line)
        except ValueError as error:
            raise DataError(f"data: {where} is not JSON: {error}") from error
        if not isinstance(told, dict):
            raise DataError(f"data: {where} is {reprlib.repr(told)}, not an object")
        return told

    def read(self, told: Mapping[str, Any], where: str) -> Example:
        """The example. Raises DataError, naming ``where``, if it is none."""
        if "messages" in told:
            return self._chat(_messages(told["messages"], where), where)
        if "prompt" in told or "completion" in told:
            prompt, answer = (_text(told, name, where) for name in ("prompt", "completion"))
            before, after = self._tokens(prompt), self._tokens(answer) + self._after_text
            return Example(before + after, [self._all] * len(before) + [True] * len(after))
        tokens = self._tokens(_text(told, "text", where)) + self._after_text
        return Example(tokens, [True] * len(tokens))

    def prompt(self, told: Mapping[str, Any], where: str) -> Prompt | None:
        """What comes before the last thing that is learned; None: everything is, as of a text."""
        if "messages" in told:
            messages = _messages(told["messages"], where)
            last = max((at for at, one in enumerate(messages) if one["role"] == _ASSISTANT), default=0)
            asked = [one["content"] for one in messages[:last]]
            return Prompt(
                tokens=self._before_answer(messages[:last]),
                shown=asked[-1] if asked else "",
                reference=messages[last]["content"],
                stop=self._stop,
            )
        if "prompt" in told:
            shown = _text(told, "prompt", where)
            reference = _text(told, "completion", where)
            return Prompt(tokens=self._tokens(shown), shown=shown, reference=reference, stop=self._after_text)
        return None

    def question(self, text: str, *, as_chat: bool) -> Prompt:
        """A user's words as the beginning of an example."""
        tokens = self._before_answer([{"role": "user", "content": text}]) if as_chat else self._tokens(text)
        return Prompt(tokens=tokens, shown=text, stop=self._stop if as_chat else self._after_text)

    def _tokens(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text.encode()).tolist()
        return found

    # ---- chats --------------------------------------------------------------------------------------------------

    def _chat(self, messages: Sequence[Message], where: str) -> Example:
        """What follows the last answer is left out, unless everything is learned."""
        if self._all:
            whole = self._whole(messages)
            return Example(whole, [True] * len(whole))
        tokens: list[int] = []
        learned: list[bool] = []
        for at in [at for at, one in enumerate(messages) if one["role"] == _ASSISTANT]:
            before, whole = self._before_answer(messages[:at]), self._whole(messages[: at + 1])
            if before[: len(tokens)] != tokens or whole[: len(before)] != before:
                raise DataError(
                    f"data: {where}: the tokenizer's chat template changes earlier messages when another one follows, "
                    "so its answers cannot be told apart; use a template that appends, or train_on=all"
                )
            learned += [False] * (len(before) - len(tokens)) + [True] * (len(whole) - len(before))
            tokens = whole
        return Example(tokens, learned)

    def _whole(self, messages: Sequence[Message]) -> list[int]:
        if self._template is not None:
            return self._rendered(messages, answers=False)
        return [token for one in messages for part in _parts(one) for token in self._tokens(part)]

    def _before_answer(self, messages: Sequence[Message]) -> list[int]:
        if self._template is not None:
            return self._rendered(messages, answers=True)
        return self._whole(messages) + self._tokens(_parts({"role": _ASSISTANT, "content": ""})[0])

    def _rendered(self, messages: Sequence[Message], *, answers: bool) -> list[int]:
        assert self._template is not None
        if not messages and not answers:
            return []
        text = self._template.apply_chat_template(
            [dict(one) for one in messages], tokenize=False, add_generation_prompt=answers
        )
        return [int(token) for token in self._template.encode(text, add_special_tokens=False)]


def _parts(message: Message) -> tuple[str, str]:
    """A message's header, and the rest of it: tokenized one by one, so that headers are always the same tokens."""
    return f"<|{message['role']}|>\n", f"{message['content']}{_END}"


def _messages(told: Any, where: str) -> list[Message]:
    if not isinstance(told, list) or not told or not all(isinstance(one, dict) for one in told):
        raise DataError(f"data: {where}: messages is {reprlib.repr(told)}, not a list of messages")
    return [{"role": _text(one, "role", where), "content": _text(one, "content", where)} for one in told]


def _text(told: Mapping[str, Any], name: str, where: str) -> str:
    value = told.get(name)
    if not isinstance(value, str):
        has = "has no " + name if value is None else f"has {reprlib.repr(value)} as its {name}"
        raise DataError(f"data: {where} {has}, which must be text")
    return value


# ---- rows. [Note: packing] --------------------------------------------------------------------------------------


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
        """The rows that this example completes. One without a learned token after its first is left out."""
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
        rows = (inputs, targets, positions + list(range(left)))
        return Row(*(torch.tensor(row, dtype=torch.int32, device="cpu") for row in rows))


def pack(examples: Iterable[Example], seq_len: int, *, together: bool) -> list[Row]:
    """All rows of some examples, in order."""
    packer = Packer(seq_len, together=together)
    rows = [row for example in examples for row in packer.add(example)]
    return rows + packer.rest()


def batch_of(rows: Sequence[Row]) -> Batch:
    """Rows as a micro-batch."""
    inputs, targets, positions = (
        torch.stack([getattr(row, name) for row in rows]).long() for name in ("inputs", "targets", "positions")
    )
    return Batch(inputs, targets, positions)


# ---- corpora --------------------------------------------------------------------------------------------------------


EXAMPLES_FILE = ".jsonl"  # the ending of a file of examples
PROMPTS = 2

_COUNTED = 256  # rows of a stream that the baseline counts

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


# ---- streams --------------------------------------------------------------------------------------------------------


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
        self._share.set_epoch(self._epoch)  # the share heeds a state in its own epoch only
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
