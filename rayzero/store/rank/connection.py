"""A rank's connection to its owners: transfers to each, a line to the lead, and the memory they share; over one epoch
after the other.

[Note: a call over two epochs] While owners change, whatever was asked of those of the last epoch fails, or is never
answered. Every such call can be made again, because owners and the lead execute a repeat once. So a call that has no
answer when its epoch ends is made again over the next epoch's connection, in the order in which calls were first made;
the caller notices nothing but time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from rayzero.concurrency.futures import Gather, chain, fail, future_raises
from rayzero.errors import EpochOverError, RayZeroError
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.layout.shard_map import ShardMap
from rayzero.protocol.messages import (
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
    Pushed,
    StepInputs,
    Write,
)
from rayzero.store.rank.gradient_region import GradientRegion
from rayzero.store.rank.shared_memory import SharedRank
from rayzero.store.rank.unit_windows import UnitWindows
from rayzero.telemetry.recorder import Recorder

T = TypeVar("T")


class _Answer(Future[T]):
    """The answer to a call over several epochs. Like that of one call, it can be cancelled until something is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self.made: Future[T] | None = None  # the call that is under way

    def cancel(self) -> bool:
        """See ``Gather``."""
        with self.lock:
            return (self.made is None or self.made.cancel()) and super().cancel()


class Epochs:
    """The calls of one rank's store, and the epoch over which they are made now.

    Knows calls and their order; not what they ask, or whom. Thread-safe."""

    def __init__(self, number: int = 0, *, change: bool = True) -> None:
        """``number``: of the present epoch. ``change``: owners may change; else a call is made once."""
        self._change = change
        self._lock = threading.Condition()
        self._number = number
        self._between = False  # the last epoch is over, and the next one has not begun
        self._waiting: dict[int, tuple[Callable[[], None], Future[Any]]] = {}  # by number of the call: it, its answer
        self._calls = count()
        self._making = 0  # calls that are being made now
        self._error: RayZeroError | None = None

    def make(self, call: Callable[[], Future[T]]) -> Future[T]:
        """Make a call, and again in each epoch until it is answered. See [Note: a call over two epochs]."""
        if not self._change:
            return call()
        number, answer = next(self._calls), _Answer[T]()
        if not self._begins(number, call, answer, after=None):
            return answer
        epoch, made = self._number, self._made(call)
        if made.done() and not made.cancelled() and made.exception() is None:  # the usual case of a read
            return made
        answer.made = made
        made.add_done_callback(partial(self._take, number, epoch, call, answer))
        return answer

    def _make(self, number: int, call: Callable[[], Future[T]], answer: _Answer[T]) -> None:
        """Make a call that ``_begins`` has let through."""
        with answer.lock:
            if answer.cancelled():
                self._end_making()
                return
            epoch, made = self._number, self._made(call)
            answer.made = made
        made.add_done_callback(partial(self._take, number, epoch, call, answer))

    def _made(self, call: Callable[[], Future[T]]) -> Future[T]:
        try:
            return future_raises(call)()
        finally:
            self._end_making()

    def _end_making(self) -> None:
        with self._lock:
            self._making -= 1
            self._lock.notify_all()

    def _take(
        self, number: int, epoch: int, call: Callable[[], Future[T]], answer: _Answer[T], made: Future[T]
    ) -> None:
        """A call has ended: pass its result on, or make it again if its epoch is over."""
        if not made.cancelled() and not answer.done():  # else the caller has given up
            error = made.exception()
            if error is not None and (isinstance(error, EpochOverError) or self.is_over(epoch)):
                if self._begins(number, call, answer, after=epoch):
                    self._make(number, call, answer)
                return
            chain(made, answer)
        with answer.lock:
            answer.made = None  # it has this callback: the cycle would keep the call's tensors until it is collected

    def is_over(self, epoch: int) -> bool:
        """Whether calls of ``epoch`` are to be made again in a later one."""
        with self._lock:
            return self._error is None and (self._between or epoch < self._number)

    def _begins(self, number: int, call: Callable[[], Future[T]], answer: _Answer[T], after: int | None) -> bool:
        """Whether a call can be made now; else it waits until the epoch behind ``after`` (None: the present one) has
        begun, or fails."""
        with self._lock:
            begins, error = not self._between and (after is None or after < self._number), self._error
            if error is None and begins:
                self._making += 1
            elif error is None:
                self._waiting[number] = partial(self._make, number, call, answer), answer
        if error is not None:
            fail(answer, error)
        return begins and error is None

    @property
    def number(self) -> int:
        """Of the present epoch."""
        return self._number

    def wait(self, after: int, timeout_s: float) -> None:
        """Block until the epoch behind ``after`` has begun, or ``timeout_s`` is over. Raises the error after which none
        begins."""
        with self._lock:
            self._lock.wait_for(lambda: self._number > after or self._error is not None, timeout_s)
            if self._error is not None:
                raise self._error

    def over(self) -> None:
        """The present epoch is over: calls wait for ``begin``."""
        with self._lock:
            self._between = True

    def drain(self) -> None:
        """Block until no call is being made any more, after ``over``, and after whatever would hold one up has ended:
        one that was let through before would else find its way to the next owners before these expect any."""
        with self._lock:
            self._lock.wait_for(lambda: not self._making)

    def begin(self, number: int) -> None:
        """The next epoch has begun: make the calls that wait, in their order."""
        with self._lock:
            self._number, self._between = number, False
            waiting, self._waiting = self._waiting, {}
            self._making += len(waiting)
            self._lock.notify_all()
        for _, (make, _) in sorted(waiting.items()):
            make()

    def fail(self, error: RayZeroError) -> None:
        """No other epoch begins: calls that wait for one, now or later, fail with ``error``."""
        with self._lock:
            self._error = self._error or error
            waiting, self._waiting = self._waiting, {}
            self._lock.notify_all()
        for _, answer in waiting.values():
            fail(answer, self._error)


class Transfers(Protocol):
    """Moves bytes between this rank and one owner. Each transfer is one part of a ``Gather``. ``values`` and ``out``
    are the whole unit's flat vector (1D, unit.numel elements, host memory), of which it moves the given shards."""

    owner: int
    transport: str  # "inproc", "shm" or "grpc", as metrics call it

    def load(self, gather: Gather, unit: int, shards: list[Shard], values: Tensor) -> None:
        """Send initial values: fp32 for trained units, the unit's dtype for frozen ones."""
        ...

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
        """Send the values of a write before the lead is asked for it: the unit's dtype for COMPUTE, else fp32.
        ``made``: done when the write is made; until then a successor of the owner needs them again."""
        ...

    def fetch(
        self, gather: Gather, unit: UnitLayout, shards: list[Shard], version: int, kind: str, out: Tensor
    ) -> None:
        """Fill the shards' ranges of ``out`` (the unit's dtype for COMPUTE, else fp32) once they have ``version``."""
        ...

    def published(self, awaited: str, shards: Sequence[Shard], version: int) -> Future[None]:
        """Done once all ``shards`` have ``version``, or once the owner is ending the run and only it knows whether they
        will. ``awaited``: names the version in errors."""
        ...


class Versions(Protocol):
    """What this rank knows of published versions without asking."""

    def content(self, shards: Sequence[int], version: int) -> int | None:
        """The version that the newest content among ``shards`` is from, 0 without any; None while one of them does not
        have ``version``."""
        ...


class GradientSender(Protocol):
    """Sends gradients to one owner that cannot read them in this rank's memory."""

    def push(
        self, gather: Gather, unit: UnitLayout, shards: list[Shard], contribution: Contribution, grads: Tensor
    ) -> None:
        """Send the shards' ranges of ``grads`` (the whole unit: 1D, unit.numel elements, the unit's dtype), as one part
        of ``gather``."""
        ...


class LeadLine(Protocol):
    """Sends a rank's calls to the lead; see the same methods of ``ParameterStore``. Every wait ends with an answer, a
    leave, an abort or a stall. ``awaited`` names the answer in errors."""

    def finish(self, awaited: str, report: FinishReport, inputs: StepInputs | None) -> Future[Norm]:
        """Report what was pushed; the future has the norm."""
        ...

    def commit(self, awaited: str, step: int, inputs: StepInputs) -> Future[Decision]:
        """Ask for the decision of a step that this rank has finished."""
        ...

    def decision(self, awaited: str, step: int) -> Future[Decision]:
        """Ask for the recorded decision."""
        ...

    def discard(self, awaited: str, step: int, attempt: int) -> Future[None]:
        """Discard the attempt: the step is reopened."""
        ...

    def write(self, awaited: str, write: Write) -> Future[None]:
        """Ask for a write whose values are staged."""
        ...

    def made(self, awaited: str, write: Write) -> Future[None]:
        """Say that a write is made: this rank, which has come back, has found its values published."""
        ...

    def begin_save(
        self, awaited: str, number: int, step: int, directory: Path, files: tuple[FileEntry, ...]
    ) -> Future[None]:
        """Begin a checkpoint of version ``step``: this rank's ``number``th, counted from 1."""
        ...

    def save(
        self, awaited: str, number: int, step: int, directory: Path, files: tuple[FileEntry, ...], *, begun: bool
    ) -> Future[CheckpointInfo]:
        """Ask for a checkpoint of version ``step``, or for the end of the one with this number that was ``begun``."""
        ...

    def mean(self, awaited: str, number: int, given: MeanInput) -> Future[tuple[float, ...]]:
        """Ask for this rank's ``number``th mean over all ranks, counted from 1."""
        ...

    def give_again(self, awaited: str, number: int, given: MeanInput) -> Future[None]:
        """Say what a former life of this rank gave to that mean."""
        ...


Announce = Callable[[int, Sequence[Pushed]], None]  # of a unit, what there is of it


def nothing(unit: int, pushed: Sequence[Pushed]) -> None:
    """Tell nobody: no owner reads this rank's memory, or what it reads ends with this process."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """What a rank has after the handshake. Freed by: ``Connection.free``."""

    attached: Attached
    spec: ModelSpec
    shard_map: ShardMap
    transfers: Sequence[Transfers]  # by owner
    versions: Versions
    senders: Mapping[int, GradientSender]  # by owner; an owner without one reads this rank's memory
    lead: LeadLine
    windows: UnitWindows | None  # over the owners' parameters, where memory is shared
    bring: Callable[[Write], Future[None]] | None = None  # lets this host's copy of a unit have what was written
    finished: Callable[[FinishReport], None] | None = None  # tells the door that sends this host's gradients in sums
    gradients: GradientRegion | None  # this rank's, if owners read gradients in its memory, or it keeps what it pushed
    pages: SharedRank | None = None  # has those of ``gradients``, if they can be given back
    keeps_pushed: bool = False  # also what senders send goes through that memory: a successor of an owner needs it
    announce: Announce = nothing  # tells the owners of this host what ``gradients`` has of a unit; the bytes are there
    note: Announce = nothing  # notes it for successors of these owners without waking anybody: some is there no more
    takes_scattered: bool = False  # owners read gradients also where autograd has left them
    gradient_tier: str  # tier of that memory, as metrics call it: "ram", "pinned" or "shm"
    kernel: str
    transport: str  # "inproc", "shm", "grpc", or "shm+grpc" where some owners are on other hosts


class Connection(Protocol):
    """Connects one rank to the owners of one model, in this process or in others."""

    rank: int
    recorder: Recorder
    in_process: bool  # the owners end with this process
    stall_timeout: float  # seconds that a wait for a peer may last without progress
    epochs: Epochs  # over which its calls are made

    def attach(self, spec: ModelSpec, *, page_lock: torch.device | None) -> Joined:
        """Shake hands with every owner; blocks. See ``ParameterStore.attach``."""
        ...

    def in_totals(self, unit: int, pushed: Pushed) -> bool:
        """Whether all of what was pushed of a unit is in totals."""
        ...

    def on_bell(self, look: Callable[[], None]) -> None:
        """Call ``look`` when owners of this host have published, and perhaps when they have not. Nothing of ranges is
        given back where it is never called."""
        ...

    def keep(self, state: LoopState) -> Future[None]:
        """Keep a state of this rank's loop where it outlives the rank; done when it is kept."""
        ...

    def kept(self) -> list[LoopState]:
        """What an earlier life of this rank has kept, oldest first; blocks."""
        ...

    def leave(self, reason: str) -> None:
        """Tell the owners and end every wait, including an attach in another thread."""
        ...

    def free(self) -> None:
        """Release threads, memory and channels. None of them may be used afterwards."""
        ...


class ChangingConnection(Connection, Protocol):
    """A connection to owners that may give way to others."""

    def end(self) -> None:
        """The epoch of these owners is over: end every wait and call. Idempotent."""
        ...

    def retire(self) -> None:
        """End every transfer and thread, after ``end``, but keep what the next connection needs."""
        ...

    def take_over(self, before: Self) -> Joined:
        """Shake hands with the owners of this epoch, and go on where ``before``, which is retired, has ended;
        blocks."""
        ...
