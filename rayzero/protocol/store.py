"""The seam between ranks and owners: what a rank may ask of the store, and what it may rely on.

Issue and wait are two verbs: a call that moves bytes or waits for others returns a ``Future`` at once, and the
caller waits on it where it needs the result. An error that belongs to the call is raised by the future.

One step of rank r, version n::

    fetch(u, n, COMPUTE, out)    for every unit, forward and again backward     -> out filled
    push(Contribution(...), g)   as each unit's gradients are complete          -> landed: g is free again
    finish(report, inputs)       all fetches of version n done, all pushes landed
    write(u, n, COMPUTE, values) where the user wrote into u: every rank, any time before its commit
    commit(rank, n, inputs)      only if finish had no inputs (the norm was wanted first)
    fetch(u, n + 1, ...)         resolves when u's shards are published, not when the step is
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from torch import Tensor

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
    StepInputs,
)


class ParameterStore(Protocol):
    """The optimizer actors as one rank sees them. One instance per rank; its calls may come from several threads."""

    def attach(self, spec: ModelSpec, *, page_lock: bool = False) -> Attached:
        """Shake hands with every owner, which then allocates; blocks.

        page_lock: lock what ``mapped`` and ``landing`` give, for copies to and from a CUDA device.

        Raises HandshakeError when this rank's spec differs from what an owner already has, naming both sides,
        and MemoryPlanError when the owner's host is too small.
        """
        ...

    def load(self, unit: int, values: Tensor) -> Future[None]:
        """Rank 0 only, once per unit after attach said ``needs_load``: the unit's initial flat vector.

        ``values``: 1D, unit.numel elements, fp32 for trained units, the unit's dtype for frozen ones. Version 0
        of a shard is published when its values are there.
        """
        ...

    def fetch(self, unit: int, version: int, kind: str, out: Tensor) -> Future[None]:
        """Fill ``out`` (1D, host memory, unit.numel elements) with ``kind`` of the unit at exactly ``version``.

        ``kind``: COMPUTE in the unit's dtype, MASTER or an optimizer state's name in fp32. Waits for shards not
        yet published; ``out`` must stay alive and untouched until the future is done. Cancelled or failed
        futures leave ``out`` undefined.
        """
        ...

    def published(self, unit: int, version: int) -> Future[int]:
        """Done once every shard of the unit has ``version``. The result is the version that its content is from: older
        than ``version`` where the last decisions changed nothing, so that a copy of that content is still good.
        """
        ...

    def mapped(self, unit: int) -> Tensor | None:
        """The unit's published parameters where the owners write them: 1D, unit.numel elements, the unit's dtype, host
        memory that stays there as long as a tensor over it. None: only ``fetch`` reaches them.

        It holds version ``v`` from ``published(unit, v)`` until the finish of step ``v``. Nobody may write to it;
        ``revert`` undoes writes that happened.
        """
        ...

    def revert(self, unit: int) -> None:
        """Throw away what this rank has written into the unit's mapped memory; no owner has seen it."""
        ...

    def landing(self, contribution: Contribution) -> Tensor | None:
        """This rank's memory that the gradients of a push may be gathered in, before ``push`` of that very tensor,
        which then copies nothing: 1D, unit.numel elements, the unit's dtype, zeros to be written into its padding.
        None: bring memory of your own.
        """
        ...

    def push(self, contribution: Contribution, grads: Tensor) -> Future[None]:
        """Hand over one unit's gradients (1D, unit.numel elements, the unit's dtype; absent slots' bytes are
        never read). Done when every owner holds the bytes in memory that belongs to this rank: it waits for
        nobody else. A repeat with the same header is dropped.
        """
        ...

    def write(self, unit: int, version: int, kind: str, values: Tensor) -> Future[None]:
        """Change a unit of ``version``: every rank calls it with equal values, and it is done for all at once.

        values: 1D, unit.numel elements, host memory, unchanged until the future is done. ``kind``: COMPUTE in the
        unit's dtype, where masters of elements whose published bits are the same keep their precision; MASTER, STEP,
        GROUP or an optimizer state's name in fp32. This rank's own fetches of the unit must be over; a fetch of
        ``version`` after the write, and ``mapped``, give what was written.

        Applied once all ranks have called it, when ``version`` is published and before its step is decided; writes of
        one rank one after the other. Ranks that write different things, and a rank that finishes the step without
        writing, fail the run by name.
        """
        ...

    def finish(self, report: FinishReport, inputs: StepInputs | None) -> Future[Norm]:
        """Say what was pushed. With ``inputs`` this is also the commit. The future waits for all ranks.

        Again with a ``clamp``, before the commit: the norm of what that leaves of the same gradients."""
        ...

    def commit(self, step: int, inputs: StepInputs) -> Future[Decision]:
        """Ask for the step to be decided, after a finish without inputs. The future waits for all ranks."""
        ...

    def decision(self, step: int) -> Future[Decision]:
        """The recorded decision of ``step``, once there is one."""
        ...

    def discard(self, step: int, attempt: int) -> Future[None]:
        """Reopen a step after a finish without inputs: the contributions of ``attempt`` count no more."""
        ...

    def save(self, step: int, directory: Path, files: tuple[FileEntry, ...]) -> Future[CheckpointInfo]:
        """Write version ``step`` as a checkpoint; every rank calls it with the same ``directory``.

        Owners write their shards beside this rank's own ``files`` (already in ``staging_path(directory)``,
        checkpoint/writer.py); when all are there the lead owner writes the manifest and renames.
        """
        ...

    def mean(self, given: MeanInput) -> Future[tuple[float, ...]]:
        """The weighted mean over all ranks, number by number: fp64 sums in rank order, the same bits for all.

        Every rank calls it equally often; the nth calls belong together, at any moment of a step, and wait for no
        step. Ranks whose names or shapes differ, and weights that add up to 0, fail that call on every rank; so does
        a rank that has left without calling."""
        ...

    def close(self, reason: str = "closed") -> None:
        """Leave the run: the other ranks' pending finish fails at once, by name. Idempotent."""
        ...
