"""An owner's tensors in slabs, so that ranks can map what it publishes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rayzero.memory.arena import Arena, Group, Piece, plan_arena
from rayzero.memory.planner import format_bytes
from rayzero.memory.slab_header import SlabFacts
from rayzero.optimizer.host_memory import Sizes
from rayzero.store.shared_plan import SharedPlan

log = logging.getLogger(__name__)

_SAY_EVERY_S = 5.0


@dataclass(slots=True)
class _Clock:
    """When progress was told last."""

    said: float = field(default_factory=time.monotonic)


def _say(owner: int, clock: _Clock, done: int, total: int) -> None:
    """Tell how far the making of slabs is, where it takes long: a few GB/s."""
    now = time.monotonic()
    if now - clock.said >= _SAY_EVERY_S:
        clock.said = now
        log.info("optimizer %d: %s of %s of shared memory made", owner, format_bytes(done), format_bytes(total))


class OwnerSlabs:
    """An owner's tensors in slabs. A ``HostMemory`` (optimizer/host_memory.py)."""

    def __init__(self, plan: SharedPlan, owner: int, facts: Callable[[str], SlabFacts], directory: Path | None) -> None:
        """``directory``: of the files; None: without names, for one process."""
        self._facts, self._directory = facts, directory
        self._say = partial(_say, owner, _Clock())
        self._params = Arena.create(plan.params(owner), facts("params"), directory, on_progress=self._say)
        self._state: list[Arena] = []

    @property
    def paths(self) -> list[Path]:
        """Of the params slabs, in order."""
        return [slab.path for slab in self._params.slabs if slab.path is not None]

    @property
    def arena(self) -> Arena:
        """The published parameters, by shard index."""
        return self._params

    def params(self, groups: Sequence[Sizes], dtype: torch.dtype) -> dict[int, Tensor]:
        """See ``HostMemory.params``."""
        return {key: self._params.tensor(key) for group in groups for key, _ in group}

    def state(self, sizes: Sizes, dtype: torch.dtype) -> dict[int, Tensor]:
        """See ``HostMemory.state``."""
        groups = [Group(pieces=(Piece(key=key, numel=numel, dtype=dtype),)) for key, numel in sizes]
        number = sum(len(arena.slabs) for arena in self._state)
        arena = Arena.create(
            plan_arena(groups), replace(self._facts("state"), number=number), self._directory, on_progress=self._say
        )
        self._state.append(arena)
        return {key: arena.tensor(key) for key, _ in sizes}

    def close(self) -> None:
        """Remove the files; memory that somebody still maps stays until they let go."""
        for arena in (self._params, *self._state):
            arena.close()
