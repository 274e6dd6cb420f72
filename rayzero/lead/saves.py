"""Checkpoints that ranks ask for: gathered, written by every owner, committed by one rename."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rayzero.checkpoint.writer import commit_checkpoint, discard_staging
from rayzero.concurrency.futures import fail, settle, when_ended
from rayzero.errors import RayZeroError, StepMismatchError
from rayzero.protocol.messages import CheckpointInfo, FileEntry, Hyper, ModelSpec
from rayzero.protocol.owner import OwnerPeer
from rayzero.telemetry.names import CHECKPOINT_FAILURES, CHECKPOINT_LAST_SUCCESS, CHECKPOINT_SECONDS
from rayzero.telemetry.recorder import Recorder, timed


@dataclass(eq=False)
class Save:
    """One checkpoint on its way."""

    step: int
    directory: Path
    files: dict[int, tuple[FileEntry, ...]] = field(default_factory=dict)  # per rank that asked
    futures: dict[int, Future[CheckpointInfo]] = field(default_factory=dict)
    writing: bool = False  # owners have been asked
    asked: tuple[Future[FileEntry], ...] = ()  # those, by index

    def fail(self, error: BaseException) -> None:
        """Tell the ranks that asked."""
        for future in self.futures.values():
            fail(future, error)


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
            asked = self._open.asked if self._open is not None else ()
        return f"{have(missing)} not asked for it" if missing else f"{owing(asked)} not written their files"

    def write(
        self,
        save: Save,
        spec: ModelSpec,
        hyper_at: Callable[[int], tuple[Hyper, ...]],
        written: Callable[[], None],
    ) -> None:
        """Ask every owner to write. Once all have answered, ``written`` is called, and in a thread the manifest is
        committed, or what was staged is discarded; only then do ranks hear, and may try again."""
        if not self._begin(save):
            return

        def then(owner_files: list[FileEntry]) -> None:
            try:
                hyper = hyper_at(save.step)
            except (OSError, RayZeroError) as exc:  # the checkpoint that the run began with is gone
                otherwise(exc)
                return
            self._end(save, _commit, save, spec, hyper, owner_files, self._recorder)
            written()

        def otherwise(error: BaseException) -> None:
            self._recorder.add(CHECKPOINT_FAILURES)
            self._end(save, _give_up, save, error)
            written()

        save.asked = tuple(peer.save(save.step, save.directory) for peer in self._peers)
        when_ended(save.asked, then, otherwise)

    def _begin(self, save: Save) -> bool:
        """False for a save that was abandoned, or is being written: a rank that gave up waiting asked again."""
        with self._lock:
            begins = self._open is save and not save.writing
            save.writing = save.writing or begins
            return begins

    def _end(self, save: Save, action: Callable[..., None], *args: Any) -> None:
        """Owners have answered: ``action`` in the committing thread, unless the run has failed meanwhile."""
        with self._lock:
            goes_on = self._open is save
            self._open = None
        if goes_on:  # from here on a rank that hears of a failure can ask for the next one
            self._committer.submit(action, *args)
        else:
            discard_staging(save.directory)

    def abandon(self, error: BaseException) -> None:
        """Fail those who ask for a checkpoint that will not be. While owners write, their files are left to ``_end``:
        ranks need not wait for an owner that may be gone."""
        with self._lock:
            save, self._open = self._open, None
        if save is None:
            return
        if not save.writing:
            discard_staging(save.directory)
        save.fail(error)

    def close(self) -> None:
        """Finish the checkpoint that is being committed. Idempotent."""
        self._committer.shutdown(wait=True)


def have(ranks: Sequence[int]) -> str:
    """Which ranks have (done something), for messages."""
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {list(ranks)} have"


def owing(asked: Sequence[Future[Any]]) -> str:
    """Which owners have (not answered), for messages. ``asked``: their answers, by owner index."""
    late = [owner for owner, answer in enumerate(asked) if not answer.done()]
    if not late:
        return "owners have"
    return f"optimizer {late[0]} has" if len(late) == 1 else f"optimizers {late} have"


def _give_up(save: Save, error: BaseException) -> None:
    discard_staging(save.directory)
    save.fail(error)


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
        save.fail(exc)
        return
    recorder.set(CHECKPOINT_LAST_SUCCESS, time.time())
    for future in save.futures.values():
        settle(future, info)
