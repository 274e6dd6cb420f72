"""Where an owner's tensors lie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Protocol

import torch
from torch import Tensor

from rayzero.memory.planner import OwnerPlan
from rayzero.protocol.messages import ModelSpec

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

    tier: str  # of what is published, "shm" or "ram": see ``names.MEMORY_BYTES``
    state_tier: str  # of masters and moments
    apart: bool  # masters of fp32 units are not what is published, but state

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


class MemoryMaker(Protocol):
    """Makes an owner's host memory, once its plan is known to fit."""

    def make_memory(self, spec: ModelSpec, kernel: str, plan: OwnerPlan) -> HostMemory:
        """``kernel``: the name of the one that updates; ``plan``: what will be asked for."""
        ...


class PrivateMemory:
    """Memory of this process alone."""

    tier = state_tier = "ram"
    apart = False

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


class PrivateMemoryMaker:
    """Makes memory of this process alone."""

    def make_memory(self, spec: ModelSpec, kernel: str, plan: OwnerPlan) -> PrivateMemory:
        """See ``MemoryMaker.make_memory``."""
        return PrivateMemory()


class DeviceMemory:
    """Masters and moments in a device's memory; what is published stays on the host, where ranks read it.

    Nothing is noted of its shards: what they need to go on ends with the process."""

    apart = True

    def __init__(self, host: HostMemory, device: torch.device) -> None:
        self._host, self._device = host, device
        self.tier, self.state_tier = host.tier, "gpu" if device.type == "cuda" else "ram"

    def params(self, groups: Sequence[Sizes], dtype: torch.dtype) -> dict[int, Tensor]:
        """See ``HostMemory.params``."""
        return self._host.params(groups, dtype)

    def state(self, sizes: Sizes, dtype: torch.dtype) -> dict[int, Tensor]:
        """See ``HostMemory.state``."""
        return carve(sizes, dtype, device=self._device)

    def journal(self, shard: int) -> None:
        """See ``HostMemory.journal``."""

    def close(self) -> None:
        """See ``HostMemory.close``; the device's memory is freed with its tensors."""
        self._host.close()


def carve(
    sizes: Sizes, dtype: torch.dtype, *, pinned: bool = False, device: torch.device | None = None
) -> dict[int, Tensor]:
    """One zeroed block cut into 1D tensors. ``pinned``: page-locked (CUDA). ``device``: None is the host."""
    block = torch.zeros(sum(numel for _, numel in sizes), dtype=dtype, pin_memory=pinned, device=device)
    ends = accumulate(numel for _, numel in sizes)
    return {key: block[end - numel : end] for (key, numel), end in zip(sizes, ends, strict=True)}
