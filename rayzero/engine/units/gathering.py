"""Brings units to the devices of one host together: each rank copies its part, and all-gathers the rest.

::

    request ─▶ bytes are in host memory ─▶ announced ─▶ agreed ─▶ own part copied, all-gathered ─▶ there
                                               └─▶ others do not come, or gather no more ─▶ all of it copied ─▶ there

[Note: nothing computes on half a gather] A rank that dies leaves the others in a collective. NCCL's can be aborted, and
then their bytes are undefined, while streams that wait for them go on. So a gathered unit counts as there once the
device is done with it, not once its work is queued, as a copy does: until then nothing reads it, and if the gather
fails, the whole unit is copied over it. The host waits for the device where a unit was not prefetched early enough.

[Note: one order on the device] All gathers are issued on the lane's stream of copies to the device, in the order that
all ranks have agreed to. A gather waits there for what used its memory before, which was queued before it was
requested, and so for gathers that are earlier in that order only. So ranks cannot wait for each other in a circle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from rayzero.concurrency.futures import fail, is_well, settle
from rayzero.config import ZeroConfig
from rayzero.engine.units.fetch import DeviceCopy, Fetching, Renewal
from rayzero.engine.units.residency import UnitBuffer, mapped_units
from rayzero.engine.units.transfers import DeviceTransfers, staging_for
from rayzero.engine.units.unit_group import UnitGroup, device_name, own_elements, part_of
from rayzero.errors import StallError, UnsupportedError
from rayzero.lanes import CudaLane, Event, Lane, StreamUses, ThreadLane
from rayzero.layout.model_layout import UnitLayout
from rayzero.memory.pool import BufferPool
from rayzero.protocol.gathers import Stop, UnitGathers
from rayzero.protocol.store import ParameterStore
from rayzero.telemetry.names import HOST_GATHER_BYTES
from rayzero.telemetry.recorder import Recorder

log = logging.getLogger(__name__)

PATIENCE_S = 0.05  # how long a rank that needs a unit waits for the others; a copy of 1 GiB takes about as long


def check_gather(config: ZeroConfig, number: int) -> None:
    """Raise UnsupportedError if the prepared model ``number`` is not the first one and units are to be gathered."""
    if config.host_gather and number:
        raise UnsupportedError(
            f"host_gather=True is for one prepared model, but this is number {number + 1}: two models' all-gathers on "
            "one GPU can wait for each other for ever; use host_gather=False"
        )


def gather_with_host(
    store: ParameterStore,
    device: torch.device,
    units: Sequence[UnitLayout],
    config: ZeroConfig,
    rank: int,
    recorder: Recorder,
) -> GatheringTransfers | None:
    """The transfers of a rank on ``device`` that gathers units with the others of its host; blocks until all of them
    have attached and are connected. None: it copies whole units.

    Raises what ``ParameterStore.join_gathers`` and ``UnitGroup`` raise."""
    gathers = store.join_gathers(device_name(device)) if config.host_gather else None
    if gathers is None:
        return None
    group = UnitGroup(device, gathers.place, gathers.size, gathers.meeting, gathers.stall_s)
    on_cuda = device.type == "cuda"
    return GatheringTransfers(
        store,
        staging_for(units, device if config.pin_cpu_memory and on_cuda else None),
        CudaLane(device) if on_cuda else ThreadLane(),
        mapped_units(store, units),
        gathers=gathers,
        group=group,
        rank=rank,
        recorder=recorder,
        patience_s=PATIENCE_S,
    )


class _State(Enum):
    """What a unit's bytes wait for."""

    ASKED = auto()  # to be in host memory
    WAITS = auto()  # for the other ranks
    AGREED = auto()  # for the device
    ALONE = auto()  # all of them are copied
    DROPPED = auto()  # for nothing: nobody wants them


@dataclass(eq=False, slots=True)
class _UnitGather:
    """One unit on its way. A ``Gather``. Its state changes under the transfers' lock."""

    transfers: GatheringTransfers
    unit: UnitLayout
    buffer: UnitBuffer
    host: Tensor  # 1D, unit.numel elements, the unit's dtype: where the bytes are copied from
    uses: StreamUses
    free: list[Event]  # what must be over before the buffer is written
    state: _State = _State.ASKED
    begun: Future[None] = field(default_factory=Future)  # it has been announced, or not
    done: Future[DeviceCopy | None] = field(default_factory=Future)
    since: float = 0.0  # AGREED: when this rank issued it; WAITS: when it turned out to be agreed; 0: it has not

    def withdraw(self) -> bool:
        """See ``Gather``."""
        return self.transfers.withdraw(self)

    def hurry(self) -> None:
        """See ``Gather``."""
        self.transfers.hurry(self)


class GatheringTransfers(DeviceTransfers):
    """The transfers of a rank that gathers units with the other ranks of its host.

    Knows what they have agreed on, and its own part; not why a unit is needed. [Note: nothing computes on half a
    gather]"""

    into_buffers = True

    def __init__(
        self,
        store: ParameterStore,
        staging: BufferPool,
        lane: Lane,
        mapped: dict[int, Tensor],
        *,
        gathers: UnitGathers,
        group: UnitGroup,
        rank: int,
        recorder: Recorder,
        patience_s: float,
    ) -> None:
        """``group``: connects the ranks that agree in ``gathers``; both are ended by ``close``. ``patience_s``: how
        long ``hurry`` waits. The rest as for ``DeviceTransfers``."""
        super().__init__(store, staging, lane, mapped)
        self._gathers, self._group, self._rank, self._recorder = gathers, group, rank, recorder
        self._patience_s = patience_s
        self._turns = threading.Lock()
        self._waiting: dict[int, _UnitGather] = {}  # by unit, those that are WAITS
        self._running: list[_UnitGather] = []  # those that are AGREED, until they are over, in their order
        self._halted = False  # the group has ended: what was on its way to a GPU is undefined
        self._stalled = False  # because a rank did not come
        self._told = False
        self._joins = ThreadPoolExecutor(1, f"rayzero-rank{rank}-gathered")  # waits for the device
        gathers.listen(self._look)

    # ---- requests

    def fetch(
        self,
        unit: UnitLayout,
        version: int,
        buffer: UnitBuffer,
        *,
        published: Future[int],
        held: int | None,
        ahead: bool,
    ) -> Fetching:
        """See ``UnitTransfers``."""
        self._reap()
        uses = buffer.uses(self.lane)
        host, staged = self._source(unit)
        gather = _UnitGather(self, unit, buffer, host, uses, uses.so_far())
        arrival, request = self._ask(unit, version, host, published, held)

        def arrived(answer: Future[None]) -> None:
            try:
                answer.result()
            except Exception as exc:  # must not end the store's thread; the rank's wait raises it
                self._let_go(staged, None)
                fail(gather.done, exc)
                return
            gather.done.add_done_callback(lambda done: self._let_go(staged, done.result() if is_well(done) else None))
            if isinstance(request, Renewal) and not request.renewed:
                settle(gather.done, None)
            else:
                published.add_done_callback(lambda content: self._announce(gather, content))

        arrival.add_done_callback(arrived)
        return Fetching(
            version,
            published,
            done=gather.done,
            request=request,
            buffer=buffer,
            ahead=ahead,
            ready=gather.done,
            gather=gather,
        )

    def _announce(self, gather: _UnitGather, published: Future[int]) -> None:
        """The unit's bytes are in host memory."""
        unit = gather.unit
        with self._turns:
            if gather.state is not _State.ASKED:
                return
            small = part_of(unit.numel, 0, self._group.size)[1] == 0
            joins = not small and unit.index not in self._waiting and is_well(published)
            if joins and self._gathers.announce(unit.index, published.result()):
                gather.state = _State.WAITS
                self._waiting[unit.index] = gather
            else:
                gather.state = _State.ALONE
        if gather.state is _State.ALONE:
            self._copy_all(gather)
        settle(gather.begun, None)

    def withdraw(self, gather: _UnitGather) -> bool:
        """Call a gather off; see ``Gather``."""
        with self._turns:
            if gather.state is _State.WAITS and not self._take_back(gather, in_vain=False):
                return False
            if gather.state in (_State.AGREED, _State.ALONE):
                return False
            gather.state = _State.DROPPED
        fail(gather.done, CancelledError())
        return True

    def hurry(self, gather: _UnitGather) -> None:
        """The caller waits for the unit; see ``Gather``."""
        either: list[Future[Any]] = [gather.begun, gather.done]
        wait_for(either, return_when=FIRST_COMPLETED)
        wait_for([gather.done], timeout=self._patience_s)
        with self._turns:
            if gather.state is not _State.WAITS or not self._take_back(gather, in_vain=True):
                return
            gather.state = _State.ALONE
        self._copy_all(gather)

    def _take_back(self, gather: _UnitGather, *, in_vain: bool) -> bool:
        """Withdraw what this rank has announced; False if it is agreed."""
        if not self._gathers.withdraw(gather.unit.index, in_vain=in_vain):
            gather.since = gather.since or time.monotonic()
            return False
        del self._waiting[gather.unit.index]
        return True

    # ---- what is agreed

    def _look(self) -> None:
        """There may be news of other ranks; in the thread that listens."""
        alone: list[_UnitGather] = []
        agreed: list[_UnitGather] = []
        with self._turns:
            if self._gathers.stopped() is None:
                while (unit := self._gathers.next()) is not None:
                    agreed.append(self._waiting.pop(unit))
                for gather in agreed:
                    gather.state, gather.since = _State.AGREED, time.monotonic()
                self._running += agreed
            else:
                alone, self._waiting = list(self._waiting.values()), {}
                for gather in alone:
                    gather.state = _State.ALONE
        for gather in agreed:
            self._issue(gather)
        for gather in alone:
            self._copy_all(gather)
        self._look_for_stalls()
        if self._gathers.stopped() is not None:
            self._halt()

    def _issue(self, gather: _UnitGather) -> None:
        """Copy this rank's part, and what is left behind the last one, and all-gather the others'."""
        flat, host = gather.buffer.flat, gather.host
        start, stop = part_of(gather.unit.numel, self._group.place, self._group.size)
        shared = self._group.size * (stop - start)
        ended: list[Event] = []

        def copy() -> None:
            flat[start:stop].copy_(host[start:stop], non_blocking=True)
            flat[shared:].copy_(host[shared:], non_blocking=True)
            self._gathers.issued()
            self._group.gather(flat[:shared])
            ended.append(self.lane.now())

        event: Event | None = None
        error: BaseException | None = None
        try:
            event = self.lane.issue("in", copy, after=gather.free, label=gather.unit.name)
        except Exception as exc:  # a stream's lane raises it at once
            error = exc
        own = own_elements(gather.unit.numel, self._group.size) * gather.unit.dtype.itemsize
        self._joins.submit(self._join, gather, event, ended, error, own)

    def _join(
        self, gather: _UnitGather, event: Event | None, ended: list[Event], error: BaseException | None, own: int
    ) -> None:
        """Wait until the device is done with a gather. ``own``: bytes that this rank has copied."""
        try:
            error = event.join() if event is not None else error
            with self._turns:
                self._running.remove(gather)
                undefined = error is not None or self._halted
            if undefined:
                self._recover(gather, error)
            else:
                assert event is not None
                gather.uses.filled(event)
                self._count(own, "own")
                self._count(gather.unit.size_bytes - own, "ranks")
                settle(gather.done, DeviceCopy(event, [ended[0], ended[0]]))  # its seconds are in those of the host
            if self._gathers.stopped() is not None:
                self._halt()
        except Exception as exc:  # would be lost in this thread; the rank's wait raises it
            fail(gather.done, exc)

    def _recover(self, gather: _UnitGather, error: BaseException | None) -> None:
        """A gather has failed, or was ended: copy the whole unit, or say for whom this rank has waited too long."""
        waited = time.monotonic() - gather.since
        if self._stalled or waited >= self._gathers.stall_s:
            self._gathers.stop(Stop.STALLED)
            fail(gather.done, self._stall(gather))
            return
        log.info("rank %d: the all-gather of %s has failed: %s", self._rank, gather.unit.name, error or "it was ended")
        self._gathers.stop(Stop.FAILED)
        with self._turns:
            gather.state = _State.ALONE
        self._copy_all(gather)

    def _copy_all(self, gather: _UnitGather) -> None:
        """Copy the whole unit, as without other ranks."""
        try:
            copied = self._copy(gather.unit, gather.buffer, gather.host, gather.free)
        except Exception as exc:  # must not end the thread of another rank's news; the rank's wait raises it
            fail(gather.done, exc)
            return
        gather.uses.filled(copied.event)
        self._count(gather.unit.size_bytes, "whole")
        settle(gather.done, copied)

    def _count(self, size: int, source: str) -> None:
        self._recorder.add(HOST_GATHER_BYTES, size, source=source)

    # ---- ranks that do not come any more

    def _look_for_stalls(self) -> None:
        """End the group if a rank does not come to what it has agreed to."""
        late = time.monotonic() - self._gathers.stall_s
        with self._turns:
            self._stalled |= any(gather.since < late for gather in self._running)
            lost = [gather for gather in self._waiting.values() if 0 < gather.since < late]
            for gather in lost:  # agreed, but whoever agreed last has stopped before it was in the order
                del self._waiting[gather.unit.index]
        for gather in lost:
            fail(gather.done, self._stall(gather))
        if self._stalled or lost:
            self._gathers.stop(Stop.STALLED)

    def _stall(self, gather: _UnitGather) -> StallError:
        return StallError(
            f"rank {self._rank} has waited {self._gathers.stall_s:g} s for {self._gathers.behind()} to come to the "
            f"all-gather of {gather.unit.name}"
        )

    def _halt(self) -> None:
        """No more is gathered: leave the group. On a GPU, gathers that run end; with gloo, they end as others leave."""
        with self._turns:
            if self._running and self.lane.device.type != "cuda":
                return
            self._halted = True
            told, self._told = self._told, True
            self._group.end()
        if not told:
            level = logging.INFO if self._gathers.was_left else logging.WARNING
            log.log(level, "rank %d copies whole units from here on: %s", self._rank, self._gathers.stopped())

    def drain(self) -> None:
        """See ``UnitTransfers``."""
        with self._turns:
            running = [gather.done for gather in self._running]
        wait_for(running)
        super().drain()

    def close(self) -> None:
        """See ``UnitTransfers``."""
        self._gathers.close()
        self._halt()
        self._joins.shutdown(wait=True)
        self._halt()
        super().close()
