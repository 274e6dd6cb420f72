"""The owner side of the store as one plain object: no Ray, no gRPC, no clock of its own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rayzero.concurrency.futures import failed, settle
from rayzero.errors import (
    HandshakeError,
    RankLeftError,
    StoreClosedError,
    StoreError,
)
from rayzero.owner.checkpoint import CheckpointWriter
from rayzero.owner.gradients.contributions import Contributions
from rayzero.owner.memory import MemoryMaker, PrivateMemoryMaker
from rayzero.owner.model import OwnedModel, build_model, check_same
from rayzero.owner.publisher import Listener, Publisher
from rayzero.owner.shard import OwnedShard, ShardState
from rayzero.owner.updater import Updater
from rayzero.owner.updates import StepUpdates
from rayzero.owner.writes import StagedWrites
from rayzero.protocol.messages import (
    Attached,
    Contribution,
    Decision,
    FileEntry,
    FinishReport,
    ModelSpec,
    NormParts,
    Pushed,
    Write,
)
from rayzero.telemetry.names import (
    MEMORY_BYTES,
    OPTIMIZER_QUEUE_BYTES,
    OPTIMIZER_QUEUE_DEPTH,
    PARAM_VERSION,
    SHARDS,
)
from rayzero.telemetry.recorder import End, NullRecorder, Reading, Recorder

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class _Parts:
    """What an owner consists of once the first rank has attached. Each is the only writer of its own state."""

    model: OwnedModel
    contributions: Contributions
    updates: StepUpdates
    checkpoints: CheckpointWriter
    writes: StagedWrites

    def fail(self, error: StoreError, last_version: int) -> None:
        """No step will be decided any more, and nothing after ``last_version`` will come."""
        self.writes.fail(error)
        self.checkpoints.fail(error, last_version)
        self.contributions.fail(error)


class ShardService:
    """One owner: the only writer of its shards.

    Knows its parts and what passes between them: contributions come in, a decision turns them into updates, updates
    are published. Never makes a decision, and knows neither who carries bytes nor who asks. Thread-safe. Everything
    that computes on shards runs in one updater thread, in the order in which it was asked for."""

    def __init__(
        self,
        owner: int,
        num_owners: int,
        *,
        threads: int = 1,
        memory_budget: int | None = None,
        memory_taken: int = 0,
        memory: MemoryMaker | None = None,
        recorder: Recorder | None = None,
        norms_every: int | None = None,
        device: torch.device = CPU,
    ) -> None:
        """``threads``: torch threads of the updater. ``memory_budget``: bytes this owner may allocate; None: what
        the host has free. ``memory_taken``: bytes of the budget that other models have. ``memory``: makes its tensors;
        None: in this process alone. ``norms_every``: steps between measurements of norms by layer group; None: never.
        ``device``: where masters and states lie if it is one of the owners beside ranks (``offload_fraction``)."""
        self.owner = owner
        self.num_owners = num_owners
        self.recorder = recorder or NullRecorder()
        self.failed: Future[StoreError] = Future()  # done with the reason once the open step will never be decided
        self._memory_budget, self._memory_taken = memory_budget, memory_taken
        self._memory = memory or PrivateMemoryMaker()
        self._norms_every, self._device = norms_every, device
        self._unwatch: End = lambda: None
        self._attaching = threading.Lock()
        self._deciding = threading.Lock()  # one decision after the other: updates are queued in their order
        self._parts: _Parts | None = None
        self._updater = Updater(f"optimizer-{owner}", threads, self._on_task_error)
        self._publisher = Publisher(self._updater)

    # ---- attach and initial values

    def attach(self, rank: int, spec: ModelSpec, *, own_gradients: bool = False) -> Attached:
        """Shake hands with a rank. The first call allocates, and restores from ``spec.restore_from``: it may take
        long, so call it off an event loop.

        own_gradients: the rank keeps its gradients in memory of its own on this host: ``map_gradients`` comes next,
        and it tells of its pushes by ``observe``. Otherwise they are kept here: ``reserve`` and ``landed``.

        Raises HandshakeError naming what differs between two ranks, MemoryPlanError, UnsupportedError,
        CheckpointError."""
        if not 0 <= rank < spec.world_size:
            raise HandshakeError(f"optimizer {self.owner}: rank {rank} is not in 0..{spec.world_size - 1}")
        with self._attaching:
            if self._parts is None:
                model = build_model(
                    spec,
                    rank,
                    self.owner,
                    self.num_owners,
                    self._memory_budget,
                    self._memory,
                    memory_taken=self._memory_taken,
                    own_gradients=own_gradients,
                    measures_norms=self._norms_every is not None,
                    device=self._device,
                )
                self._start(model)
            else:
                model = self._parts.model
                check_same(model, spec, rank, self.owner)
        if not own_gradients:
            self.map_gradients(rank, None)
        return Attached(version=model.version, needs_load=model.needs_load)

    def _start(self, model: OwnedModel) -> None:
        shards, updater, recorder, version = model.shards, self._updater, self.recorder, model.version
        contributions = Contributions(self.owner, model.spec, shards, model.square_sum, updater, recorder, step=version)
        checkpoints = CheckpointWriter(self.owner, shards, model.rule, updater, recorder, version=version)
        updates = StepUpdates(model, contributions, self._publisher, checkpoints, recorder, self._norms_every)
        self._publisher.open(model.rule)
        self._parts = _Parts(model, contributions, updates, checkpoints, StagedWrites(shards, model.rule, updater))
        if self.failed.done():  # before anybody attached
            self._parts.fail(self.failed.result(), -1)
        if not model.needs_load:
            self._publisher.loaded(list(shards.values()), version)
        self._unwatch = recorder.watch(self._readings)

    def map_gradients(self, rank: int, flats: Mapping[int, Tensor] | None) -> None:
        """Read a rank's gradients from ``flats``: per unit 1D, unit.numel elements, fp32 with accumulation, else the
        unit's dtype. None: keep memory for them here. A repeat changes nothing."""
        self._attached().contributions.add_rank(rank, flats)

    @property
    def decided_steps(self) -> int:
        """Decisions taken in since the first attach."""
        parts = self._parts
        return 0 if parts is None else parts.contributions.open_step - parts.model.version

    @property
    def planned_bytes(self) -> int:
        """What this owner's plan says it needs; 0 before the first attach."""
        return 0 if self._parts is None else self._parts.model.plan.total

    @property
    def is_loaded(self) -> bool:
        """Whether every shard has values; also before the first attach, when there is none."""
        shards = self._parts.model.shards if self._parts is not None else {}
        return all(owned.state is not ShardState.EMPTY for owned in shards.values())

    @property
    def kernel(self) -> str:
        """Who computes updates here, after the first attach."""
        return self._attached().model.rule.kernel

    def _readings(self) -> Iterator[Reading]:
        """What this owner holds and has to do now; from any thread."""
        parts = self._attached()
        shards = list(parts.model.shards.values())
        yield Reading(SHARDS, len(shards), {})
        yield Reading(PARAM_VERSION, min((owned.published for owned in shards), default=0), {})
        yield Reading(OPTIMIZER_QUEUE_DEPTH, self._updater.queued, {})
        yield Reading(OPTIMIZER_QUEUE_BYTES, sum(owned.params.nbytes for owned in shards if owned.pending), {})
        held, memory = Counter[tuple[str, str]](), parts.model.memory
        for owned in shards:
            for kind, tensor in owned.tensors.items():
                held[kind, memory.tier if kind == "param" else memory.state_tier] += tensor.nbytes
        for rank in list(parts.contributions.ranks.values()):
            held["grad", "ram"] += rank.landing_bytes
            held["staging", "ram"] += rank.staging_bytes
        held["staging", "ram"] += parts.updates.scratch_bytes
        for (kind, tier), size in held.items():
            yield Reading(MEMORY_BYTES, size, {"kind": kind, "tier": tier})

    def load(self, shard: int, values: Tensor) -> None:
        """Initial values of a shard (1D, its elements, fp32 or the unit's dtype): copied before this returns, then
        version 0 is published. A repeat changes nothing."""
        owned = self._shard(shard)
        if values.shape != owned.params.shape:
            raise StoreError(
                f"shard {shard} of {owned.unit.name!r} has {owned.shard.numel} elements, got {tuple(values.shape)}"
            )
        if self._publisher.begin_load(owned):
            owned.fill(values)
            self._publisher.loaded([owned], 0)

    def left(self, rank: int, reason: str) -> None:
        """A rank goes. Rank 0 takes with it the values that it has not loaded: whoever waits for them, now or later,
        fails."""
        if rank == 0 and not self.is_loaded:
            self._fail(
                RankLeftError(f"rank 0 left before it had given optimizer {self.owner} all of its values ({reason})"),
                -1,
            )

    # ---- reads

    def read(self, shard: int, version: int, kind: str) -> Future[Tensor]:
        """The memory that holds ``kind`` of a shard at exactly ``version``: 1D, the shard's elements, padding
        included. Waits for the version; stable until the reading rank's finish. States that a generic optimizer
        keeps for itself come as a copy."""
        try:
            return self._publisher.read(self._shard(shard), version, kind)
        except StoreError as exc:
            return failed(exc)

    def content(self, shard: int) -> int:
        """The version at which the shard's published parameters last changed."""
        return self._shard(shard).content

    def content_at(self, shard: int, version: int) -> int | None:
        """``content`` of a shard that is published at exactly ``version`` now; None where it is not, or not yet."""
        return self._publisher.content_at(self._shard(shard), version)

    def on_publish(self, listener: Listener) -> None:
        """Tell ``listener`` of published versions, from the updater's thread; what is published already comes first."""
        self._updater.submit(lambda: self._publisher.listen(listener, self._shards().values()))

    # ---- contributions

    def reserve(self, contribution: Contribution, shard: int) -> Tensor | None:
        """Memory of the pushing rank for its part of the shard: 1D, the unit's dtype, to be filled and then
        ``landed``. None: a repeat or stale, drop it.

        Waits for that rank's own earlier pushes and for nothing of other ranks; see ``reserve_when_free``. A
        transport retries a push only after its earlier try has ended."""
        return self.reserve_when_free(contribution, shard).result()

    def reserve_when_free(self, contribution: Contribution, shard: int) -> Future[Tensor | None]:
        """``reserve`` that waits nowhere, for event loops. Fails with AccumulationError for an unplanned second
        push of a 16-bit unit."""
        try:
            return self._attached().contributions.reserve(contribution, self._shard(shard))
        except StoreError as exc:
            return failed(exc)

    def landed(self, contribution: Contribution, shard: int, came: Tensor | None = None) -> None:
        """The bytes of a reservation are all there. Adds them to the rank's sum where there is one: call it off an
        event loop, in a thread with its torch thread count set.

        ``came``: the bytes where they are not in the reserved memory yet, 1D in any dtype. They are copied when no
        other try of the push can have that memory, or memory that was it, any more."""
        excess = self._attached().contributions.landed(contribution, self._shard(shard), came)
        if excess is not None:
            self.abort(excess)

    def observe(self, rank: int, unit: int, pushed: Pushed) -> None:
        """``rank`` tells what it has of a unit in its own memory, where it stays until the unit's next version is
        published. Later news replaces earlier; what is not of the open step is dropped."""
        excess = self._attached().contributions.observe(rank, unit, pushed)
        if excess is not None:
            self.abort(excess)

    # ---- decisions

    def collect(self, step: int, reports: tuple[FinishReport, ...]) -> Future[NormParts]:
        """The norm parts of a step, once every push that ``reports`` count is there. Idempotent; other attempts
        replace what was collected before."""
        try:
            return self._attached().contributions.collect(step, reports)
        except StoreError as exc:
            return failed(exc)

    def apply(self, decision: Decision) -> None:
        """Act on a decision: queue the update, in forward order. Idempotent by step.

        Raises StepMismatchError for a step after the next, or attempts other than the collected ones."""
        parts = self._attached()
        with self._deciding:
            work = parts.contributions.decide(decision)
            if work is None:
                return
            self._publisher.decided(parts.model.shards.values(), work.version)
            self._updater.submit(lambda: parts.updates.run(work))
        parts.contributions.retry()

    # ---- writes and checkpoints

    def stage(self, shard: int, version: int, kind: str, values: Tensor) -> None:
        """Keep values (1D, the shard's elements; COMPUTE: the unit's dtype, else fp32) for a write to come. They stay
        as they are until it is made."""
        self._attached().writes.stage(self._shard(shard), version, kind, values)

    def write(self, number: int, write: Write) -> Future[None]:
        """Make a write whose values are staged: in the updater thread, after the decisions there are so far, where
        ``write.version`` is that of the open step. Idempotent by ``number``."""
        try:
            parts = self._attached()
            step = parts.contributions.open_step
            if write.version != step and not self.failed.done():
                raise StoreError(f"optimizer {self.owner} is in step {step}, asked to write v{write.version}")
        except StoreError as exc:
            return failed(exc)
        return parts.writes.write(number, write)

    def write_checkpoint(self, step: int, directory: Path) -> Future[FileEntry]:
        """Write this owner's file into ``staging_path(directory)`` once version ``step`` is published, and before
        any later update. The time that updates wait for it is recorded."""
        try:
            return self._attached().checkpoints.ask(step, directory)
        except StoreError as exc:
            return failed(exc)

    # ---- failures and the end

    def abort(self, error: StoreError) -> None:
        """The open step will never be decided: everything that waits for it, now or later, fails with ``error``.

        What is decided goes on: its updates finish and its versions stay readable."""
        self._fail(error, self._parts.contributions.open_step if self._parts is not None else 0)

    def _fail(self, error: StoreError, last_version: int) -> None:
        """Nothing after ``last_version`` will come."""
        settle(self.failed, error)  # first: parts that are being made now look at it
        self._publisher.fail(error, last_version)
        if self._parts is not None:
            self._parts.fail(error, last_version)

    def _on_task_error(self, exc: BaseException) -> None:
        error = StoreError(f"optimizer {self.owner} failed: {exc!r}")
        error.__cause__ = exc
        self._fail(error, -1)  # what is queued behind the failed task may never be published

    def describe(self, shard: int) -> str:
        """What this owner is doing for a shard, for messages about waits."""
        return self._attached().updates.describe(self._shard(shard))

    def close(self) -> None:
        """Finish what is decided, then stop. Everything still waiting fails with StoreClosedError. Idempotent."""
        error = StoreClosedError(f"optimizer {self.owner} was closed")
        self.abort(error)
        self._updater.close()
        self._fail(error, -1)
        self._unwatch()
        if self._parts is not None:
            self._parts.model.memory.close()

    # ---- lookups

    def _attached(self) -> _Parts:
        if self._parts is None:
            raise StoreError(f"optimizer {self.owner} has not been attached yet")
        return self._parts

    def _shards(self) -> Mapping[int, OwnedShard]:
        """Every shard here, in forward order."""
        return self._parts.model.shards if self._parts is not None else {}

    def _shard(self, shard: int) -> OwnedShard:
        found = self._attached().model.shards.get(shard)
        if found is None:
            raise StoreError(f"optimizer {self.owner} of {self.num_owners} does not have shard {shard}")
        return found
