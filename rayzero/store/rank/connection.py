"""A rank's connection to its owners: transfers to each, a line to the lead, and the memory they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from rayzero.concurrency.futures import Gather
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
from rayzero.store.rank.epochs import Epochs
from rayzero.store.rank.memory.gradient_region import GradientRegion
from rayzero.store.rank.memory.gradient_writer import Announce
from rayzero.store.rank.memory.shared_memory import SharedRank
from rayzero.store.rank.memory.unit_windows import UnitWindows
from rayzero.telemetry.recorder import Recorder


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

    def content(self, shards: Sequence[Shard], version: int) -> int | None:
        """The version that the newest content among ``shards`` is from; None while one of them does not have
        ``version``."""
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


def nothing(unit: int, pushed: Sequence[Pushed]) -> None:
    """Tell nobody: no owner reads this rank's memory, or what it reads ends with this process."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """What a rank has after the handshake. Freed by: ``Connection.free``."""

    attached: Attached
    spec: ModelSpec
    shard_map: ShardMap
    transfers: Sequence[Transfers]  # by owner
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
