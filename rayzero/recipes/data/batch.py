"""A micro-batch, its place in a run, and what every kind of tokens and data can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

IGNORED = -100  # the target of a position whose token is not learned; cross_entropy leaves it out


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of tokens. All tensors are int64 of shape (rows, seq_len)."""

    inputs: Tensor
    targets: Tensor  # the token after each position, or IGNORED
    positions: Tensor | None = None  # of each token in its own example; None: a row is one example

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        positions = None if self.positions is None else self.positions.to(device)
        return Batch(self.inputs.to(device), self.targets.to(device), positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a micro-batch is in a run: data that can be read in any order depends on nothing else."""

    step: int  # from 0
    rank: int
    world_size: int
    micro_batch: int  # of the step, from 0
    micro_batches: int  # in a step

    @property
    def index(self) -> int:
        """Its number among the micro-batches of all ranks, from 0."""
        return (self.step * self.micro_batches + self.micro_batch) * self.world_size + self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The beginning of something that was not trained on."""

    tokens: Sequence[int]
    shown: str
    reference: str | None = None  # how it goes on in the data
    stop: Sequence[int] = ()  # tokens at which an answer ends; none: it goes on


class Tokenizer(Protocol):
    """Bytes of one file to token numbers."""

    vocab_size: int

    def encode(self, text: bytes) -> np.ndarray[tuple[int], np.dtype[np.integer]]:
        """1D integers in [0, vocab_size); bytes that are not UTF-8 become the replacement character."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text, special tokens included."""
        ...


class Corpus(ABC):
    """What a recipe trains on, tokenized, a part of it kept for validation."""

    about: str  # what it is, for people: "3 files (0.4 MB)"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size

    @abstractmethod
    def train_batch(self, place: Place) -> Batch:
        """The micro-batch of a place."""

    @abstractmethod
    def eval_batch(self, index: int) -> Batch:
        """Validation batch ``index``, the same every time."""

    @abstractmethod
    def baseline(self) -> float:
        """Loss in nats of a model that only counts the training tokens, on what validation predicts."""

    @abstractmethod
    def prompts(self, texts: Sequence[str]) -> list[Prompt]:
        """What the trained model goes on from: these texts, or pieces of the validation data."""

    def states(self) -> dict[str, Any]:
        """What a resumed run must load to go on with the same batches, for ``rayzero.track``; {}: nothing."""
        return {}
