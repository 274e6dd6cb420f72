"""Holds one owner's part of each prepared model: its shards, and the memory it shares with ranks of its host."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from rayzero.owner.service import CPU, ShardService
from rayzero.store.owner.by_model import ByModel
from rayzero.store.owner.shared_memory import SharedOwner
from rayzero.telemetry.recorder import LaterModelRecorder, NullRecorder, Recorder


class Hosted(NamedTuple):
    """One owner's part of one prepared model."""

    service: ShardService
    shared: SharedOwner | None  # None: it shares no memory


class HostedModels:
    """One owner's part of every prepared model of its run. The models share one memory budget.

    Knows how an owner's part is made; not who asks for it."""

    def __init__(
        self,
        owner: int,
        num_owners: int,
        *,
        share: Path | None = None,
        threads: int = 1,
        memory_budget: int | None = None,
        recorder: Recorder | None = None,
        norms_every: int | None = None,
        device: torch.device = CPU,
        succeeds: bool = False,
    ) -> None:
        """``share``: the directory for memory shared with ranks of this host; None: share none. ``succeeds``: take over
        what a dead process of this owner has left there. For the other arguments see ``ShardService``."""
        self._succeeds = succeeds
        self._owner, self._num_owners, self._share = owner, num_owners, share
        self._threads, self._memory_budget = threads, memory_budget
        self._recorder, self._norms_every, self._device = recorder or NullRecorder(), norms_every, device
        self._models = ByModel(self._make)

    def __getitem__(self, number: int) -> Hosted:
        """The part of model ``number``, made at its first use. See ``ByModel``."""
        return self._models[number]

    def _make(self, number: int) -> Hosted:
        shared = None
        if self._share is not None:
            shared = SharedOwner(
                self._owner, self._num_owners, self._share, threads=self._threads, succeeds=self._succeeds
            )
        service = ShardService(
            self._owner,
            self._num_owners,
            threads=self._threads,
            memory_budget=self._memory_budget,
            memory_taken=self.planned_bytes,
            memory=shared,
            recorder=LaterModelRecorder(self._recorder) if number else self._recorder,
            norms_every=None if number else self._norms_every,
            device=self._device,
        )
        return Hosted(service, shared)

    @property
    def planned_bytes(self) -> int:
        """The bytes that the models' plans need; 0 before the first attach."""
        return sum(hosted.service.planned_bytes for hosted in self._models.made)

    @property
    def decided_steps(self) -> int:
        """Decisions accepted for the newest model since its first attach: after a few, all its memory is in use."""
        made = self._models.made
        return made[-1].service.decided_steps if made else 0

    def close(self) -> None:
        """Free the shards, after the server in front of them has stopped. Idempotent."""
        for hosted in self._models.close():
            hosted.service.close()
