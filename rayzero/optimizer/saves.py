"""Checkpoints that ranks ask for: gathered, written by every owner, committed by one rename."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rayzero.checkpoint.writer import commit_checkpoint
from rayzero.errors import RayZeroError, StepMismatchError
from rayzero.messages import CheckpointInfo, FileEntry, Hyper, ModelSpec
from rayzero.optimizer.futures import fail, settle, when_all
from rayzero.optimizer.peers import OwnerPeer
from rayzero.telemetry.names import CHECKPOINT_FAILURES, CHECKPOINT_LAST_SUCCESS, CHECKPOINT_SECONDS
from rayzero.telemetry.recorder import Recorder, timed


@dataclass(eq=False)
class Save:
    """One checkpoint on its way."""

    step: int
    directory: Path
    files: dict[int, tuple[FileEntry, ...]] = field(default_factory=dict)  # per rank that asked
    futures: dict[int, Future[CheckpointInfo]] = field(default_factory=dict)


class SaveRequests:
    """The checkpoint the ranks are asking for, at most one at a time.

    Knows who asked, and owners as peers; not steps, or when a decision may go on. Thread-safe."""

    def __init__(self, peers: Sequence[OwnerPeer], recorder: Recorder) -> None:
        """``peers``: every owner, by owner index."""
        self._peers = peers
        self._recorder = recorder
        self._lock = threading.Lock()
        self._open: Save | None = None
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-commit")

    def ask(
        self, rank: int, step: int, directory: Path, files: tuple[FileEntry, ...]
    ) -> tuple[Save, Future[CheckpointInfo]]:
        """Note that a rank asks. Raises StepMismatchError when another asked for something else."""
        with self._lock:
            save = self._open = self._open or Save(step, directory)
            if (save.step, save.directory) != (step, directory):
                raise StepMismatchError(
                    f"rank {rank} saves v{step} to {directory}, rank {min(save.files)} saves v{save.step} to "
                    f"{save.directory}; every rank must save the same"
                )
            save.files[rank] = files
            return save, save.futures.setdefault(rank, Future())

    def holds(self, step: int) -> bool:
        """True while version ``step`` is asked for and not yet written by every owner."""
        return self._open is not None and self._open.step == step

    def asked(self) -> tuple[int, frozenset[int]] | None:
        """The version asked for, and the ranks that have asked."""
        with self._lock:
            return (self._open.step, frozenset(self._open.files)) if self._open is not None else None

    def waits_for(self, world_size: int) -> str:
        """Who is waited for, for messages about waits."""
        with self._lock:
            missing = [rank for rank in range(world_size) if self._open and rank not in self._open.files]
        return f"{have(missing)} not asked for it" if missing else "owners are writing"

    def write(
        self,
        save: Save,
        spec: ModelSpec,
        hyper_at: Callable[[int], tuple[Hyper, ...]],
        written: Callable[[], None],
    ) -> None:
        """Ask every owner to write; then ``written`` is called, and the manifest is committed in a thread."""

        def then(owner_files: list[FileEntry]) -> None:
            hyper = hyper_at(save.step)
            self._committer.submit(_commit, save, spec, hyper, owner_files, self._recorder)
            self._release(written)

        def otherwise(error: BaseException) -> None:
            self._recorder.add(CHECKPOINT_FAILURES)
            for future in save.futures.values():
                fail(future, error)
            self._release(written)

        when_all([peer.save(save.step, save.directory) for peer in self._peers], then, otherwise)

    def _release(self, written: Callable[[], None]) -> None:
        with self._lock:
            self._open = None
        written()

    def abandon(self, error: BaseException) -> None:
        """Fail those who ask for a checkpoint that will not be."""
        with self._lock:
            save, self._open = self._open, None
        for future in save.futures.values() if save else ():
            fail(future, error)

    def close(self) -> None:
        """Finish the checkpoint that is being committed. Idempotent."""
        self._committer.shutdown(wait=True)


def have(ranks: Sequence[int]) -> str:
    """Which ranks have (done something), for messages."""
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {list(ranks)} have"


def _commit(
    save: Save, spec: ModelSpec, hyper: tuple[Hyper, ...], owner_files: Sequence[FileEntry], recorder: Recorder
) -> None:
    commit = partial(commit_checkpoint, save.directory, step=save.step, spec=spec, hyper=hyper)
    rank_files = [entry for rank in sorted(save.files) for entry in save.files[rank]]
    try:  # each piece's content carries its own step count
        with timed(recorder, CHECKPOINT_SECONDS, phase="publish"):
            info = commit(slot_steps={}, owner_files=owner_files, rank_files=rank_files)
    except (OSError, RayZeroError) as exc:
        recorder.add(CHECKPOINT_FAILURES)
        for future in save.futures.values():
            fail(future, exc)
        return
    recorder.set(CHECKPOINT_LAST_SUCCESS, time.time())
    for future in save.futures.values():
        settle(future, info)
