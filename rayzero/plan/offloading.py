"""Plans activation offload: runs the real offload over a model without data, with copies that take no time.

The same code as in a run decides what leaves, what stays and what is prefetched. A plan cannot know times. It assumes
that a group has left when the next group's forward ends, and that under ``activation_device_budget`` everything beyond
the budget leaves, even if a run would recompute some of it."""

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

Allocate = Callable[[Callable[[], Tensor]], Tensor]  # allocates memory that is not on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Which modules' activations are offloaded, and how much of them."""

    modules: tuple[str, ...]  # patterns
    policy: OffloadPolicy

    @property
    def budget(self) -> int | None:
        """Bytes to keep on the device; None if a fraction was given instead."""
        return self.policy.device_budget_bytes

    def share(self, fraction: float) -> Offload:
        """The same modules, but offload this fraction of the bytes."""
        return replace(self, policy=replace(self.policy, device_budget_bytes=None, fraction=fraction))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What one rank offloads in one micro-batch; bytes."""

    total: int  # copied out in its forward, and in again in its backward
    group: int  # the largest group's: copied out while the next group is computed
    host: int  # what waits for the backward in host memory, in whole buffers


class _AtOnce(ThreadLane):
    """A lane that copies at once, in the caller, and counts what leaves by the module that saved it."""

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
    """What the activation offload of a model has copied."""

    def __init__(self, lane: _AtOnce, pool: HostPool) -> None:
        self._lane, self._pool = lane, pool

    def take(self) -> Moved:
        """What was copied since the last call; ``host`` counts from the first call."""
        left, self._lane.left = self._lane.left, Counter()
        return Moved(total=left.total(), group=max(left.values(), default=0), host=self._pool.status().peak_bytes)


@contextmanager
def offloading(model: nn.Module, offload: Offload, elsewhere: Allocate) -> Iterator[Offloading]:
    """A context in which the model's activations are offloaded. Raises ConfigError for a pattern that matches
    nothing."""

    def allocate(nbytes: int, pinned: bool) -> Tensor:
        return elsewhere(lambda: torch.empty(nbytes, dtype=torch.uint8, device="cpu"))

    lane = _AtOnce(next(model.parameters()).device)
    pool = HostPool(cap_bytes=offload.policy.host_cap_bytes, allocate=allocate)
    with ActivationOffload(model, offload.policy, offload_modules=offload.modules, lane=lane, pool=pool):
        yield Offloading(lane, pool)
