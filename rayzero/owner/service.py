"""The owner side of the store as one plain object: no Ray, no gRPC, no clock of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from rayzero.concurrency.futures import fail, failed, settle
from rayzero.errors import (
    HandshakeError,
    RankLeftError,
    RayZeroError,
    StepMismatchError,
    StoreClosedError,
    StoreError,
)
from rayzero.owner.checkpoint import write_snapshot
from rayzero.owner.checkpoint_requests import SnapshotRequests
from rayzero.owner.gradients.contributions import Reservation
from rayzero.owner.gradients.norm_pass import NormPass
from rayzero.owner.measures import owner_readings
from rayzero.owner.memory import MakeMemory, PrivateMemory
from rayzero.owner.model import OwnedModel, build_model, check_same
from rayzero.owner.publications import Listener, is_readable
from rayzero.owner.publisher import Publisher
from rayzero.owner.shard import OwnedShard, ShardState
from rayzero.owner.update.shard_updates import ShardUpdates, counted, work_of
from rayzero.owner.updater import Task, Updater
from rayzero.owner.writes import StagedWrites
from rayzero.protocol.messages import (
    STEP,
    Action,
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
from rayzero.telemetry.recorder import End, NullRecorder, Reading, Recorder
from rayzero.telemetry.spans import Over, nothing

CPU = torch.device("cpu")


class ShardService:
    """One owner: the only writer of its shards.

    Knows its shards, what ranks contributed to them, and decisions once they are made; never makes one, and knows
    neither who carries bytes nor who asks. Thread-safe. Everything that computes on shards runs in one updater
    thread, in order; the lock guards fields, never a computation.
    """

    def __init__(
        self,
        owner: int,
        num_owners: int,
        *,
        threads: int = 1,
        memory_budget: int | None = None,
        memory_taken: int = 0,
        make_memory: MakeMemory | None = None,
        recorder: Recorder | None = None,
        norms_every: int | None = None,
        device: torch.device = CPU,
    ) -> None:
        """``threads``: torch threads of the updater. ``memory_budget``: bytes this owner may allocate; None: what
        the host has free.
        ``memory_taken``: bytes of the budget that other models have. ``make_memory``: where its tensors lie; None: in
        this process alone. ``norms_every``: steps between measurements of norms by layer group; None: never.
        ``device``: where masters and states lie if it is one of the owners beside ranks (``offload_fraction``)."""
        self.owner = owner
        self.num_owners = num_owners
        self._memory_budget, self._memory_taken = memory_budget, memory_taken
        self._make_memory = make_memory or (lambda spec, kernel, plan: PrivateMemory())
        self.recorder = recorder or NullRecorder()
        self._norms_every = norms_every
        self._device = device
        self._unwatch: End = lambda: None
        self._attaching = threading.Lock()
        self._lock = threading.RLock()
        self._model: OwnedModel | None = None
        self._norms: NormPass | None = None
        self._updates: ShardUpdates | None = None
        self._open_step = 0  # the step whose contributions are taken; also the number of decisions taken in
        self._loading: set[int] = set()
        self._writes = StagedWrites()
        self._failure: RayZeroError | None = None
        self._deciding: Over = nothing  # of the open step, from its first collect on
        self._updater = Updater(f"optimizer-{owner}", threads, self._on_task_error)
        self._publisher = Publisher(self._lock, self._updater.submit, self._read_state)
        self._snapshots = SnapshotRequests(self._lock, self._updater.submit, self._write_file, self.recorder)

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
            if self._model is None:
                model = build_model(
                    spec,
                    rank,
                    self.owner,
                    self.num_owners,
                    self._memory_budget,
                    self._make_memory,
                    memory_taken=self._memory_taken,
                    own_gradients=own_gradients,
                    measures_norms=self._norms_every is not None,
                    device=self._device,
                )
                self._start(model)
            else:
                model = self._model
                check_same(model, spec, rank, self.owner)
        if not own_gradients:
            self.map_gradients(rank, None)
        return Attached(version=model.version, needs_load=model.needs_load)

    def map_gradients(self, rank: int, flats: Mapping[int, Tensor] | None) -> None:
        """Read a rank's gradients from ``flats``: per unit 1D, unit.numel elements, fp32 with accumulation, else the
        unit's dtype. None: keep memory for them here. A repeat changes nothing."""
        contributions = self._attached().contributions
        with self._lock:
            if rank not in contributions.ranks:
                contributions.add_rank(rank, flats)

    @property
    def decided_steps(self) -> int:
        """Decisions taken in since the first attach."""
        return 0 if self._model is None else self._open_step - self._model.version

    @property
    def planned_bytes(self) -> int:
        """What this owner's plan says it needs; 0 before the first attach."""
        return 0 if self._model is None else self._model.plan.total

    @property
    def is_loaded(self) -> bool:
        """Whether every shard has values."""
        with self._lock:
            return all(owned.state is not ShardState.EMPTY for owned in self._shards())

    @property
    def kernel(self) -> str:
        """Who computes updates here, after the first attach."""
        return self._attached().rule.kernel

    def _start(self, model: OwnedModel) -> None:
        with self._lock:
            self._model, self._norms = model, NormPass(model, self._lock, self._submit_sums)
            self._updates = ShardUpdates(model, self._publisher, self.recorder, self._lock, self._retry_reservations)
            self._open_step = model.version
            restored = [] if model.needs_load else list(model.shards.values())
            for owned in restored:
                owned.published = owned.content = model.version
                owned.move(ShardState.PUBLISHED)
        self._unwatch = self.recorder.watch(self._readings)
        self._updater.submit(lambda: self._publisher.announce(restored))

    def _submit_sums(self, task: Task) -> None:
        def summing() -> None:
            over = self.recorder.spans.begin("norm", "sums of squares", self._open_step)
            task()
            over()

        self._updater.submit(summing)

    def _readings(self) -> Iterator[Reading]:
        scratch = self._shard_updates().scratch_bytes
        return owner_readings(self._attached(), lambda: self._updater.queued, scratch)

    def load(self, shard: int, values: Tensor) -> None:
        """Initial values of a shard (1D, its elements, fp32 or the unit's dtype): copied before this returns, then
        version 0 is published. A repeat changes nothing."""
        owned = self._shard(shard)
        if values.shape != owned.params.shape:
            raise StoreError(
                f"shard {shard} of {owned.unit.name!r} has {owned.shard.numel} elements, got {tuple(values.shape)}"
            )
        with self._lock:
            if owned.state is not ShardState.EMPTY or shard in self._loading:
                return
            self._loading.add(shard)
        owned.fill(values)
        with self._lock:
            owned.published = owned.content = 0
            owned.move(ShardState.PUBLISHED)
        self._updater.submit(lambda: self._publisher.announce([owned]))

    def left(self, rank: int, reason: str) -> RankLeftError | None:
        """A rank goes. Rank 0 takes with it the values that it has not loaded: whoever waits for them, now or later,
        fails with what this returns. None: everybody can go on."""
        if rank != 0 or self.is_loaded:
            return None
        error = RankLeftError(f"rank 0 left before it had given optimizer {self.owner} all of its values ({reason})")
        self._fail(error, -1)
        return error

    # ---- reads

    def read(self, shard: int, version: int, kind: str) -> Future[Tensor]:
        """The memory that holds ``kind`` of a shard at exactly ``version``: 1D, the shard's elements, padding
        included. Waits for the version; stable until the reading rank's finish. States that a generic optimizer
        keeps for itself come as a copy."""
        try:
            return self._publisher.read(self._shard(shard), version, kind)
        except StoreError as exc:
            return failed(exc)

    def _read_state(self, owned: OwnedShard, kind: str) -> Tensor:
        """States that a generic optimizer keeps for itself; only the updater thread may look at them."""
        states = self._attached().rule.states(owned) if owned.trainable else {}
        if kind == STEP and owned.trainable:
            return owned.step_counts()
        return states[kind] if kind in states else owned.read(kind)

    def content(self, shard: int) -> int:
        """The version at which the shard's published parameters last changed."""
        with self._lock:
            return self._shard(shard).content

    def content_at(self, shard: int, version: int) -> int | None:
        """``content`` of a shard that is published at exactly ``version`` now; None where it is not, or not yet."""
        with self._lock:
            owned = self._shard(shard)
            return owned.content if is_readable(owned, version) else None

    def on_publish(self, listener: Listener) -> None:
        """Tell ``listener`` of published (shard, version, content version) lists, from the updater thread; what is
        published already comes first."""
        self._updater.submit(lambda: self._publisher.listen(listener, list(self._shards())))

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
        future: Future[Tensor | None] = Future()
        try:
            self._try_reserve((contribution, self._shard(shard), future))
        except StoreError as exc:
            return failed(exc)
        return future

    def _try_reserve(self, reservation: Reservation) -> None:
        """Answer a reservation, or let it wait."""
        contribution, owned, future = reservation
        contributions = self._attached().contributions
        with self._lock:
            if self._failure is not None:
                raise self._failure
            answered, memory = contributions.reserve(contribution, owned, self._open_step)
            if not answered:
                contributions.wait(reservation)
        if answered:
            settle(future, memory)

    def _retry_reservations(self) -> None:
        """Something became free: answer what can be answered now."""
        with self._lock:
            waiting = self._model.contributions.take_waiting() if self._model is not None else []
        for reservation in waiting:
            try:
                self._try_reserve(reservation)
            except StoreError as exc:
                fail(reservation[2], exc)

    def landed(self, contribution: Contribution, shard: int, came: Tensor | None = None) -> None:
        """The bytes of a reservation are all there. Adds them to the rank's accumulator where there is one: call it
        off an event loop, in a thread with its torch thread count set.

        ``came``: the bytes where they are not in the reserved memory yet, 1D in any dtype. They are copied when no
        other try of the push can have that memory, or memory that was it, any more."""
        owned = self._shard(shard)
        contributions = self._attached().contributions
        landing = contributions.landing(contribution)[shard]
        with self._lock:
            wanted = contribution.step == self._open_step and landing.begin(contribution)
        if not wanted:
            return
        landing.absorb(contribution, came)
        with self._lock:
            contributions.ranks[contribution.rank].release(landing.complete(contribution))
            excess = self._note_arrival(owned, contribution.rank)
        if excess is not None:
            self.abort(excess)
        self._retry_reservations()

    def observe(self, rank: int, unit: int, pushed: Pushed) -> None:
        """``rank`` tells what it has of a unit in its own memory, where it stays until the unit's next version is
        published. Later news replaces earlier; what is not of the open step is dropped."""
        contributions, excess = self._attached().contributions, None
        with self._lock:
            for owned in contributions.shards_of(unit) if pushed.step == self._open_step else ():
                if contributions.observe(rank, owned, pushed):
                    excess = self._note_arrival(owned, rank) or excess
        if excess is not None:
            self.abort(excess)

    def _note_arrival(self, owned: OwnedShard, rank: int) -> StoreError | None:
        try:
            self._norm_pass().arrived(owned, rank, self._open_step)
        except StepMismatchError as exc:  # more pushes than were counted
            return exc
        return None

    # ---- norm parts

    def collect(self, step: int, reports: tuple[FinishReport, ...]) -> Future[NormParts]:
        """The norm parts of a step, once every push that ``reports`` count is there. Idempotent; other attempts
        replace what was collected before."""
        try:
            with self._lock:
                if self._failure is not None:
                    raise self._failure
                if step != self._open_step:
                    raise StepMismatchError(
                        f"optimizer {self.owner} is in step {self._open_step}, asked to collect {step}"
                    )
                if self._deciding is nothing:
                    self._deciding = self.recorder.spans.begin("decide", f"step {step}", step)
            return self._norm_pass().collect(step, reports)
        except StoreError as exc:
            return failed(exc)

    # ---- decisions

    def apply(self, decision: Decision) -> None:
        """Act on a decision: queue the update, in forward order. Idempotent by step.

        Raises StepMismatchError for a step after the next, or attempts other than the collected ones."""
        with self._lock:
            if decision.step < self._open_step:
                return
            model = self._attached()
            collection = counted(decision, self._norm_pass().collection, model, self.owner, self._open_step)
            work = work_of(decision, collection, model)
            self._open_step = decision.step + 1
            self._deciding()
            self._deciding = nothing
            self._norm_pass().decided()
            for owned in self._shards():
                owned.pending += 1
                owned.pending_reads += work[owned.shard.index] is not None
                if owned.journal is not None:
                    owned.journal.decided(decision.step + 1)
                if owned.state is ShardState.PUBLISHED:
                    owned.move(ShardState.DECIDED)
            parts = collection.future.result() if self._measures_norms(decision) else None
            self._updater.submit(lambda: self._shard_updates().run(decision.step + 1, work, parts))
            self._snapshots.version_decided(decision.step + 1)
        self._retry_reservations()

    def _measures_norms(self, decision: Decision) -> bool:
        every = self._norms_every
        return every is not None and decision.step % every == 0 and decision.action is Action.APPLY

    # ---- writes

    def stage(self, shard: int, version: int, kind: str, values: Tensor) -> None:
        """Keep values (1D, the shard's elements; COMPUTE: the unit's dtype, else fp32) for a write to come. They stay
        as they are until it is made."""
        owned = self._shard(shard)
        with self._lock:
            self._writes.stage(owned, version, kind, values)

    def write(self, number: int, write: Write) -> Future[None]:
        """Make a write whose values are staged: in the updater thread, after the decisions there are so far, where
        ``write.version`` is that of the open step. Idempotent by ``number``."""
        with self._lock:
            if self._failure is not None:
                return failed(self._failure)
            if write.version != self._open_step:
                return failed(
                    StoreError(f"optimizer {self.owner} is in step {self._open_step}, asked to write v{write.version}")
                )
            future, new = self._writes.once(number)
            if new:
                shards = [owned for owned in self._shards() if owned.unit.index == write.unit]
                self._updater.submit(lambda: self._writes.make(write, shards, self._attached().rule, future))
        return future

    # ---- checkpoints

    def save(self, step: int, directory: Path) -> Future[FileEntry]:
        """Write this owner's file into ``staging_path(directory)`` once version ``step`` is published, and before
        any later update. The time that updates wait for it is recorded."""
        with self._lock:
            if self._failure is not None:
                return failed(self._failure)
            if step < self._open_step:
                return failed(
                    StoreError(
                        f"v{step} cannot be saved: optimizer {self.owner} has decided step {self._open_step - 1}"
                    )
                )
            return self._snapshots.ask(step, directory, decided=step == self._open_step)

    def _write_file(self, version: int, directory: Path) -> FileEntry:
        stale = [owned for owned in self._shards() if owned.published != version]
        if stale:
            raise StoreError(f"{stale[0].unit.name!r} is at v{stale[0].published}, v{version} cannot be saved")
        return write_snapshot(self._shards(), self._attached().rule, self.owner, directory)

    # ---- failures and the end

    def abort(self, error: StoreError) -> None:
        """The open step will never be decided: everything that waits for it, now or later, fails with ``error``.

        What is decided goes on: its updates finish and its versions stay readable."""
        self._fail(error, self._open_step)

    def _fail(self, error: StoreError, last_version: int) -> None:
        with self._lock:
            self._failure = self._failure or error
        self._publisher.fail(error, last_version)
        self._snapshots.fail(error)
        if self._norms is not None:
            self._norms.fail(error)
        self._retry_reservations()

    def _on_task_error(self, exc: BaseException) -> None:
        error = StoreError(f"optimizer {self.owner} failed: {exc!r}")
        error.__cause__ = exc
        self._fail(error, -1)  # what is queued behind the failed task may never be published

    def describe(self, shard: int) -> str:
        """What this owner is doing for a shard, for messages about waits."""
        owned = self._shard(shard)
        with self._lock:
            return self._shard_updates().describe(owned, self._norm_pass().missing_ranks())

    def close(self) -> None:
        """Finish what is decided, then stop. Everything still waiting fails with StoreClosedError. Idempotent."""
        error = StoreClosedError(f"optimizer {self.owner} was closed")
        self.abort(error)
        self._updater.close()
        self._fail(error, -1)
        self._unwatch()
        if self._model is not None:
            self._model.memory.close()

    # ---- lookups

    def _attached(self) -> OwnedModel:
        if self._model is None:
            raise StoreError(f"optimizer {self.owner} has not been attached yet")
        return self._model

    def _norm_pass(self) -> NormPass:
        self._attached()
        assert self._norms is not None
        return self._norms

    def _shard_updates(self) -> ShardUpdates:
        self._attached()
        assert self._updates is not None
        return self._updates

    def _shards(self) -> Iterable[OwnedShard]:
        """Every shard here, in forward order."""
        return self._attached().shards.values() if self._model is not None else ()

    def _shard(self, shard: int) -> OwnedShard:
        found = self._attached().shards.get(shard)
        if found is None:
            raise StoreError(f"optimizer {self.owner} of {self.num_owners} does not have shard {shard}")
        return found
