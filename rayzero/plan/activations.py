"""Activation offload of a model that is run on nothing: the offload itself, over copies that take no time.

What leaves, what stays and what comes back ahead is decided by the code that decides it in a run. Times are what a plan
cannot know: it takes a group to have left when the next one's forward ends, and with ``activation_device_budget`` all
beyond the budget to leave, whatever of that a run recomputes instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rayzero.activations.offload import ActivationOffload
from rayzero.activations.policy import OffloadPolicy
from rayzero.activations.tensors.host_pool import HostPool
from rayzero.lanes import Direction, Event, ThreadLane

__all__ = ["Moved", "Offload", "Offloading", "offloading"]

Allocate = Callable[[Callable[[], Tensor]], Tensor]  # makes what is not on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Which modules' activations leave, and how many of them."""

    modules: tuple[str, ...]  # patterns
    policy: OffloadPolicy

    @property
    def budget(self) -> int | None:
        """Bytes to hold on the device, where that is what is asked for, and no fraction."""
        return self.policy.device_budget_bytes

    def share(self, fraction: float) -> Offload:
        """The same, but that this part of the bytes leaves."""
        return replace(self, policy=replace(self.policy, device_budget_bytes=None, fraction=fraction))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Of one rank in one micro-batch; bytes."""

    total: int  # out in its forward, and in again in its backward
    group: int  # the largest group's: on its way out while the next one is computed
    host: int  # what waits for the backward, in whole buffers


class _AtOnce(ThreadLane):
    """Copies at once, in the caller, and counts what leaves by the module it was saved in."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, overlap=False)
        self.left: Counter[str] = Counter()

    def issue(
        self,
        direction: Direction,
        copy: Callable[[], object],
        *,
        after: Sequence[Event] | None = None,
        holds: Sequence[Tensor] = (),
        label: str = "",
        nbytes: int = 0,
    ) -> Event:
        """See ``Lane``."""
        if direction == "out":
            self.left[label] += nbytes
        return super().issue(direction, copy, after=after, holds=holds, label=label, nbytes=nbytes)


class Offloading:
    """What has left a model whose activations leave."""

    def __init__(self, lane: _AtOnce, pool: HostPool) -> None:
        self._lane, self._pool = lane, pool

    def take(self) -> Moved:
        """Since the last call; ``host`` since the first."""
        left, self._lane.left = self._lane.left, Counter()
        return Moved(total=left.total(), group=max(left.values(), default=0), host=self._pool.status().peak_bytes)


@contextmanager
def offloading(model: nn.Module, offload: Offload, elsewhere: Allocate) -> Iterator[Offloading]:
    """Inside, the model's activations leave. Raises ConfigError for a pattern that matches nothing."""

    def allocate(nbytes: int, pinned: bool) -> Tensor:
        return elsewhere(lambda: torch.empty(nbytes, dtype=torch.uint8, device="cpu"))

    lane = _AtOnce(next(model.parameters()).device)
    pool = HostPool(cap_bytes=offload.policy.host_cap_bytes, allocate=allocate)
    with ActivationOffload(model, offload.policy, offload_modules=offload.modules, lane=lane, pool=pool):
        yield Offloading(lane, pool)
