"""What a rank may ask of the store, and what it may rely on.

Issue and wait are two verbs: a call that moves bytes or waits for others returns a ``Future`` at once, and the
caller waits on it where it needs the result. The future raises the call's error.

One step of rank r, version n::

    fetch(u, n, COMPUTE, out)    for every unit, forward and again backward     -> out filled
    push(Contribution(...), g)   when each unit's gradients are complete        -> landed: g is free again
    finish(report, inputs)       all fetches of version n done, all pushes landed
    write(u, n, COMPUTE, values) if the user wrote into u: every rank, any time before its commit
    commit(n, inputs)            only if finish had no inputs (the norm was needed first)
    fetch(u, n + 1, ...)         done once u's shards are published, not the whole step
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rayzero.protocol.gradient_sum import ScatteredUnit
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
    StepInputs,
    Write,
)


class ParameterStore(Protocol):
    """The optimizer actors as one rank sees them. One instance per rank; its calls may come from several threads."""

    means: int  # calls of ``mean`` so far; a rank that is started again goes on counting
    saves: int  # the same of ``save``
    written: list[Write]  # what this rank has written to the newest version that it has written to

    @property
    def in_process(self) -> bool:
        """Whether its owners are in this process."""
        ...

    def attach(self, spec: ModelSpec, *, page_lock: torch.device | None = None, all_cores: bool = False) -> Attached:
        """Shake hands with every owner, which then allocates; blocks.

        ``page_lock``: the CUDA device for whose copies the memory that ``mapped`` and ``landing`` return is locked;
        None: it is not. ``all_cores``: the rank computes on every core that it may use. If it is the only rank, owners
        that would take a core from it learn of its pushes with its finish.

        Raises HandshakeError, naming both sides, if this rank's spec differs from the one an owner already has, and
        MemoryPlanError if the owner's host has too little memory.
        """
        ...

    def load(self, unit: int, values: Tensor) -> Future[None]:
        """Send a unit's initial flat vector. Only rank 0 does this, once per unit, if attach returned ``needs_load``.

        ``values``: 1D, unit.numel elements, fp32 for trained units, the unit's dtype for frozen ones. Version 0
        of a shard is published when its values are there.
        """
        ...

    def fetch(self, unit: int, version: int, kind: str, out: Tensor) -> Future[None]:
        """Fill ``out`` (1D, host memory, unit.numel elements) with ``kind`` of the unit at exactly ``version``.

        ``kind``: COMPUTE in the unit's dtype; MASTER, STEP or an optimizer state's name in fp32. Waits for shards that
        are not published yet. ``out`` must stay alive and untouched until the future is done. A cancelled or failed
        future leaves ``out`` undefined.
        """
        ...

    def product(self, shard: int, version: int, out: Tensor) -> Future[None]:
        """Fill the shard's range of ``out`` (1D, host memory, the unit's elements, bf16) with what this rank is to
        multiply for the update that makes ``version`` (protocol/products.py). Ask once the step is decided. Fails with
        StoreError if there is nothing, or its owner has gone on without this rank."""
        ...

    def multiplied(self, shard: int, version: int, values: Tensor) -> Future[None]:
        """Send what has come out, in the same form; done when the owner has it. Too late, it is dropped."""
        ...

    def published(self, unit: int, version: int) -> Future[int]:
        """Done once every shard of the unit has ``version``. The result is the version that its content is from: older
        than ``version`` if the last decisions changed nothing, so that a copy of that content is still valid.
        """
        ...

    def mapped(self, unit: int) -> Tensor | None:
        """The unit's published parameters where the owners write them: 1D, unit.numel elements, the unit's dtype, host
        memory that lives as long as a tensor over it. None: only ``fetch`` reaches them.

        It holds version ``v`` from ``published(unit, v)`` until the finish of step ``v``. Do not write to it;
        ``revert`` undoes writes that happened. If owners on another host take over, the unit is mapped no more: the
        memory keeps the version that it holds until ``revert``, and is the caller's from then on, who fetches into it.
        """
        ...

    def revert(self, unit: int) -> None:
        """Discard what this rank has written into the unit's mapped memory. No owner has seen it. Memory that is mapped
        no more is emptied; nobody may compute with it meanwhile."""
        ...

    def landing(self, contribution: Contribution) -> Tensor | None:
        """Memory of this rank in which a push's gradients may be gathered: 1D, unit.numel elements, the unit's dtype.
        The caller writes zeros into its padding and passes this very tensor to ``push``, which then copies nothing.
        None: the caller uses its own memory.
        """
        ...

    def release(self) -> None:
        """Give back what memory for gradients this rank has, until the next push or ``landing``, which raises
        MemoryPlanError if there is no room then. Everything that was pushed must be published."""
        ...

    @property
    def takes_scattered(self) -> bool:
        """Whether ``push`` also takes an attempt's first gradients of a unit where autograd has left them."""
        ...

    def push(self, contribution: Contribution, grads: Tensor | ScatteredUnit) -> Future[None]:
        """Hand over one unit's gradients (1D, unit.numel elements, the unit's dtype; absent slots' bytes are
        never read). Done when the bytes are in this rank's memory, where owners read them, or in its landing at every
        other owner: it does not wait for other ranks. A repeat with the same header is dropped.
        """
        ...

    def write(self, unit: int, version: int, kind: str, values: Tensor) -> Future[None]:
        """Change a unit of ``version``. Every rank calls it with equal values, and it takes effect for all at once.

        ``values``: 1D, unit.numel elements, host memory, unchanged until the future is done. ``kind``: COMPUTE in the
        unit's dtype, which keeps the masters of elements whose published bits stay the same; MASTER, STEP, GROUP or an
        optimizer state's name in fp32. This rank's own fetches of the unit must be over; a fetch of ``version`` after
        the write, and ``mapped``, return what was written.

        The write is applied once all ranks have called it, after ``version`` is published and before its step is
        decided. A rank makes its writes one after the other. If ranks write different values, or one finishes the step
        without the write, the run fails with an error that names them.
        """
        ...

    def made(self, write: Write) -> Future[None]:
        """This rank has come back in the open step, and what it would write is published: say that the write is made.
        If the lead that made it is dead, ranks that have not had its answer wait for this rank. Done when it is
        known."""
        ...

    def finish(self, report: FinishReport, inputs: StepInputs | None) -> Future[Norm]:
        """Report what was pushed. With ``inputs`` this is also the commit. The future waits for all ranks.

        A second call with a ``clamp``, before the commit, gives the norm of what the clamp leaves of the gradients."""
        ...

    def commit(self, step: int, inputs: StepInputs) -> Future[Decision]:
        """Ask the lead to decide the step, after a finish without inputs. The future waits for all ranks."""
        ...

    def decision(self, step: int) -> Future[Decision]:
        """The recorded decision of ``step``, once there is one."""
        ...

    def discard(self, step: int, attempt: int) -> Future[None]:
        """Reopen a step after a finish without inputs: the contributions of ``attempt`` no longer count."""
        ...

    def begin_save(self, step: int, directory: Path, files: tuple[FileEntry, ...]) -> Future[None]:
        """Begin what ``save(..., begun=True)`` then waits for; every rank calls it. Done once every rank has, and the
        owners keep version ``step`` whatever is decided later: the training may go on."""
        ...

    def save(
        self, step: int, directory: Path, files: tuple[FileEntry, ...], *, begun: bool = False
    ) -> Future[CheckpointInfo]:
        """Write version ``step`` as a checkpoint; every rank calls it with the same ``directory``.

        Owners write their shards beside this rank's own ``files`` (already in ``staging_path(directory)``,
        checkpoint/writer.py). When all files are there, the lead writes the manifest and renames the folder.

        begun: by ``begin_save``, with the same arguments. It fails with CheckpointAbandonedError if the lead has died
        since, or an owner whose version is gone."""
        ...

    def repeat(self, decided: int) -> None:
        """This rank has come back, and its loop repeats the last step before ``decided``, which is decided: answer for
        it from what was decided. Reads get version ``decided``; pushes, writes and discards change nothing."""
        ...

    def keep(self, state: LoopState) -> None:
        """Keep what this rank's loop needs to go on with a step, where it outlives this rank: of the latest two steps.
        A commit that follows is not made before the state is kept, and fails if it cannot be."""
        ...

    def kept(self) -> list[LoopState]:
        """What an earlier life of this rank has kept, oldest first; blocks."""
        ...

    def mean(self, given: MeanInput) -> Future[tuple[float, ...]]:
        """The weighted mean over all ranks, number by number: fp64 sums in rank order, with the same bits on all ranks.

        Every rank calls it equally often, at any moment of a step; the nth calls belong together and wait for no step.
        A call fails on every rank if names or shapes differ, if the weights add up to 0, or if a rank has left without
        it."""
        ...

    def give_again(self, number: int, given: MeanInput) -> Future[None]:
        """Say what a former life of this rank gave to the ``number``th mean, which this one does not ask for: if the
        lead that made it is dead, ranks that have not had its answer wait for this rank's part. Done when it is
        known."""
        ...

    def close(self, reason: str = "closed") -> None:
        """Leave the run: the other ranks' pending finish fails at once, by name. Idempotent."""
        ...
