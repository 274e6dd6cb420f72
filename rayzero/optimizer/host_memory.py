"""Where an owner's tensors lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Protocol

import torch
from torch import Tensor

from rayzero.memory.planner import OwnerPlan
from rayzero.messages import ModelSpec

Sizes = Sequence[tuple[int, int]]  # (key, elements); elements are multiples of 64


class ShardJournal(Protocol):
    """What happens to a trained shard, noted where it outlives the process, before what follows it."""

    stamps: Tensor  # for kernels/stamps.py

    def decided(self, version: int) -> None:
        """The decision that makes ``version`` was taken in."""
        ...

    def applied(self, version: int) -> None:
        """All bytes are of ``version``, which is not published yet."""
        ...


class HostMemory(Protocol):
    """Zeroed host memory for one owner's tensors, each 1D. It lives as long as they do, or until ``close``."""

    tier: str  # "shm" or "ram": see ``names.MEMORY_BYTES``

    def params(self, groups: Sequence[Sizes], dtype: torch.dtype) -> dict[int, Tensor]:
        """What is published. Groups are shards of one unit that follow each other there: they do here too."""
        ...

    def state(self, sizes: Sizes, dtype: torch.dtype) -> dict[int, Tensor]:
        """Masters and moments: the owner's alone."""
        ...

    def journal(self, shard: int) -> ShardJournal | None:
        """Where to note what happens to a trained shard; None: this memory ends with the process."""
        ...

    def close(self) -> None:
        """The owner needs it no more. Idempotent."""
        ...


MakeMemory = Callable[[ModelSpec, str, OwnerPlan], HostMemory]  # (spec, name of the kernel, what will be asked for)


class PrivateMemory:
    """Memory of this process alone."""

    tier = "ram"

    def params(self, groups: Sequence[Sizes], dtype: torch.dtype) -> dict[int, Tensor]:
        """See ``HostMemory.params``."""
        return carve(tuple(chain.from_iterable(groups)), dtype)

    def state(self, sizes: Sizes, dtype: torch.dtype) -> dict[int, Tensor]:
        """See ``HostMemory.state``."""
        return carve(sizes, dtype)

    def journal(self, shard: int) -> None:
        """See ``HostMemory.journal``."""

    def close(self) -> None:
        """Nothing to do: it is freed with its tensors."""


def carve(sizes: Sizes, dtype: torch.dtype, *, pinned: bool = False) -> dict[int, Tensor]:
    """One zeroed block cut into 1D tensors. ``pinned``: page-locked (CUDA)."""
    block = torch.zeros(sum(numel for _, numel in sizes), dtype=dtype, pin_memory=pinned)
    ends = accumulate(numel for _, numel in sizes)
    return {key: block[end - numel : end] for (key, numel), end in zip(sizes, ends, strict=True)}
