"""The store within one process: owners are plain objects, bytes are copied once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from rayzero.concurrency.futures import fail, failed, settle, settled, when_all
from rayzero.concurrency.gather import Gather
from rayzero.concurrency.threads import use_torch_threads
from rayzero.errors import StoreClosedError, StoreError
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.layout.shard_map import ShardMap
from rayzero.lead.lead import StepLead
from rayzero.memory.planner import OwnerPlan
from rayzero.owner.memory import carve
from rayzero.owner.service import CPU, ShardService
from rayzero.protocol.bits import digest_of
from rayzero.protocol.gradient_sum import gradient_sizes
from rayzero.protocol.messages import (
    COMPUTE,
    Attached,
    CheckpointInfo,
    Contribution,
    Decision,
    FileEntry,
    FinishReport,
    MeanInput,
    ModelSpec,
    Norm,
    Pushed,
    StepInputs,
    Write,
)
from rayzero.protocol.ownership import owner_map
from rayzero.store.owner.peers.local import LocalPeer
from rayzero.store.owner.slabs import OwnerSlabs
from rayzero.store.rank.memory.direct_memory import DirectMemory
from rayzero.store.rank.memory.gradient_region import GradientRegion
from rayzero.store.rank.memory.gradient_writer import GradientWriter
from rayzero.store.rank.memory.unit_windows import UnitWindows
from rayzero.store.rank.stall import StallWatch
from rayzero.store.shm.plan import SharedPlan
from rayzero.store.traffic import count_bytes, tell_build, watch_gradients
from rayzero.telemetry.names import FETCH_SECONDS, PUSH_SECONDS
from rayzero.telemetry.recorder import NullRecorder, Recorder

T = TypeVar("T")

_CAN_MAP = hasattr(os, "memfd_create")  # Linux
_TRANSPORT = "inproc"
_POOL = 2  # threads that copy, per rank


class LocalOwners:
    """All owners of a run and their lead, for ranks that are threads of this process."""

    def __init__(
        self,
        num_owners: int = 1,
        *,
        threads: int = 1,
        memory_budget: int | None = None,
        recorder: Recorder | None = None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        """``threads``: torch threads of each owner. ``memory_budget``: bytes each may allocate. ``devices``: of each
        rank, for further owners with their states there (``offload_fraction``)."""
        self.memories: dict[int, OwnerSlabs] = {}  # by owner, after the first attach, where this system can map them
        places = [CPU] * num_owners + list(devices)
        self.services = [
            ShardService(
                owner,
                len(places),
                threads=threads,
                memory_budget=memory_budget,
                memory=_Mappable(self.memories, owner, len(places)) if _CAN_MAP else None,
                recorder=recorder,
                device=device,
            )
            for owner, device in enumerate(places)
        ]
        self.lead = StepLead([LocalPeer(service) for service in self.services], recorder=recorder)

    def close(self) -> None:
        """Stop the lead, then every owner. Idempotent."""
        self.lead.close()
        for service in self.services:
            service.close()


class _Mappable:
    """Makes one owner's memory so that windows can be opened over it. A ``MemoryMaker``."""

    def __init__(self, memories: dict[int, OwnerSlabs], owner: int, num_owners: int) -> None:
        """``memories``: where it is put, by owner."""
        self._memories, self._owner, self._num_owners = memories, owner, num_owners

    def make_memory(self, spec: ModelSpec, kernel: str, plan: OwnerPlan) -> OwnerSlabs:
        shared = SharedPlan(spec, owner_map(spec, self._num_owners))
        facts = shared.facts("params", self._owner, kernel, 0)
        made = self._memories[self._owner] = OwnerSlabs(shared, facts, None)
        return made


class InProcessStore(DirectMemory):
    """A ``ParameterStore`` over owners of the same process.

    Knows which owner has which shard; not what owners do with bytes. Copies run in its own small thread pool, and
    no thread of the pool ever waits for anything."""

    def __init__(
        self, rank: int, owners: LocalOwners, *, stall_timeout: float = 600.0, recorder: Recorder | None = None
    ) -> None:
        """``stall_timeout``: seconds that a peer may stand still while this rank waits for it."""
        self.rank = rank
        self._owners = owners
        self._recorder = recorder or NullRecorder()
        self._watch = StallWatch(rank, stall_timeout)
        self._pool = ThreadPoolExecutor(
            _POOL, thread_name_prefix=f"store-{rank}", initializer=use_torch_threads, initargs=(1,)
        )
        self._spec: ModelSpec | None = None
        self._map: ShardMap | None = None
        self._newest = settled(0)  # the content version that ``published`` gave last
        self._means = 0  # asked for so far
        self._closed = False

    def attach(self, spec: ModelSpec, *, page_lock: bool = False) -> Attached:
        """See ``ParameterStore.attach``."""
        self._check_open()
        services = self._owners.services
        answers = [service.attach(self.rank, spec, own_gradients=True) for service in services]
        if self._writer is None:
            region = GradientRegion(spec, _gradient_memory(spec, page_lock))
            tier = "pinned" if page_lock else "ram"
            self._unwatch = watch_gradients(self._recorder, region.flats.values(), tier)
            self._writer = GradientWriter(region, self, f"store-{self.rank}")
        for service in services:
            service.map_gradients(self.rank, self._writer.region.flats)
        self._spec, self._map = spec, owner_map(spec, len(services))
        arenas = {owner: memory.arena for owner, memory in self._owners.memories.items()}
        self._windows = UnitWindows(SharedPlan(spec, self._map), arenas, page_lock=page_lock)
        self._owners.lead.attach(self.rank, spec, answers[0].version)
        tell_build(self._recorder, services[0].kernel, _TRANSPORT)
        return answers[0]

    def load(self, unit: int, values: Tensor) -> Future[None]:
        """See ``ParameterStore.load``."""

        def copy(shard: Shard) -> None:
            self._service(shard).load(shard.index, values[shard.start : shard.stop])

        try:
            shards = self._shards(unit, values)
        except StoreError as exc:
            return failed(exc)
        gather = Gather(len(shards))
        self._timed("load", values, gather.future)
        for shard in shards:
            self._pool.submit(gather.run, partial(copy, shard))
        return gather.future

    def fetch(self, unit: int, version: int, kind: str, out: Tensor) -> Future[None]:
        """See ``ParameterStore.fetch``."""
        try:
            shards = self._shards(unit, out)
            gather = Gather(len(shards))
            self._timed("fetch", out, gather.future)
            for shard in shards:
                copy = partial(self._copy, gather, out[shard.start : shard.stop])
                self._read(shard, version, kind).add_done_callback(copy)
        except StoreError as exc:
            return failed(exc)
        return gather.future

    def _copy(self, gather: Gather, out: Tensor, read: Future[Tensor]) -> None:
        """One part of a fetch: copy what was read, in the pool."""
        error = read.exception()
        if error is not None:
            gather.end(error)
            return
        try:
            self._pool.submit(gather.run, partial(_copy_into, out, read.result()))
        except RuntimeError:  # the pool was shut down by close()
            gather.end(StoreClosedError(f"rank {self.rank} closed its store"))

    def _read(self, shard: Shard, version: int, kind: str) -> Future[Tensor]:
        read = self._service(shard).read(shard.index, version, kind)
        what = f"{self._unit(shard.unit).name} v{version} from optimizer {self._owner(shard)}"
        service = self._service(shard)
        lead = self._owners.lead
        return self._watch.watch(
            read, what, lambda _: settled(f"{service.describe(shard.index)}; the lead: {lead.describe()}")
        )

    def published(self, unit: int, version: int) -> Future[int]:
        """See ``ParameterStore.published``."""
        try:
            shards = self._attached()[0].layout.shards_by_unit[unit]
        except StoreError as exc:
            return failed(exc)
        now = [
            found for shard in shards if (found := self._service(shard).content_at(shard.index, version)) is not None
        ]
        if len(now) == len(shards):  # as it is with most pushes: nothing to wait for
            return self._settled(max(now, default=0))
        done: Future[int] = Future()
        reads = [self._read(shard, version, COMPUTE) for shard in shards]
        when_all(reads, lambda _: settle(done, self._content(shards)), partial(fail, done))
        return done

    def _settled(self, content: int) -> Future[int]:
        """One for all units that changed last in the same step: making one takes longer than finding out."""
        newest = self._newest
        if newest.result() != content:
            newest = self._newest = settled(content)
        return newest

    def _content(self, shards: Sequence[Shard]) -> int:
        return max((self._service(shard).content(shard.index) for shard in shards), default=0)

    def push(self, contribution: Contribution, grads: Tensor) -> Future[None]:
        """See ``ParameterStore.push``."""
        try:
            self._check_size(contribution.unit, grads)
        except StoreError as exc:
            return failed(exc)
        assert self._writer is not None
        return self._timed("push", grads, self._writer.push(contribution, grads))

    def announce(self, unit: int, pushed: Pushed) -> None:
        """See ``GradientReaders``."""
        for service in self._owners.services:
            service.observe(self.rank, unit, pushed)

    def write(self, unit: int, version: int, kind: str, values: Tensor) -> Future[None]:
        """See ``ParameterStore.write``."""
        try:
            for shard in self._shards(unit, values):
                if self.rank == 0:
                    content = values[shard.start : shard.stop].clone()  # the caller's memory is its own after a stall
                    self._service(shard).stage(shard.index, version, kind, content)
        except StoreError as exc:
            return failed(exc)
        write = Write(version=version, unit=unit, kind=kind, digest=digest_of(values))
        awaited = f"the write to {self._unit(unit).name} at step {version}"
        return self._ask_lead(awaited, lambda lead: lead.write(self.rank, write))

    def finish(self, report: FinishReport, inputs: StepInputs | None) -> Future[Norm]:
        """See ``ParameterStore.finish``."""
        return self._ask_lead(f"the norm of step {report.step}", lambda lead: lead.finish(report, inputs))

    def commit(self, step: int, inputs: StepInputs) -> Future[Decision]:
        """See ``ParameterStore.commit``."""
        return self._ask_lead(f"the decision of step {step}", lambda lead: lead.commit(self.rank, step, inputs))

    def decision(self, step: int) -> Future[Decision]:
        """See ``ParameterStore.decision``."""
        return self._ask_lead(f"the decision of step {step}", lambda lead: lead.decision(step))

    def discard(self, step: int, attempt: int) -> Future[None]:
        """See ``ParameterStore.discard``."""
        return self._ask_lead(f"the discard of step {step}", lambda lead: lead.discard(self.rank, step, attempt))

    def save(self, step: int, directory: Path, files: tuple[FileEntry, ...]) -> Future[CheckpointInfo]:
        """See ``ParameterStore.save``."""
        what = f"the checkpoint of v{step}"
        return self._ask_lead(what, lambda lead: lead.save(self.rank, step, directory, files))

    def mean(self, given: MeanInput) -> Future[tuple[float, ...]]:
        """See ``ParameterStore.mean``."""
        self._means += 1
        number = self._means
        return self._ask_lead(f"the mean of {given}", lambda lead: lead.mean(self.rank, number, given))

    def close(self, reason: str = "closed") -> None:
        """See ``ParameterStore.close``."""
        if self._closed:
            return
        self._closed = True
        if self._spec is not None:
            for service in self._owners.services:
                service.left(self.rank, reason)
            self._owners.lead.leave(self.rank, reason)
        self._watch.close(StoreClosedError(f"rank {self.rank} closed its store ({reason})"))
        self._close_memory()
        self._pool.shutdown(wait=True)

    # ---- helpers

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"rank {self.rank} used its store after close()")

    def _attached(self) -> tuple[ModelSpec, ShardMap]:
        self._check_open()
        if self._spec is None or self._map is None:
            raise StoreError(f"rank {self.rank} has not attached")
        return self._spec, self._map

    def _unit(self, unit: int) -> UnitLayout:
        return self._attached()[0].layout.units[unit]

    def _owner(self, shard: Shard) -> int:
        return self._attached()[1].owner(shard.index)

    def _service(self, shard: Shard) -> ShardService:
        return self._owners.services[self._owner(shard)]

    def _ask_lead(self, what: str, ask: Callable[[StepLead], Future[T]]) -> Future[T]:
        try:
            self._attached()
        except StoreError as exc:
            return failed(exc)
        lead = self._owners.lead
        return self._watch.watch(ask(lead), what, lambda _: settled(lead.describe()))

    def _timed(self, direction: str, tensor: Tensor, done: Future[None]) -> Future[None]:
        """Count the bytes and the seconds of a transfer that ends well."""
        started = time.perf_counter()

        def ended(over: Future[None]) -> None:
            if over.cancelled() or over.exception() is not None:
                return
            count_bytes(self._recorder, direction, _TRANSPORT, tensor.numel(), tensor.dtype, tensor.dtype)
            metric = {"fetch": FETCH_SECONDS, "push": PUSH_SECONDS}.get(direction)
            if metric is not None:
                self._recorder.observe(metric, time.perf_counter() - started, transport=_TRANSPORT)

        done.add_done_callback(ended)
        return done

    def _shards(self, unit: int, tensor: Tensor) -> Sequence[Shard]:
        """A unit's; raises StoreError for a tensor that is not of its size."""
        self._check_size(unit, tensor)
        return self._attached()[0].layout.shards_by_unit[unit]

    def _check_size(self, unit: int, tensor: Tensor) -> None:
        layout = self._unit(unit)
        if tensor.shape != (layout.numel,):
            raise StoreError(f"{layout.name!r} has {layout.numel} elements, got a tensor of {tuple(tensor.shape)}")


def _gradient_memory(spec: ModelSpec, pinned: bool) -> dict[int, Tensor]:
    """Zeros for a rank's gradients, by unit: 1D, one block for each dtype."""
    blocks = [carve(sizes, dtype, pinned=pinned) for dtype, sizes in gradient_sizes(spec).items()]
    return {unit: flat for block in blocks for unit, flat in block.items()}


def _copy_into(out: Tensor, memory: Tensor) -> None:
    out.copy_(memory)
