"""A rank's connection to its owners: transfers to each, a line to the lead, and the memory they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from rayzero.concurrency.gather import Gather
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.layout.shard_map import ShardMap
from rayzero.protocol.messages import (
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
from rayzero.store.rank.memory.gradient_region import GradientRegion
from rayzero.store.rank.memory.unit_windows import UnitWindows
from rayzero.telemetry.recorder import Recorder


class Transfers(Protocol):
    """Moves bytes between this rank and one owner. Each verb is one part of a ``Gather``; ``values`` and ``out`` are
    the whole unit's flat vector, of which it takes the given shards."""

    owner: int
    transport: str  # "inproc", "shm" or "grpc", as metrics call it

    def load(self, gather: Gather, unit: int, shards: list[Shard], values: Tensor) -> None:
        """Send initial values."""
        ...

    def stage(self, gather: Gather, unit: int, shards: list[Shard], version: int, kind: str, values: Tensor) -> None:
        """Send the values of a write to come."""
        ...

    def fetch(
        self, gather: Gather, unit: UnitLayout, shards: list[Shard], version: int, kind: str, out: Tensor
    ) -> None:
        """Fill the shards' ranges of ``out`` (1D, unit.numel elements; the unit's dtype for COMPUTE, else fp32) once
        they have ``version``."""
        ...

    def published(self, awaited: str, shards: Sequence[Shard], version: int) -> Future[None]:
        """Done once all ``shards`` have ``version``, or once only the owner knows whether they ever will. ``awaited``:
        the name for errors."""
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
        """Send the shards' ranges of ``grads``, the whole unit's flat vector: one part of the ``Gather``."""
        ...


class LeadLine(Protocol):
    """Sends a rank's calls to the lead. Every wait ends by an answer, leave, abort or stall; see the same methods of
    ``ParameterStore``. ``awaited`` names the answer in errors."""

    def finish(self, awaited: str, report: FinishReport, inputs: StepInputs | None) -> Future[Norm]:
        """Report what was pushed; the future has the norm."""
        ...

    def commit(self, awaited: str, step: int, inputs: StepInputs) -> Future[Decision]:
        """The decision of a step that this rank has finished."""
        ...

    def decision(self, awaited: str, step: int) -> Future[Decision]:
        """The recorded decision."""
        ...

    def discard(self, awaited: str, step: int, attempt: int) -> Future[None]:
        """Discard the attempt: the step is tried again."""
        ...

    def write(self, awaited: str, write: Write) -> Future[None]:
        """A write whose values are staged."""
        ...

    def save(self, awaited: str, step: int, directory: Path, files: tuple[FileEntry, ...]) -> Future[CheckpointInfo]:
        """A checkpoint of version ``step``."""
        ...

    def mean(self, awaited: str, given: MeanInput) -> Future[tuple[float, ...]]:
        """A mean over ranks."""
        ...


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A rank's place among its owners, after the handshake. Freed by: ``Connection.free``."""

    attached: Attached
    spec: ModelSpec
    shard_map: ShardMap
    transfers: Sequence[Transfers]  # by owner
    senders: Mapping[int, GradientSender]  # by owner that gradients are sent to; the others read them here
    lead: LeadLine
    windows: UnitWindows | None  # over the owners' parameters, where memory is shared
    gradients: GradientRegion | None  # this rank's, where owners of its host read them
    gradient_tier: str  # of their memory, as metrics call it: "ram", "pinned" or "shm"
    kernel: str
    transport: str  # "inproc", "shm", "grpc", or "shm+grpc" where some owners are on other hosts


class Connection(Protocol):
    """The owners of one model as one rank reaches them, in this process or in others."""

    rank: int
    recorder: Recorder
    in_process: bool  # the owners end with this process

    def attach(self, spec: ModelSpec, *, page_lock: bool) -> Joined:
        """Shake hands with every owner; blocks. See ``ParameterStore.attach``."""
        ...

    def announce(self, unit: int, pushed: Pushed) -> None:
        """Tell the owners of this host what the unit's range of ``Joined.gradients`` holds; its bytes are there."""
        ...

    def leave(self, reason: str) -> None:
        """Tell the owners and end every wait, an attach of another thread included."""
        ...

    def free(self) -> None:
        """Release threads, memory and channels. Nothing of them may be used afterwards."""
        ...
