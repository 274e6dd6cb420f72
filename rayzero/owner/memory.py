"""Allocates an owner's tensors: memory of the host, or a device's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Protocol

import torch
from torch import Tensor

from rayzero.errors import StateLostError, StoreError
from rayzero.kernels.stamps import TileStamps
from rayzero.memory.mapping import host_zeros
from rayzero.memory.planner import OwnerPlan
from rayzero.protocol.gradient_sum import FormerRank, TotalLine
from rayzero.protocol.messages import FormerShard, ModelSpec

Sizes = Sequence[tuple[int, int]]  # (key, elements)


class ShardJournal(Protocol):
    """A write-ahead record of a trained shard's life, in memory that outlives the process."""

    def stamps(self, version: int) -> TileStamps:
        """The tile stamps for what makes ``version``."""
        ...

    def decided(self, version: int) -> None:
        """The decision that makes ``version`` was accepted."""
        ...

    def applied(self, version: int, slices: Sequence[tuple[int, int]]) -> None:
        """Every byte is of ``version``, which is not published yet. ``slices``: see ``FormerShard``."""
        ...

    def keep(self, slices: Sequence[tuple[int, int]]) -> None:
        """The slices of the present version were written."""
        ...


class ShardRoom(Protocol):
    """Memory of a shard of which only as much is kept as is used: a record's, or a total's."""

    def restore(self) -> None:
        """All of it can be written again. Raises MemoryPlanError if there is no room any more."""
        ...

    def give_back(self, used: int) -> None:
        """Give whole pages behind the first ``used`` bytes back to the kernel."""
        ...


@dataclass(frozen=True, slots=True)
class LeftOnDevice:
    """What an owner beside a rank has on its device when an epoch ends. Its shards are the same in the next one."""

    tensors: Sequence[Mapping[int, Tensor]]  # masters and moments, as they were asked for: by shard, 1D
    shards: Mapping[int, FormerShard]


class HostMemory:
    """Zeroed host memory for one owner's tensors, each 1D. It lives as long as they do, or until ``close``.

    This is memory of the process alone; memory that outlives it overrides what it does otherwise."""

    tier = "ram"  # "shm" or "ram": see ``names.MEMORY_BYTES``
    apart = False  # True: masters of fp32 units are separate state, not the published memory

    def params(self, groups: Sequence[Sizes], dtype: torch.dtype) -> dict[int, Tensor]:
        """Memory for published parameters. ``groups``: shards that are neighbours in a unit and so lie side by side
        here."""
        return carve(tuple(chain.from_iterable(groups)), dtype)

    def state(self, sizes: Sizes, dtype: torch.dtype) -> dict[int, Tensor]:
        """Memory for masters, moments and totals, which only the owner reads."""
        return carve(sizes, dtype)

    def total_line(self, shard: int) -> TotalLine:
        """Where a shard's total is noted."""
        return TotalLine()

    def total_room(self, shard: int) -> ShardRoom | None:
        """The room of a shard's total, after that was allocated; None: it is always there."""
        return None

    def journal(self, shard: int) -> ShardJournal | None:
        """The journal of a trained shard; None: this memory ends with the process."""
        return None

    def room(self, shard: int) -> ShardRoom | None:
        """The room of a coded shard's record; None: pages that are not written take no memory anyway."""
        return None

    def former(self, shard: int) -> FormerShard | None:
        """What a former life of this owner has left of a shard in this memory; None: no values. Ask after
        ``journal``."""
        return None

    def first_version(self, version: int) -> int:
        """The version that the run began with: ``version``, which is noted for a successor, or what a former life of
        this owner has noted."""
        return version

    def former_ranks(self, step: int) -> Mapping[int, FormerRank]:
        """What ranks that are dead have pushed of ``step``, by rank, where a former life of this owner read it."""
        return {}

    def close(self) -> None:
        """Release the memory. Idempotent."""

    def leave(self) -> None:
        """Let other owners, or this process in the next epoch, take the memory over. Raises StateLostError where they
        cannot."""
        raise StateLostError("the states of an owner without shared memory end with it")


class MemoryMaker(Protocol):
    """Makes an owner's host memory, once its plan is known to fit."""

    takes_over: bool  # memory that is there already, where it can

    def make_memory(self, spec: ModelSpec, kernel: str, plan: OwnerPlan) -> HostMemory:
        """``kernel``: the name of the update kernel; ``plan``: what will be allocated."""
        ...


class DeviceStates:
    """Masters and moments in a device's memory; published parameters and totals stay on the host.

    Its shards have no journal, because their states end with the process. From one epoch to the next, the process
    itself keeps them."""

    apart = True

    def __init__(self, host: HostMemory, device: torch.device, left: LeftOnDevice | None = None) -> None:
        """``left``: of the last epoch; None: it is the first one."""
        self._host, self._device, self._left = host, device, left
        self.tensors: list[Mapping[int, Tensor]] = []
        self.tier = "gpu" if device.type == "cuda" else "ram"

    def state(self, sizes: Sizes, dtype: torch.dtype) -> dict[int, Tensor]:
        """See ``HostMemory.state``. Raises StoreError if other states were left."""
        if self._left is None:
            found: Mapping[int, Tensor] = carve(sizes, dtype, device=self._device)
        else:
            found = self._left.tensors[len(self.tensors)]
            if [(key, values.numel(), values.dtype) for key, values in found.items()] != [(*s, dtype) for s in sizes]:
                raise StoreError("the states on this device are not those of the shards that its owner has now")
        self.tensors.append(found)
        return dict(found)

    def journal(self, shard: int) -> None:
        """See ``HostMemory.journal``."""

    def former(self, shard: int) -> FormerShard | None:
        """See ``HostMemory.former``. Raises StateLostError if its masters and states are gone."""
        if self._left is not None:
            return self._left.shards.get(shard)
        if self._host.former(shard) is not None:
            raise StateLostError(
                f"masters and states of shard {shard} were in the memory of a device, which ended with its process: "
                "resume from a checkpoint"
            )
        return None


def carve(sizes: Sizes, dtype: torch.dtype, *, device: torch.device | None = None) -> dict[int, Tensor]:
    """One zeroed block cut into 1D tensors. ``device``: None is the host."""
    numel = sum(numel for _, numel in sizes)
    on_host = device is None or device.type == "cpu"
    block = host_zeros(numel, dtype, pinned_for=None) if on_host else torch.zeros(numel, dtype=dtype, device=device)
    ends = accumulate(numel for _, numel in sizes)
    return {key: block[end - numel : end] for (key, numel), end in zip(sizes, ends, strict=True)}
