"""Connects ranks to owners in the same process: calls plain objects and copies bytes once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from rayzero.codecs import RAW
from rayzero.codecs.record import codec_of, read_record
from rayzero.concurrency.futures import DONE, Gather, fail, settle, settled, when_all
from rayzero.concurrency.threads import use_torch_threads
from rayzero.errors import StoreClosedError
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.layout.shard_map import ShardMap
from rayzero.lead.lead import StepLead
from rayzero.memory.planner import OwnerPlan
from rayzero.owner.memory import MemoryMaker
from rayzero.owner.owned_model import CPU, LoopStates, OwnerTerms
from rayzero.owner.service import ShardService
from rayzero.protocol.messages import (
    COMPUTE,
    STORED,
    Attached,
    CheckpointInfo,
    Decision,
    FileEntry,
    FinishReport,
    LoopState,
    MeanInput,
    ModelSpec,
    Norm,
    Pushed,
    StepInputs,
    Write,
    require_life,
)
from rayzero.store.host.waits import StallWatch
from rayzero.store.owner.memory.slabs import OwnerSlabs
from rayzero.store.rank.connection import Connection, Epochs, Joined, LeadLine, Transfers, Versions
from rayzero.store.rank.gradient_region import GradientRegion, gradient_memory, gradient_region
from rayzero.store.rank.unit_windows import UnitWindows
from rayzero.store.shm.shared_plan import SharedPlan
from rayzero.store.traffic import count_bytes
from rayzero.telemetry.recorder import NullRecorder, Recorder

T = TypeVar("T")
Kept = tuple[UnitLayout, Shard]  # what a record is of

_CAN_MAP = hasattr(os, "memfd_create")  # Linux
_POOL = 2  # copying threads of each rank


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
        """``threads``: torch threads of each owner. ``memory_budget``: bytes that each may allocate. ``devices``: each
        rank's device, for further owners that keep their states there (``offload_fraction``)."""
        self.memories: dict[int, OwnerSlabs] = {}  # by owner, after the first attach, if this system can map them
        places = [CPU] * num_owners + list(devices)
        self.services = [
            ShardService(
                owner,
                len(places),
                OwnerTerms(threads=threads, memory_budget=memory_budget, device=device),
                memory=_Mappable(self.memories, owner, len(places)) if _CAN_MAP else None,
                recorder=recorder,
            )
            for owner, device in enumerate(places)
        ]
        self.lead = StepLead(self.services, recorder=recorder)
        self.loop_states = LoopStates()
        self.lives: dict[int, int] = {}  # rank -> its present life, if it has died before

    def lose(self, rank: int, life: int) -> None:
        """A rank has died and will come back in ``life``: nothing that it did in earlier lives counts any more, unless
        it is decided. Idempotent."""
        if self.lives.get(rank, 0) < life:
            self.lives[rank] = life
            self.lead.lose(rank)

    def close(self) -> None:
        """Stop the lead, then every owner. Idempotent."""
        self.lead.close()
        for service in self.services:
            service.close()


class _Mappable(MemoryMaker):
    """Makes one owner's memory as unnamed files, so that windows can map it."""

    takes_over = False

    def __init__(self, memories: dict[int, OwnerSlabs], owner: int, num_owners: int) -> None:
        """``memories``: receives the memory, by owner."""
        self._memories, self._owner, self._num_owners = memories, owner, num_owners

    def make_memory(self, spec: ModelSpec, kernel: str, plan: OwnerPlan) -> OwnerSlabs:
        shared = SharedPlan.of(spec, self._num_owners)
        facts = shared.facts("params", self._owner, kernel, 0)
        made = self._memories[self._owner] = OwnerSlabs(shared, facts, None)
        return made


class LocalVersions(Versions):
    """Those of owners in this process."""

    def __init__(self, services: Sequence[ShardService], shard_map: ShardMap) -> None:
        """``services``: by owner."""
        self._services, self._shard_map = services, shard_map

    def content(self, shards: Sequence[int], version: int) -> int | None:
        newest = 0
        for shard in shards:
            content = self._services[self._shard_map.owner(shard)].content_at(shard, version)
            if content is None:
                return None
            newest = max(newest, content)
        return newest


class LocalTransfers(Transfers):
    """The way to an owner in this process, which reads the rank's gradients in place.

    No thread of the pool ever waits."""

    def __init__(
        self,
        service: ShardService,
        lead: StepLead,
        *,
        rank: int,
        copies: ThreadPoolExecutor,
        watch: StallWatch,
        recorder: Recorder,
    ) -> None:
        """``copies``: the threads that copy. ``lead``: knows whom a step waits for."""
        self.owner, self.transport = service.owner, "inproc"
        self._service, self._lead, self._rank = service, lead, rank
        self._copies, self._watch, self._recorder = copies, watch, recorder

    def load(self, gather: Gather, unit: int, shards: list[Shard], values: Tensor) -> None:

        def copy() -> None:
            for shard in shards:
                self._service.load(shard.index, values[shard.start : shard.stop])
            self._count("load", shards, values, None)

        self._submit(gather, copy)

    def stage(
        self,
        gather: Gather,
        unit: int,
        shards: list[Shard],
        version: int,
        kind: str,
        values: Tensor,
        made: Future[None],
    ) -> None:

        def copy() -> None:
            for shard in shards:  # cloned, because the caller may reuse its memory after a stall
                self._service.stage(shard.index, version, kind, values[shard.start : shard.stop].clone())

        gather.run(copy)

    def fetch(
        self, gather: Gather, unit: UnitLayout, shards: list[Shard], version: int, kind: str, out: Tensor
    ) -> None:
        coded = kind == COMPUTE and unit.is_coded
        taken: list[int] = []  # bytes of each shard
        left = Gather(len(shards), lambda: self._count("fetch", shards, out, unit if coded else None, sum(taken)))
        left.future.add_done_callback(lambda done: gather.end(done.exception()))
        for shard in shards:
            read = self._read(f"{unit.name} v{version}", shard, version, STORED if coded else kind)
            kept = (unit, shard) if coded else None
            read.add_done_callback(partial(self._copy, gather, left, out[shard.start : shard.stop], kept, taken))

    def _copy(
        self, gather: Gather, left: Gather, out: Tensor, kept: Kept | None, taken: list[int], read: Future[Tensor]
    ) -> None:
        """Copy one shard of a fetch in the pool, after it was read. ``kept``: whose record was read, if it is one."""
        error = read.exception()
        if error is not None:
            left.end(error)
        elif gather.start():
            taken.append(read.result().nbytes)
            self._submit(left, partial(_copy_into, out, read.result(), kept))

    def published(self, awaited: str, shards: Sequence[Shard], version: int) -> Future[None]:
        done: Future[None] = Future()
        reads = [self._read(awaited, shard, version, COMPUTE) for shard in shards]
        when_all(reads, lambda _: settle(done, None), partial(fail, done))
        return done

    def _read(self, awaited: str, shard: Shard, version: int, kind: str) -> Future[Tensor]:
        read = self._service.read(shard.index, version, kind)

        def describe(_: float) -> Future[str]:
            return settled(f"{self._service.describe(shard.index)}; the lead: {self._lead.describe()}")

        return self._watch.watch(read, f"{awaited} from optimizer {self.owner}", describe)

    def _submit(self, gather: Gather, part: Callable[[], None]) -> None:
        try:
            self._copies.submit(gather.run, part)
        except RuntimeError:  # the pool is shut down
            gather.end(StoreClosedError(f"rank {self._rank} closed its store"))

    def _count(
        self,
        direction: str,
        shards: Sequence[Shard],
        tensor: Tensor,
        coded: UnitLayout | None,
        size: int | None = None,
    ) -> None:
        numel, codec = sum(shard.numel for shard in shards), RAW if coded is None else codec_of(coded)
        count_bytes(self._recorder, direction, self.transport, numel, tensor.dtype, codec=codec, size=size)


class LocalLead(LeadLine):
    """To the lead in this process."""

    def __init__(self, rank: int, life: int, owners: LocalOwners, watch: StallWatch) -> None:
        self._rank, self._life, self._owners, self._watch = rank, life, owners, watch

    @property
    def _lead(self) -> StepLead:
        """The lead. Raises StoreClosedError for a rank that has a later life."""
        require_life(self._rank, self._life, self._owners.lives)
        return self._owners.lead

    def finish(self, awaited: str, report: FinishReport, inputs: StepInputs | None) -> Future[Norm]:
        return self._watched(awaited, self._lead.finish(report, inputs))

    def commit(self, awaited: str, step: int, inputs: StepInputs) -> Future[Decision]:
        return self._watched(awaited, self._lead.commit(self._rank, step, inputs))

    def decision(self, awaited: str, step: int) -> Future[Decision]:
        return self._watched(awaited, self._lead.decision(step))

    def discard(self, awaited: str, step: int, attempt: int) -> Future[None]:
        return self._watched(awaited, self._lead.discard(self._rank, step, attempt))

    def write(self, awaited: str, write: Write) -> Future[None]:
        return self._watched(awaited, self._lead.write(self._rank, write))

    def made(self, awaited: str, write: Write) -> Future[None]:
        return self._watched(awaited, self._lead.know_write(self._rank, write))

    def begin_save(
        self, awaited: str, number: int, step: int, directory: Path, files: tuple[FileEntry, ...]
    ) -> Future[None]:
        return self._watched(awaited, self._lead.begin_save(self._rank, step, directory, files))

    def save(
        self, awaited: str, number: int, step: int, directory: Path, files: tuple[FileEntry, ...], *, begun: bool
    ) -> Future[CheckpointInfo]:
        return self._watched(awaited, self._lead.save(self._rank, step, directory, files, begun=begun))

    def mean(self, awaited: str, number: int, given: MeanInput) -> Future[tuple[float, ...]]:
        return self._watched(awaited, self._lead.mean(self._rank, number, given))

    def give_again(self, awaited: str, number: int, given: MeanInput) -> Future[None]:
        return self._watched(awaited, self._lead.know_mean(self._rank, number, given))

    def _watched(self, awaited: str, answer: Future[T]) -> Future[T]:
        return self._watch.watch(answer, awaited, lambda _: settled(self._lead.describe()))


class LocalConnection(Connection):
    """To owners in this process."""

    in_process = True

    def __init__(
        self,
        rank: int,
        owners: LocalOwners,
        *,
        stall_timeout: float = 600.0,
        recorder: Recorder | None = None,
        life: int = 0,
    ) -> None:
        """``stall_timeout``: seconds that a wait for a peer may last without progress. ``life``: how often the rank has
        died and come back."""
        self.rank, self.owners, self.life = rank, owners, life
        self.epochs = Epochs(change=False)
        self.recorder = recorder or NullRecorder()
        self.stall_timeout = stall_timeout
        self._watch = StallWatch(f"rank {rank}", stall_timeout)
        self._copies = ThreadPoolExecutor(
            _POOL, thread_name_prefix=f"store-{rank}", initializer=use_torch_threads, initargs=(1,)
        )
        self._windows: UnitWindows | None = None
        self._gradients: GradientRegion | None = None  # after attach
        self._lead = LocalLead(rank, life, owners, self._watch)
        self._attached = False

    def attach(self, spec: ModelSpec, *, page_lock: torch.device | None) -> Joined:
        services = self.owners.services
        require_life(self.rank, self.life, self.owners.lives)
        self.owners.lose(self.rank, self.life)
        back = self.life > 0
        answers = [service.attach(self.rank, spec, own_gradients=True, comes_back=back) for service in services]
        if self._gradients is None:
            self._memory = gradient_memory(spec, pinned_for=page_lock)
            self._gradients = gradient_region(spec, self._memory)
        step = self.owners.lead.attach(self.rank, spec, answers[0].version)
        for service in services:
            service.map_gradients(self.rank, self._memory, step if self.life else None)
        plan = SharedPlan.of(spec, len(services))
        if self._windows is None:
            arenas = {owner: memory.arena for owner, memory in self.owners.memories.items()}
            self._windows = UnitWindows(plan, arenas, page_lock=page_lock)
        self._attached = True
        needs_load = any(answer.needs_load for answer in answers)
        return Joined(
            attached=Attached(version=answers[0].version, needs_load=needs_load, step=step),
            spec=spec,
            shard_map=plan.shard_map,
            transfers=[self._transfers(service) for service in services],
            versions=LocalVersions(services, plan.shard_map),
            senders={},
            lead=self._lead,
            windows=self._windows,
            gradients=self._gradients,
            announce=self._announce,
            takes_scattered=spec.accumulation_steps == 1,  # else each would be copied by the step's next push
            gradient_tier="ram" if page_lock is None else "pinned",
            kernel=services[0].kernel,
            transport="inproc",
        )

    def _transfers(self, service: ShardService) -> LocalTransfers:
        return LocalTransfers(
            service,
            self.owners.lead,
            rank=self.rank,
            copies=self._copies,
            watch=self._watch,
            recorder=self.recorder,
        )

    def _announce(self, unit: int, pushed: Sequence[Pushed]) -> None:
        require_life(self.rank, self.life, self.owners.lives)
        scattered = None if self._gradients is None else self._gradients.scattered(unit)
        for service in self.owners.services:
            service.observe(self.rank, unit, pushed[-1], scattered)

    def in_totals(self, unit: int, pushed: Pushed) -> bool:
        return all(service.in_totals(self.rank, unit, pushed) for service in self.owners.services)

    def on_bell(self, look: Callable[[], None]) -> None:
        return

    def keep(self, state: LoopState) -> Future[None]:
        require_life(self.rank, self.life, self.owners.lives)
        self.owners.loop_states.keep(self.rank, state)
        return DONE

    def kept(self) -> list[LoopState]:
        return self.owners.loop_states.of(self.rank)

    def leave(self, reason: str) -> None:
        if self._attached and self.owners.lives.get(self.rank, 0) <= self.life:
            for service in self.owners.services:
                service.left(self.rank, reason)
            self.owners.lead.leave(self.rank, reason)
        self._watch.close(StoreClosedError(f"rank {self.rank} closed its store ({reason})"))

    def free(self) -> None:
        if self._windows is not None:
            self._windows.close()
        self._copies.shutdown(wait=True)


def _copy_into(out: Tensor, memory: Tensor, kept: Kept | None) -> None:
    out.copy_(memory) if kept is None else read_record(memory, *kept, out)
