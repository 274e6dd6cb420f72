"""Examples from lines of JSON: {"messages": [...]}, {"text": ...}, or {"prompt": ..., "completion": ...}.

An example is tokens and which of them are learned. Of a chat these are the assistant's messages; of a prompt, its
completion; of a text, everything.

[Note: packing] Rows have a fixed length. Neighbouring examples share one, as many as fit whole. What does not fit into
a row alone is cut: a text into several pieces, of which none is lost; a chat or a completion at its end, because its
beginning is what the rest answers.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayzero.errors import DataError
from rayzero.files import parse_json
from rayzero.recipes.data.batch import IGNORED, Batch, Prompt, Tokenizer
from rayzero.recipes.data.text import FolderTokenizer

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
