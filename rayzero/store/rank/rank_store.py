"""Sends a rank's calls to the owners of a unit's shards, whatever transport reaches each owner."""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from rayzero.concurrency.futures import (
    DONE,
    Gather,
    chain,
    fail,
    future_raises,
    is_well,
    settle,
    settled,
    then,
    when_all,
)
from rayzero.errors import EpochOverError, RayZeroError, StoreClosedError, StoreError
from rayzero.layout.model_layout import Shard, UnitLayout, dtype_name
from rayzero.memory.process_memory import give_back_freed
from rayzero.protocol.gradient_sum import ScatteredUnit, has_totals
from rayzero.protocol.messages import (
    COMPUTE,
    MASTER,
    PRODUCT,
    Attached,
    CheckpointInfo,
    Contribution,
    Decision,
    FileEntry,
    FinishReport,
    LoopState,
    MeanInput,
    ModelSpec,
    Norm,
    StepInputs,
    Write,
    digest_of,
)
from rayzero.protocol.store import ParameterStore
from rayzero.store.rank.connection import ChangingConnection, Connection, Joined, LeadLine, Transfers
from rayzero.store.rank.pushes import Pushes, Route, route_of
from rayzero.store.rank.unit_windows import UnitWindows
from rayzero.store.traffic import tell_build
from rayzero.store.wire.payload import require_flat
from rayzero.telemetry.metric import Metric
from rayzero.telemetry.names import FETCH_SECONDS, PUSH_SECONDS

log = logging.getLogger(__name__)

_CHANGE_S = 60.0  # how long the owners may be changing while a rank attaches

T = TypeVar("T")
P = ParamSpec("P")


class RankStore(ParameterStore):
    """Over a connection.

    Knows which owner has which shard, and what the lead is asked; not how bytes travel, what owners do with them, or
    what the engine does. Calls that wait for other ranks (``finish``, ``commit``, ``decision``, ``discard``, ``save``,
    ``mean``) hold no thread."""

    def __init__(self, connection: Connection) -> None:
        """Nothing is sent before ``attach``."""
        self.connection = connection
        self._recorder = connection.recorder
        self._joined: Joined | None = None
        self._routes: list[Route] = []  # by unit
        self._transport = ""  # the run's transport, as metrics call it
        self._pushes = Pushes(connection, self.published)
        self._newest = settled(0)  # the latest result of ``published``
        self._keeping = DONE  # the latest ``keep``
        self.means = self.saves = 0
        self.written: list[Write] = []
        self._decided = 0  # steps before are decided, and this rank repeats the last one: see repeat()
        self._epochs = connection.epochs
        self._coming: ChangingConnection | None = None  # to the owners of the next epoch, while they take over
        self._staged: tuple[int, int, str, Tensor, Future[None]] | None = None  # the last write, until it is made
        self._closed = False
        self._close_once = threading.Lock()
        self._attaching = threading.RLock()  # held during attach, so that close() frees what it has made
        if not connection.in_process:
            atexit.register(self.close)

    @property
    def in_process(self) -> bool:
        """Whether its owners are in this process."""
        return self.connection.in_process

    # ---- handshake

    def attach(self, spec: ModelSpec, *, page_lock: torch.device | None = None, all_cores: bool = False) -> Attached:
        alone = not has_totals(spec.world_size) and not self.in_process
        self._pushes.announces_at_finish = all_cores and alone
        while True:
            epoch = self._epochs.number
            with self._attaching:
                self._require_open()
                try:
                    joined = self.connection.attach(spec, page_lock=page_lock)
                except RayZeroError as error:
                    over = isinstance(error, EpochOverError) or self._epochs.is_over(epoch)
                    if self._closed or not over:  # else the owners have changed, and change() waits for the lock
                        raise
                else:
                    self._install(joined)
                    return joined.attached
            self._epochs.wait(epoch, _CHANGE_S)

    def _install(self, joined: Joined) -> None:
        """Make calls over these owners from now on."""
        self._joined, self._transport = joined, joined.transport
        self._routes = [route_of(joined, unit) for unit in joined.spec.layout.units]
        self._pushes.join(joined, self._routes)
        tell_build(self._recorder, joined.kernel, joined.transport)

    def change(self, before: ChangingConnection, after: ChangingConnection, epoch: int) -> None:
        """Other owners have taken over: go on over ``after``, and make the calls again that ``before`` has not
        answered; blocks. If that fails, calls fail with the reason."""
        self._epochs.over()
        before.end()  # an attach that is under way fails
        self._epochs.drain()
        with self._attaching:
            if self._closed:
                return
            self._coming = after
            try:
                before.retire()
                if self._joined is None:
                    before.free()
                else:
                    self._install(after.take_over(before))
                    self._stage_again()
            except RayZeroError as error:
                log.warning("rank %d cannot go on with other owners: %s", before.rank, error)
                self._epochs.fail(error)
            self.connection = self._pushes.connection = after
            self._coming = None
            self._epochs.begin(epoch)
        give_back_freed()  # threads that have ended leave what they freed, and new ones rarely take it

    # ---- parameters

    @future_raises
    def load(self, unit: int, values: Tensor) -> Future[None]:
        unit_layout = self._route(unit).unit
        _require_form("load", unit_layout, values, unit_layout.initial_dtype)

        def load() -> Future[None]:
            parts = self._routes[unit].parts
            gather = Gather(len(parts))
            for way, shards in parts:
                way.load(gather, unit, shards, values)
            return gather.future

        return self._epochs.make(load)

    @future_raises
    def fetch(self, unit: int, version: int, kind: str, out: Tensor) -> Future[None]:
        route, version = self._route(unit), max(version, self._decided)
        _require_form("fetch", route.unit, out, route.unit.dtype if kind == COMPUTE else torch.float32)
        over = self._timing(FETCH_SECONDS)

        def fetch() -> Future[None]:
            parts = self._routes[unit].parts
            gather = Gather(len(parts), over)
            for way, shards in parts:
                way.fetch(gather, route.unit, shards, version, kind, out)
            return gather.future

        return self._epochs.make(fetch)

    @future_raises
    def published(self, unit: int, version: int) -> Future[int]:
        route, version = self._route(unit), max(version, self._decided)
        content = route.content(version)
        if content is not None:  # the usual case: nothing to wait for
            return self._settled(content)
        mapped = self.mapped(unit) is not None
        return self._epochs.make(lambda: self._wait_published(self._routes[unit], version, mapped=mapped))

    def _wait_published(self, route: Route, version: int, *, mapped: bool) -> Future[int]:
        """``mapped``: the unit was when the caller asked, who expects the version in that memory. If owners on another
        host have taken over since, it does not have what they publish, so it is filled here."""
        unit = route.unit.index
        if mapped and (memory := self._moved(unit)) is not None:
            return then(self.fetch(unit, version, COMPUTE, memory), lambda _: version)
        done: Future[int] = Future()

        def look(_: object) -> None:
            content = route.content(version)
            if content is not None:
                settle(done, content)
                return
            # an owner is ending the run, or this epoch: only it, or the next one, knows whether the version will come
            asked = self.fetch(
                unit, version, COMPUTE, torch.empty(route.unit.numel, dtype=route.unit.dtype, device="cpu")
            )
            when_all([asked], show, partial(fail, done))

        def show(_: object) -> None:
            memory = self._moved(unit) if mapped else None
            if memory is None:
                settle(done, version)
            else:
                chain(then(self.fetch(unit, version, COMPUTE, memory), lambda _: version), done)

        waits = [way.published(f"{route.unit.name} v{version}", shards, version) for way, shards in route.parts]
        when_all(waits, look, partial(fail, done))
        return done

    def _moved(self, unit: int) -> Tensor | None:
        """The memory in which a unit was mapped that owners on another host have taken over; None: they have not."""
        return None if self._windows is None else self._windows.moved(unit)

    def _settled(self, content: int) -> Future[int]:
        """A done future, shared by units with the same content version: making one costs more than this check."""
        newest = self._newest
        if newest.result() != content:
            newest = self._newest = settled(content)
        return newest

    def mapped(self, unit: int) -> Tensor | None:
        """See ``ParameterStore.mapped``; None also where one of the unit's owners is on another host."""
        return self._windows.tensor(unit) if self._windows is not None else None

    def revert(self, unit: int) -> None:
        if self._windows is not None:
            self._windows.revert(unit)

    @property
    def _windows(self) -> UnitWindows | None:
        return self._joined.windows if self._joined is not None else None

    def product(self, shard: int, version: int, out: Tensor) -> Future[None]:

        def fetch() -> Future[None]:
            way, unit, part = self._way(shard)
            gather = Gather(1)
            way.fetch(gather, unit, [part], version, PRODUCT, out)
            return gather.future

        return self._epochs.make(fetch)

    def multiplied(self, shard: int, version: int, values: Tensor) -> Future[None]:

        def stage() -> Future[None]:
            way, unit, part = self._way(shard)
            gather = Gather(1)
            way.stage(gather, unit.index, [part], version, PRODUCT, values, DONE)
            return gather.future

        return self._epochs.make(stage)

    def _way(self, shard: int) -> tuple[Transfers, UnitLayout, Shard]:
        """The way to a shard's owner."""
        cut = self._require_attached().spec.layout.shards[shard]
        route = self._route(cut.unit)
        return next(way for way, shards in route.parts if cut in shards), route.unit, cut

    # ---- gradients

    def landing(self, contribution: Contribution) -> Tensor | None:
        return None if contribution.step < self._decided else self._pushes.landing(contribution)

    def release(self) -> None:
        self._pushes.release()

    @property
    def takes_scattered(self) -> bool:
        return self._joined is not None and self._joined.takes_scattered

    @future_raises
    def push(self, contribution: Contribution, grads: Tensor | ScatteredUnit) -> Future[None]:
        route = self._route(contribution.unit)
        if isinstance(grads, Tensor):
            _require_form("push", route.unit, grads, route.unit.dtype)
        if contribution.step < self._decided:
            return DONE
        return self._pushes.push(route, contribution, grads, self._timing(PUSH_SECONDS))

    # ---- calls to the lead

    @future_raises
    def write(self, unit: int, version: int, kind: str, values: Tensor) -> Future[None]:
        """Change a unit; see ``ParameterStore.write``. Rank 0 sends the bytes first."""
        route = self._route(unit)
        _require_form("write", route.unit, values, route.unit.dtype if kind == COMPUTE else torch.float32)
        if version < self._decided:
            return DONE
        write = Write(version=version, unit=unit, kind=kind, digest=digest_of(values))
        self._note(write)
        awaited = f"the write to {route.unit.name} at step {version}"
        done = Future[None]()
        staged = DONE
        if self.connection.rank == 0:
            self._staged = unit, version, kind, values, done
            staged = self._epochs.make(lambda: self._stage(unit, version, kind, values, done))

        def ask(_: object) -> None:
            chain(self._when_kept(lambda: self._ask_lead(lambda lead: lead.write(awaited, write))), done)

        when_all([staged], ask, partial(fail, done))
        return self._brought(done, write)

    def made(self, write: Write) -> Future[None]:
        if write.version < self._decided:
            return DONE
        self._note(write)
        return self._ask_lead(lambda lead: lead.made(f"the lead to hear of a write at step {write.version}", write))

    def _note(self, write: Write) -> None:
        self.written = [*(each for each in self.written if each.version == write.version), write]

    def _brought(self, made: Future[None], write: Write) -> Future[None]:
        """Done once this host's copy, if there is one, has what was written; it has no states."""
        if self._joined is None or self._joined.bring is None or write.kind not in (COMPUTE, MASTER):
            return made
        brought = Future[None]()

        def bring() -> Future[None]:
            joined = self._require_attached()  # to other owners by now, perhaps
            return DONE if joined.bring is None else joined.bring(write)

        when_all([made], lambda _: chain(self._epochs.make(bring), brought), partial(fail, brought))
        return brought

    def _stage(self, unit: int, version: int, kind: str, values: Tensor, made: Future[None]) -> Future[None]:
        parts = self._routes[unit].parts
        staged = Gather(len(parts))
        for way, shards in parts:
            way.stage(staged, unit, shards, version, kind, values, made)
        return staged.future

    def _stage_again(self) -> None:
        """Send the values of a write that is not made yet to other owners; blocks. The lead is asked again after
        that."""
        if self._staged is not None and not self._staged[-1].done():
            self._stage(*self._staged).result()

    def finish(self, report: FinishReport, inputs: StepInputs | None) -> Future[Norm]:
        if report.step < self._decided:
            return then(self.decision(report.step), _norm_of)
        awaited = f"the norm of step {report.step}"
        self._pushes.announce()
        if self._joined is not None and self._joined.finished is not None:
            self._joined.finished(report)
        if inputs is None:
            return self._ask_lead(lambda lead: lead.finish(awaited, report, None))
        return self._when_kept(lambda: self._ask_lead(lambda lead: lead.finish(awaited, report, inputs)))

    def commit(self, step: int, inputs: StepInputs) -> Future[Decision]:
        if step < self._decided:
            return self.decision(step)
        awaited = f"the decision of step {step}"
        return self._when_kept(lambda: self._ask_lead(lambda lead: lead.commit(awaited, step, inputs)))

    def _when_kept(self, ask: Callable[[], Future[T]]) -> Future[T]:
        """Ask the lead once the loop's state is kept: when all ranks have asked, a step may be decided or a write
        made."""
        keeping = self._keeping
        if is_well(keeping):
            return ask()
        asked: Future[T] = Future()
        when_all([keeping], lambda _: chain(ask(), asked), partial(fail, asked))
        return asked

    def decision(self, step: int) -> Future[Decision]:
        return self._ask_lead(lambda lead: lead.decision(f"the decision of step {step}", step))

    def discard(self, step: int, attempt: int) -> Future[None]:
        if step < self._decided:
            return DONE
        awaited = f"the discard of step {step}"
        return self._when_kept(lambda: self._ask_lead(lambda lead: lead.discard(awaited, step, attempt)))

    def begin_save(self, step: int, directory: Path, files: tuple[FileEntry, ...]) -> Future[None]:
        self.saves += 1
        awaited, number = f"the beginning of the checkpoint of step {step}", self.saves
        return self._ask_lead(lambda lead: lead.begin_save(awaited, number, step, directory, files))

    def save(
        self, step: int, directory: Path, files: tuple[FileEntry, ...], *, begun: bool = False
    ) -> Future[CheckpointInfo]:
        self.saves += not begun
        awaited, number = f"the checkpoint of step {step}", self.saves
        return self._ask_lead(lambda lead: lead.save(awaited, number, step, directory, files, begun=begun))

    def mean(self, given: MeanInput) -> Future[tuple[float, ...]]:
        self.means += 1
        number = self.means
        return self._ask_lead(lambda lead: lead.mean(f"the mean of {given}", number, given))

    def give_again(self, number: int, given: MeanInput) -> Future[None]:
        return self._ask_lead(lambda lead: lead.give_again(f"the lead to hear of a mean of {given}", number, given))

    # ---- the loop's state

    def repeat(self, decided: int) -> None:
        self._decided = decided

    def keep(self, state: LoopState) -> None:
        self._require_attached()
        self._keeping = self._epochs.make(lambda: self.connection.keep(state))

    def kept(self) -> list[LoopState]:
        self._require_attached()
        return self._epochs.make(lambda: settled(self.connection.kept())).result()

    @future_raises
    def _ask_lead(self, question: Callable[[LeadLine], Future[T]]) -> Future[T]:
        return question(self._require_attached().lead)

    # ---- close

    def close(self, reason: str = "closed") -> None:
        with self._close_once:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        for connection in (self.connection, self._coming):
            if connection is not None:
                connection.leave(reason)  # an attach in another thread fails
        with self._attaching:
            self._pushes.close()
            self.connection.free()

    # ---- small parts

    def _require_open(self) -> None:
        if self._closed:
            raise closed_error(self.connection.rank)

    def _require_attached(self) -> Joined:
        self._require_open()
        if self._joined is None:
            raise StoreError(f"rank {self.connection.rank} has not attached: call attach() first")
        return self._joined

    def _route(self, unit: int) -> Route:
        self._require_attached()
        if not 0 <= unit < len(self._routes):
            raise StoreError(f"rank {self.connection.rank} asked for unit {unit}, the layout has {len(self._routes)}")
        return self._routes[unit]

    def _timing(self, metric: Metric) -> Callable[[], None]:
        began, transport = time.perf_counter(), self._transport
        return lambda: self._recorder.observe(metric, time.perf_counter() - began, transport=transport)


def _norm_of(decision: Decision) -> Norm:
    return Norm(step=decision.step, total=decision.norm, finite=math.isfinite(decision.norm))


def closed_error(rank: int) -> StoreClosedError:
    """The error of every call to a store that has been closed."""
    return StoreClosedError(f"rank {rank} used its store after close()")


def _require_form(verb: str, unit: UnitLayout, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.shape != (unit.numel,):
        raise StoreError(f"{unit.name!r} has {unit.numel} elements, {verb} got a tensor of {tuple(tensor.shape)}")
    if tensor.dtype != dtype:
        raise StoreError(f"{verb} of {unit.name!r} takes {dtype_name(dtype)}, got {dtype_name(tensor.dtype)}")
    require_flat(tensor)
