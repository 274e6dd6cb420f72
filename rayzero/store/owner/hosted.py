"""Holds one owner's part of each prepared model: its shards, and the memory it shares with ranks of its host. And what
keeps one object of each model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from rayzero.errors import StoreClosedError, StoreError
from rayzero.memory.planner import check_budget
from rayzero.owner.memory import LeftOnDevice
from rayzero.owner.owned_model import OwnerTerms, plan_change
from rayzero.owner.service import ShardService
from rayzero.protocol.messages import ModelSpec
from rayzero.protocol.ownership import Ownership
from rayzero.slabs.slab import Slab
from rayzero.store.owner.memory.shared_owner import SharedOwner
from rayzero.telemetry.recorder import LaterModelRecorder, NullRecorder, Recorder

T = TypeVar("T")


class ByModel(Generic[T]):
    """One object for each prepared model, by number: the order of the ``prepare()`` calls, equal on all ranks.

    Each is made once, at its first use. Knows numbers; not what it makes. Thread-safe."""

    def __init__(self, make: Callable[[int], T]) -> None:
        """``make(number)`` is called under the lock, for 0, then 1, and so on."""
        self._make = make
        self._made: list[T] = []
        self._lock = threading.Lock()
        self._closed = False

    def __getitem__(self, number: int) -> T:
        """The object of model ``number``, made now if it is the next one. Raises StoreError for a number beyond that,
        StoreClosedError for a new one after ``close``."""
        if (found := self.known(number)) is not None:
            return found
        with self._lock:
            if not 0 <= number <= len(self._made):
                raise StoreError(f"there is no prepared model {number}: the next one is {len(self._made)}")
            if number == len(self._made):
                if self._closed:
                    raise StoreClosedError(f"prepared model {number} comes too late: the run has ended")
                self._made.append(self._make(number))
            return self._made[number]

    def known(self, number: int) -> T | None:
        """The object of model ``number`` if it has been made; does not wait."""
        return self._made[number] if 0 <= number < len(self._made) else None

    @property
    def made(self) -> Sequence[T]:
        """All objects made so far, in order."""
        return tuple(self._made)

    def close(self) -> Sequence[T]:
        """Make no more objects. Returns those made, which the caller closes. Idempotent."""
        with self._lock:
            self._closed = True
        return self.made


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
        terms: OwnerTerms | None = None,
        *,
        ownership: Ownership | None = None,
        share: Path | None = None,
        succeeds: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        """``ownership``: see ``ShardService``. ``share``: the directory for memory shared with ranks of this host;
        None: share none. ``succeeds``: take over what a dead process of this owner has left there, or what was
        prepared for this epoch."""
        self._succeeds, self._ownership = succeeds, ownership
        self._left: dict[int, LeftOnDevice] = {}  # by model: what the last epoch's service has left. freed by: _make()
        self._prepared: dict[int, Slab] = {}  # control slabs, by model. freed by: _make(), close()
        self.owner, self.num_owners, self.terms, self.share = owner, num_owners, terms or OwnerTerms(), share
        self.recorder = recorder or NullRecorder()
        self._models = ByModel(self._make)

    def __getitem__(self, number: int) -> Hosted:
        """The part of model ``number``, made at its first use. See ``ByModel``."""
        return self._models[number]

    def _make(self, number: int) -> Hosted:
        shared = None
        if self.share is not None:
            shared = SharedOwner(
                self.owner,
                self.num_owners,
                self.share,
                ownership=self._ownership,
                threads=self.terms.threads,
                succeeds=self._succeeds,
                prepared=self._prepared.pop(number, None),
            )
        service = ShardService(
            self.owner,
            self.num_owners,
            replace(self.terms, norms_every=None) if number else self.terms,
            ownership=self._ownership,
            memory=shared,
            memory_taken=self.planned_bytes,
            left=self._left.pop(number, None),
            recorder=LaterModelRecorder(self.recorder) if number else self.recorder,
        )
        return Hosted(service, shared)

    def check_change(self, specs: Sequence[ModelSpec], ownership: Ownership) -> None:
        """Raise UnsupportedError if the owners of these models cannot change, MemoryPlanError, with the sum, if this
        one may not take what it would own in the epoch of ``ownership``."""
        taken, owner, budget = 0, self.number_in(ownership), self.terms.memory_budget
        for spec in specs:
            plan = plan_change(spec, owner, ownership, measures_norms=self.terms.norms_every is not None)
            if budget is not None:
                check_budget(plan, budget, taken=taken)
            taken += plan.total

    @property
    def epoch(self) -> int:
        """In which it owns what it does."""
        return 0 if self._ownership is None else self._ownership.epoch

    @property
    def planned_bytes(self) -> int:
        """The bytes that the models' plans need; 0 before the first attach."""
        return sum(hosted.service.planned_bytes for hosted in self._models.made)

    @property
    def steady_bytes(self) -> int:
        """``planned_bytes`` while no checkpoint is written."""
        return sum(hosted.service.steady_bytes for hosted in self._models.made)

    @property
    def decided_steps(self) -> int:
        """Decisions accepted for the newest model since its first attach: after a few, all its memory is in use."""
        made = self._models.made
        return made[-1].service.decided_steps if made else 0

    def number_in(self, ownership: Ownership) -> int:
        """This owner's number in the next epoch; an owner that joins has it already."""
        return self.owner if self._joins(ownership) else ownership.number_of(self.owner)

    def _joins(self, ownership: Ownership) -> bool:
        return self._ownership is not None and self._ownership.epoch == ownership.epoch

    def enter(self, ownership: Ownership, prepared: Mapping[int, Slab]) -> None:
        """The next epoch has begun, and the parts of the last one are retired: make them anew. ``prepared``: for it, by
        model."""
        self._prepared = dict(prepared)
        retired = enumerate(hosted.service.left_on_device() for hosted in self._models.close())
        self._left = {number: left for number, left in retired if left is not None}
        if not self._joins(ownership):
            self.owner = ownership.number_of(self.owner)
            self.num_owners += ownership.num_owners - ownership.before.num_owners
        self._ownership, self._succeeds = ownership, True
        self._models = ByModel(self._make)

    def close(self) -> None:
        """Free the shards, after the server in front of them has stopped. Idempotent."""
        for hosted in self._models.close():
            hosted.service.close()
        for slab in self._prepared.values():
            slab.close()
