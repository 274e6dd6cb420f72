"""The owner as one plain object: no Ray, no gRPC, no clock."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from rayzero.concurrency.futures import DONE, chain, fail, future_raises, settle, when_all
from rayzero.errors import (
    HandshakeError,
    RankLeftError,
    StateLostError,
    StoreClosedError,
    StoreError,
)
from rayzero.owner.changes import ChangeLog
from rayzero.owner.checkpoint import CheckpointWriter
from rayzero.owner.gradients.contributions import Contributions
from rayzero.owner.gradients.shard_sums import TotalListener
from rayzero.owner.memory import LeftOnDevice, MemoryMaker
from rayzero.owner.owned_model import OwnedModel, OwnerTerms, build_model, check_same
from rayzero.owner.products import ShardProducts
from rayzero.owner.publisher import Listener, PublishedCopy, Publisher
from rayzero.owner.shard import OwnedShard, ShardState, Updater
from rayzero.owner.staged_writes import StagedWrites, WriteListener
from rayzero.owner.updates import StepUpdates
from rayzero.protocol.gradient_sum import GradientMemory, ScatteredUnit
from rayzero.protocol.messages import (
    PRODUCT,
    Attached,
    Contribution,
    Decision,
    FileEntry,
    FinishReport,
    ModelSpec,
    NormParts,
    Pushed,
    Record,
    Write,
)
from rayzero.protocol.ownership import Ownership
from rayzero.telemetry.names import (
    MEMORY_BYTES,
    MEMORY_ORIGINAL_BYTES,
    OPTIMIZER_QUEUE_BYTES,
    OPTIMIZER_QUEUE_DEPTH,
    PARAM_VERSION,
    SHARDS,
)
from rayzero.telemetry.recorder import End, NullRecorder, Reading, Recorder

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Parts:
    """The parts of an owner, created when the first rank attaches. Each is the only writer of its own state."""

    model: OwnedModel
    contributions: Contributions
    updates: StepUpdates
    changes: ChangeLog
    checkpoints: CheckpointWriter
    writes: StagedWrites
    products: ShardProducts

    def fail(self, error: StoreError, last_version: int) -> None:
        """No further step will be decided, and no version after ``last_version`` will be published."""
        self.products.close()
        self.writes.fail(error)
        self.checkpoints.fail(error, last_version)
        self.contributions.fail(error)


class ShardService:
    """One owner: the only writer of its shards.

    Knows its parts and what passes between them: contributions come in, a decision turns them into updates, and updates
    are published. Makes no decisions; knows neither transports nor callers. Thread-safe. One updater thread does all
    computing on shards, in the order of the calls."""

    def __init__(
        self,
        owner: int,
        num_owners: int,
        terms: OwnerTerms | None = None,
        *,
        ownership: Ownership | None = None,
        memory: MemoryMaker | None = None,
        memory_taken: int = 0,
        left: LeftOnDevice | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """``ownership``: who owns what by now; None: it is the run's first epoch. ``memory``: allocates its tensors;
        None: memory of this process. ``memory_taken``: bytes of the budget that other models use. ``left``: what it has
        on its device since the last epoch."""
        self.owner = owner
        self.num_owners, self.ownership = num_owners, ownership
        self.recorder = recorder or NullRecorder()
        self.failed: Future[StoreError] = Future()  # set to the reason when the open step will never be decided
        self._terms, self._memory_taken, self._left = terms or OwnerTerms(), memory_taken, left
        self._memory = memory
        self._unwatch: End = lambda: None
        self._attaching = threading.Lock()
        self._deciding = threading.Lock()  # serialises decisions, so that updates are queued in their order
        self._parts: _Parts | None = None
        self._begun: Future[None] = Future()  # done at the first attach
        self._updater = Updater(f"optimizer-{owner}", self._terms.threads, self._on_task_error)
        self._publisher = Publisher(self._updater)
        self._on_total: TotalListener = lambda shard, word: None
        self._on_write: WriteListener = lambda shard, begins: None

    # ---- attach and initial values

    def attach(
        self,
        rank: int,
        spec: ModelSpec,
        *,
        own_gradients: bool = False,
        comes_back: bool = False,
        summed: Sequence[int] = (),
    ) -> Attached:
        """Shake hands with a rank. The first call allocates memory and restores from ``spec.restore_from``. That may
        take long, so do not call it on an event loop.

        own_gradients: the rank keeps its gradients in its own memory on this host: it calls ``map_gradients`` next, and
            announces its pushes by ``observe``. Otherwise this owner keeps them: ``reserve`` and ``landed``.
        comes_back: the rank has died before.
        summed: the ranks of its host, itself included, whose gradients come as one sum; empty: its own come alone.

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
                    self._terms,
                    self._memory,
                    ownership=self.ownership,
                    memory_taken=self._memory_taken,
                    own_gradients=own_gradients,
                    left=self._left,
                )
                self._left = None
                self._start(model)
            else:
                model = self._parts.model
                check_same(model, spec, rank, self.owner, comes_back=comes_back)
        if not own_gradients:
            self.map_gradients(rank, None, summed=summed)
        return Attached(version=model.first_version, needs_load=model.needs_load and not self.is_loaded)

    def _start(self, model: OwnedModel) -> None:
        shards, updater, recorder, version = model.shards, self._updater, self.recorder, model.version
        contributions = Contributions(model, updater, recorder, lambda shard, word: self._on_total(shard, word))
        checkpoints = CheckpointWriter(model, updater, recorder)
        budget = self._terms.memory_budget
        room = None if budget is None else budget - self._memory_taken - model.plan.total
        changes = ChangeLog(model, updater, recorder, room=room)
        products = ShardProducts(model)
        updates = StepUpdates(
            *(model, contributions, self._publisher, checkpoints, changes, recorder, self._terms.norms_every), products
        )
        self._publisher.open(model.rule)
        writes = StagedWrites(model, updater, checkpoints, changes, lambda shard, begins: self._on_write(shard, begins))
        self._parts = _Parts(model, contributions, updates, changes, checkpoints, writes, products)
        if self.failed.done():  # before the first attach
            self._parts.fail(self.failed.result(), -1)
        if model.former:
            self._take_former(self._parts)
            self._publisher.taken_over([shards[index] for index in model.former])
        elif not model.needs_load:
            self._publisher.loaded(list(shards.values()), version)
        self._unwatch = recorder.watch(self._readings)
        settle(self._begun, None)

    def map_gradients(
        self,
        rank: int,
        memory: GradientMemory | None,
        back_at: int | None = None,
        *,
        summed: Sequence[int] = (),
    ) -> None:
        """Read a rank's gradients in its ``memory``. None: keep memory for them here. A repeat changes nothing.
        ``back_at``: the step with which a rank begins that has come back; its new memory is read from there on.
        ``summed``: see ``attach``."""
        parts = self._attached()
        if back_at is not None and parts.model.former and not parts.contributions.knows(rank):
            self._take_former(parts, rank)  # it has died since this owner took over, and before they met
        parts.contributions.add_rank(rank, memory, back_at, summed)

    def _take_former(self, parts: _Parts, *ranks: int) -> None:
        """Read what dead ranks have pushed of the step that a former life of this owner may not have applied."""
        left = parts.model.memory.former_ranks(parts.model.version)
        for rank in left if not ranks else left.keys() & set(ranks):
            parts.contributions.add_former(rank, left[rank])

    @property
    def decided_steps(self) -> int:
        """Decisions accepted since the first attach."""
        parts = self._parts
        return 0 if parts is None else parts.contributions.open_step - parts.model.version

    @property
    def planned_bytes(self) -> int:
        """Bytes that this owner's plan needs, without the room that records turn out not to need; 0 before the first
        attach."""
        spare = sum(owned.spare_bytes for owned in self._shards().values())
        return 0 if self._parts is None else self._parts.model.plan.total - spare

    @property
    def steady_bytes(self) -> int:
        """``planned_bytes`` while no checkpoint is written, and what followers need now."""
        parts = self._parts
        return 0 if parts is None else self.planned_bytes - parts.model.plan.copies + parts.changes.kept_bytes

    @property
    def is_loaded(self) -> bool:
        """Whether every shard has values; true before the first attach, when there are none."""
        shards = self._parts.model.shards if self._parts is not None else {}
        return all(owned.state is not ShardState.EMPTY for owned in shards.values())

    @property
    def changes(self) -> ChangeLog:
        """For followers on other hosts; valid after the first attach, else raises StoreError."""
        return self._attached().changes

    @property
    def kernel(self) -> str:
        """The name of the update kernel; valid after the first attach."""
        return self._attached().model.rule.kernel

    def _readings(self) -> Iterator[Reading]:
        """Measurements of this owner's memory and work now. Any thread may call it."""
        parts = self._attached()
        shards = list(parts.model.shards.values())
        yield Reading(SHARDS, len(shards), {})
        if shards:
            yield Reading(PARAM_VERSION, min(owned.published for owned in shards), {})
        yield Reading(OPTIMIZER_QUEUE_DEPTH, self._updater.queued, {})
        yield Reading(OPTIMIZER_QUEUE_BYTES, sum(owned.params.nbytes for owned in shards if owned.pending), {})
        held, original, memory = Counter[tuple[str, str]](), Counter[str](), parts.model.memory
        states = parts.model.device or memory
        for owned in shards:
            original.update(owned.original_bytes)
            for kind, size in owned.memory_bytes.items():
                held[kind, (memory if kind == "param" else states).tier] += size
            if owned.total is not None and owned.total_there:
                held["grad", memory.tier] += owned.total.nbytes
        for rank in set(parts.contributions.ranks.values()):
            held["grad", "ram"] += rank.landing_bytes
            held["staging", "ram"] += rank.staging_bytes
        held["grad", "ram"] += parts.contributions.sums.spare.bytes
        held["changes", "ram"] += parts.changes.kept_bytes
        held["staging", "ram"] += parts.updates.scratch_bytes + parts.checkpoints.copied_bytes
        for (kind, tier), size in held.items():
            yield Reading(MEMORY_BYTES, size, {"kind": kind, "tier": tier})
        for kind, size in original.items():
            yield Reading(MEMORY_ORIGINAL_BYTES, size, {"kind": kind})

    def load(self, shard: int, values: Tensor) -> None:
        """Load a shard's initial values (1D, the shard's elements, fp32 or the unit's dtype): copies them before it
        returns; then version 0 is published. A repeat changes nothing. Raises StoreError for a wrong number of
        elements."""
        owned = self.shard(shard)
        if values.shape != (owned.shard.numel,):
            raise StoreError(
                f"shard {shard} of {owned.unit.name!r} has {owned.shard.numel} elements, got {tuple(values.shape)}"
            )
        if self._publisher.begin_load(owned):
            owned.fill(values)
            self._publisher.loaded([owned], 0)

    def left(self, rank: int, reason: str) -> None:
        """A rank has left: no product of it is waited for. If rank 0 leaves before it has loaded all values, everything
        that waits for them, now or later, fails."""
        if self._parts is not None:
            self._parts.products.left(rank)
        if rank == 0 and not self.is_loaded:
            self._fail(
                RankLeftError(f"rank 0 left before it had loaded all values of optimizer {self.owner} ({reason})"),
                -1,
            )

    # ---- reads

    @property
    def shards(self) -> list[int]:
        """The shards here, in forward order; none before the first attach."""
        return list(self._shards())

    @future_raises
    def read(self, shard: int, version: int, kind: str) -> Future[Tensor]:
        """The memory that holds ``kind`` of a shard at exactly ``version``: 1D, the shard's elements, padding included;
        the unit's dtype for COMPUTE, else fp32. The future waits for the version; the memory is stable until the
        reading rank's finish. States that a generic optimizer keeps itself come as a copy. Raises StoreError if the
        version is gone. PRODUCT: what the rank that asks is to multiply, for the update that makes ``version``."""
        if kind == PRODUCT:
            return self._attached().products.read(shard, version)
        return self._publisher.read(self.shard(shard), version, kind)

    def content(self, shard: int) -> int:
        """The version at which the shard's published parameters last changed."""
        return self.shard(shard).content

    def content_at(self, shard: int, version: int) -> int | None:
        """``content`` of a shard, if it is published at exactly ``version`` now; else None."""
        return self._publisher.content_at(self.shard(shard), version)

    def copy(self, shard: int, known: tuple[int, int] | None = None) -> Future[PublishedCopy]:
        """A copy of a shard's published parameters, of the version that it has; see ``Publisher.copy``. It may take a
        while. Raises StoreError if this owner does not have the shard."""
        return self._publisher.copy(self.shard(shard), known)

    def on_publish(self, listener: Listener) -> None:
        """Call ``listener`` with every published version, first with those published so far, in the updater's
        thread."""
        self._updater.submit(lambda: self._publisher.listen(listener, self._shards().values()))

    def on_total(self, listener: TotalListener) -> None:
        """Call ``listener`` whenever a round of several is in a total, in the updater's thread."""
        self._on_total = listener

    def on_write(self, listener: WriteListener) -> None:
        """Call ``listener`` before and after a user's write changes a shard, in the updater's thread."""
        self._on_write = listener

    # ---- contributions

    def reserve(self, contribution: Contribution, shard: int) -> Tensor | None:
        """Memory of the pushing rank for its part of the shard: 1D, the shard's elements, the unit's dtype. Fill it,
        then call ``landed``. None: the push is a repeat or stale; drop it.

        Waits for that rank's own earlier pushes, never for other ranks; see ``reserve_when_free``. A transport retries
        a push only after its earlier try has ended."""
        return self.reserve_when_free(contribution, shard).result()

    @future_raises
    def reserve_when_free(self, contribution: Contribution, shard: int) -> Future[Tensor | None]:
        """``reserve`` as a future, for event loops. Fails with AccumulationError for an unplanned second push of a
        16-bit unit."""
        return self._attached().contributions.reserve(contribution, self.shard(shard))

    def landed(self, contribution: Contribution, shard: int, came: Tensor | None = None) -> None:
        """All bytes of a reservation are there. Adds them to the rank's sum if there is one, so for more than a few KiB
        call it in a thread whose torch thread count is set, not on an event loop.

        ``came``: the bytes, if they are not in the reserved memory yet: 1D, the shard's elements, any dtype. They are
        copied once no other try of the push can still use that memory."""
        excess = self._attached().contributions.landed(contribution, self.shard(shard), came)
        if excess is not None:
            self.abort(excess)

    def lost_before(self, rank: int, step: int) -> None:
        """``rank`` has died, and what it pushed of steps before ``step`` is nowhere but here. If a decision that is to
        be redone counts more than that, the open step fails with StateLostError."""
        lost = self._attached().contributions.lost_before(rank, step)
        if lost is not None:
            self.abort(lost)

    def observe(self, rank: int, unit: int, pushed: Pushed, scattered: ScatteredUnit | None = None) -> None:
        """``rank`` announces what it has of a unit in its own memory, which stays there until the unit's next version
        is published; or ``scattered``, which this owner keeps until then. A later announcement replaces an earlier one;
        one that is not of the open step is dropped."""
        excess = self._attached().contributions.observe(rank, unit, pushed, scattered)
        if excess is not None:
            self.abort(excess)

    def in_totals(self, rank: int, unit: int, pushed: Pushed) -> bool:
        """Whether what ``rank`` has pushed of a unit is in the totals of all shards here, so that it needs no memory
        any more."""
        return self._attached().contributions.in_totals(rank, unit, pushed)

    # ---- decisions

    @future_raises
    def collect(self, step: int, reports: tuple[FinishReport, ...]) -> Future[NormParts]:
        """The norm parts of a step, once every push that ``reports`` count has landed. Idempotent; reports of other
        attempts replace an earlier collect."""
        return self._attached().contributions.collect(step, reports)

    @future_raises
    def apply(self, decision: Decision) -> Future[None]:
        """Act on a decision: queue the update, in forward order; done once it is queued. Idempotent by step.

        Fails with StepMismatchError for a later step than the open one, or for attempts other than the collected
        ones."""
        parts = self._attached()
        redone = parts.contributions.when_redone(decision)
        if redone is not None:
            return redone
        with self._deciding:
            work = parts.contributions.decide(decision)
            if work is None:
                return DONE
            self._publisher.decided(parts.model.shards.values(), work.version)
            self._updater.submit(lambda: parts.updates.run(work))
        parts.contributions.retry()
        return DONE

    def redo(self, record: Record) -> Future[None]:
        """Act on a decision that a former life of this owner may not have finished: collect the pushes that it counts,
        then apply it. Nothing happens if it was applied. Waits for the first attach. Ask in the order of the steps,
        after the last was accepted."""
        return self._once_begun(lambda: self._redo(record))

    def _redo(self, record: Record) -> Future[None]:
        step, done = record.decision.step, Future[None]()
        if self._attached().contributions.open_step > step:
            return DONE
        collected = [self.collect(step, record.reports)]
        when_all(collected, lambda _: chain(self.apply(record.decision), done), partial(fail, done))
        return done

    def _once_begun(self, call: Callable[[], Future[T]]) -> Future[T]:
        """Make a call that a lead may make of a successor before a rank has come."""
        if self._begun.done():
            return call()
        future: Future[T] = Future()
        self._begun.add_done_callback(lambda _: chain(call(), future))
        return future

    # ---- writes and checkpoints

    def stage(self, shard: int, version: int, kind: str, values: Tensor) -> None:
        """Keep values (1D, the shard's elements; COMPUTE: the unit's dtype, else fp32) for a later write. The caller
        must not change them until then. PRODUCT: what came out, for the update that makes ``version``."""
        if kind == PRODUCT:
            self._attached().products.take(shard, version, values)
            return
        self._attached().writes.stage(self.shard(shard), version, kind, values)

    @future_raises
    def write(self, number: int, write: Write) -> Future[None]:
        """Make a write whose values are staged, in the updater thread, after the decisions accepted so far.
        ``write.version`` must be the open step's. Idempotent by version and ``number``."""
        parts = self._attached()
        step = parts.contributions.open_step
        if write.version != step and parts.model.shards and not self.failed.done():
            raise StoreError(f"optimizer {self.owner} is in step {step}, but was asked to write v{write.version}")
        return parts.writes.write(number, write)

    def trouble(self) -> str | None:
        """See ``OwnerPeer``: the lead has no link to itself."""
        return None

    def begin_checkpoint(self, step: int, directory: Path) -> Future[None]:
        """Begin to write this owner's file of version ``step``, which ``write_checkpoint`` then waits for. Done once
        that is noted: decisions accepted later do not change what the file gets."""
        return self._once_begun(lambda: self._attached().checkpoints.begin(step, directory))

    def write_checkpoint(self, step: int, directory: Path) -> Future[FileEntry]:
        """Write this owner's file into ``staging_path(directory)`` once version ``step`` is published; waits for the
        first attach. Later updates go on meanwhile. Records how long they wait for it."""
        return self._once_begun(lambda: self._attached().checkpoints.ask(step, directory))

    # ---- between two epochs

    @future_raises
    def settled(self) -> Future[ModelSpec]:
        """Done, with the spec of what this owner has attached, once it has its first values, and every decision
        accepted so far is applied and published. From then on no total changes, so that ranks give nothing back that
        the owners of the next epoch would need: until ``go_on``, if there is none."""
        parts = self._attached()
        future: Future[ModelSpec] = Future()

        def stand_still() -> None:
            parts.contributions.sums.stand_still()
            settle(future, parts.model.spec)

        def apply(_: object) -> None:
            self._updater.submit(stand_still)

        when_all([self._publisher.filled(list(parts.model.shards.values()))], apply, partial(fail, future))
        return future

    def go_on(self) -> None:
        """There is no next epoch yet. Idempotent."""
        if self._parts is not None:
            self._parts.contributions.sums.go_on()

    def retire(self, error: StoreError) -> None:
        """The next epoch has begun: the shards' owners in it go on from this memory. Everything that waits
        fails with ``error``, and is asked there. Idempotent."""
        self._end(error)
        if self._parts is not None:
            self._parts.model.memory.leave()

    def left_on_device(self) -> LeftOnDevice | None:
        """What the next epoch's service of this process goes on with, after ``retire``; None: nothing is on a
        device."""
        model = None if self._parts is None else self._parts.model
        if model is None or model.device is None:
            return None
        return LeftOnDevice(model.device.tensors, {index: owned.left() for index, owned in model.shards.items()})

    # ---- failures and the end

    def abort(self, error: StoreError) -> None:
        """End the open step: it will never be decided, and everything that waits for it, now or later, fails with
        ``error``.

        Decided steps are not affected: their updates finish and their versions stay readable."""
        self._fail(error, self._parts.contributions.open_step if self._parts is not None else 0)

    def _fail(self, error: StoreError, last_version: int) -> None:
        """No version after ``last_version`` will be published."""
        settle(self.failed, error)  # first: parts that are being created now check it
        self._publisher.fail(error, last_version)
        if self._parts is not None:
            self._parts.fail(error, last_version)

    def _on_task_error(self, exc: BaseException) -> None:
        if isinstance(exc, StateLostError):
            error: StoreError = exc
        else:
            error = StoreError(f"optimizer {self.owner} failed: {exc!r}")
            error.__cause__ = exc
        self._fail(error, -1)  # tasks queued behind the failed one may never publish

    def describe(self, shard: int) -> str:
        """A description of what a shard is waiting for, for errors about waits."""
        return self._attached().updates.describe(self.shard(shard))

    def close(self) -> None:
        """Finish the decided updates, then stop. Everything that still waits fails with StoreClosedError.
        Idempotent."""
        if self._parts is not None:
            self._parts.checkpoints.cancel()
        self._end(StoreClosedError(f"optimizer {self.owner} was closed"))
        if self._parts is not None:
            self._parts.model.memory.close()

    def _end(self, error: StoreError) -> None:
        self.abort(error)
        self._updater.close()
        self._fail(error, -1)
        self._unwatch()
        if self._parts is not None:
            self._parts.checkpoints.close()

    # ---- lookups

    def _attached(self) -> _Parts:
        if self._parts is None:
            raise StoreError(f"optimizer {self.owner} has not been attached yet")
        return self._parts

    def _shards(self) -> Mapping[int, OwnedShard]:
        """Every shard here, in forward order."""
        return self._parts.model.shards if self._parts is not None else {}

    def shard(self, shard: int) -> OwnedShard:
        """One of this owner's shards. Raises StoreError if it does not have it."""
        found = self._attached().model.shards.get(shard)
        if found is None:
            raise StoreError(f"optimizer {self.owner} of {self.num_owners} does not have shard {shard}")
        return found
