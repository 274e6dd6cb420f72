"""A micro-batch, its place in a run, and what every kind of data can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


class Corpus(Protocol):
    """What a recipe trains on, tokenized, a part of it kept for validation."""

    vocab_size: int
    about: str  # what it is, for people: "3 files (0.4 MB)"

    def train_batch(self, place: Place) -> Batch:
        """The micro-batch of a place."""
        ...

    def eval_batch(self, index: int) -> Batch:
        """Validation batch ``index``, the same every time."""
        ...

    def baseline(self) -> float:
        """Loss in nats of a model that only counts the training tokens, on what validation predicts."""
        ...

    def prompts(self, texts: Sequence[str]) -> list[Prompt]:
        """What the trained model goes on from: these texts, or pieces of the validation data."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text."""
        ...

    def states(self) -> dict[str, Any]:
        """What a resumed run must load to go on with the same batches, for ``rayzero.track``; {}: nothing."""
        ...
