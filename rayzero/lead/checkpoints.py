"""Checkpoints at the lead: collects the ranks' requests, has every owner write its file, and commits by one rename.

::

    open      ranks ask, and the step waits: every rank, then (begin_save) every owner keeps the version
    running   only after begin_save: the step goes on, owners write
    ending    owners have answered: a thread commits the files or clears up

[Note: one at a time] Owners write one checkpoint at a time. The next one may be open meanwhile; it is begun once the
last one has left ``running``, and its step waits for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rayzero.checkpoint.writer import commit_checkpoint, committed, discard_staging, resume_commit
from rayzero.concurrency.futures import fail, settle, when_ended
from rayzero.errors import CheckpointAbandonedError, CheckpointWriteError, RayZeroError, StepMismatchError
from rayzero.lead.attempt import OwnerPeer, have, owing
from rayzero.protocol.messages import BegunSave, CheckpointInfo, EndedSave, FileEntry, Hyper, ModelSpec
from rayzero.telemetry.names import CHECKPOINT_FAILURES, CHECKPOINT_LAST_SUCCESS, CHECKPOINT_SECONDS
from rayzero.telemetry.recorder import Recorder, timed


@dataclass(eq=False)
class CheckpointRequest:
    """One requested checkpoint, until it is committed or has failed."""

    step: int
    directory: Path
    files: dict[int, tuple[FileEntry, ...]] = field(default_factory=dict)  # per rank that asked
    futures: dict[int, Future[CheckpointInfo]] = field(default_factory=dict)
    begins: dict[int, Future[None]] = field(default_factory=dict)  # of ranks that do not wait for its end
    writing: bool = False  # the owners were asked to write
    asked: tuple[Future[FileEntry], ...] = ()  # the owners' answers, by index
    repeated: bool = False  # a rank that has come back asked for it while it was committed

    @property
    def key(self) -> tuple[int, Path]:
        """What was asked for."""
        return self.step, self.directory

    @property
    def rank_files(self) -> list[FileEntry]:
        """The ranks' own files, by rank."""
        return [entry for rank in sorted(self.files) for entry in self.files[rank]]


class CheckpointRequests:
    """The checkpoint that ranks request, at most one at a time.

    Knows which ranks asked, and owners as peers; not steps, or when the next decision may be made. Thread-safe."""

    def __init__(self, peers: Sequence[OwnerPeer], recorder: Recorder) -> None:
        """``peers``: every owner with shards, by owner index."""
        self._peers = peers
        self._recorder = recorder
        self._lock = threading.Lock()
        self._open: CheckpointRequest | None = None
        self._running: CheckpointRequest | None = None
        self._ending: CheckpointRequest | None = None  # owners have answered; a thread commits it or clears up
        # ranks that may not have heard of the last save of the lead's former life
        self._owed: dict[int, EndedSave] = {}
        self._resumes = False  # the next save may be one that a former life of the lead had begun
        self._back: set[int] = set()  # ranks that have come back and may ask again for checkpoints that were made
        self._lost: dict[int, tuple[int, Path]] = {}  # by rank: what others know that a former life had begun
        self._made: dict[
            tuple[int, Path], CheckpointInfo
        ] = {}  # of the newest step that has any, by what was asked for
        self._ended: tuple[tuple[int, Path], CheckpointInfo | BaseException] | None = None  # the same, made or not
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-commit")

    def ask(
        self, rank: int, step: int, directory: Path, files: tuple[FileEntry, ...]
    ) -> tuple[CheckpointRequest, Future[CheckpointInfo]]:
        """Note a rank's request. Raises StepMismatchError if another rank requested something else."""
        with self._lock:
            begun = self._begun(step, directory)
            if begun is not None:
                begun.repeated = True
                return begun, begun.futures.setdefault(rank, Future())
            request = self._open = self._open or CheckpointRequest(step, directory)
            if request.key != (step, directory):
                raise StepMismatchError(
                    f"rank {rank} saves v{step} to {directory}, rank {min(request.files)} saves v{request.step} to "
                    f"{request.directory}; every rank must save the same"
                )
            request.files[rank] = files
            return request, request.futures.setdefault(rank, Future())

    def _begun(self, step: int, directory: Path) -> CheckpointRequest | None:
        """The request that runs or ends, if it is for this."""
        return next((each for each in (self._running, self._ending) if each and each.key == (step, directory)), None)

    def has_begun(self, rank: int, step: int, directory: Path) -> bool:
        """Whether a checkpoint that a rank wants to begin has begun: while the rank was away, or in a former life of
        the lead, whose answer others have had."""
        with self._lock:
            lost = self._lost.pop(rank, None) == (step, directory)
            return lost or self._begun(step, directory) is not None

    def end_of(self, rank: int, step: int, directory: Path, files: tuple[FileEntry, ...]) -> Future[CheckpointInfo]:
        """The end of a checkpoint that has begun. One that only a former life of the lead has known is complete on its
        storage, or abandoned."""
        future: Future[CheckpointInfo] = Future()
        with self._lock:
            begun = self._begun(step, directory)
            if begun is not None:
                return begun.futures.setdefault(rank, future)
            ended = self._ended[1] if self._ended is not None and self._ended[0] == (step, directory) else None
        if isinstance(ended, CheckpointInfo):
            settle(future, ended)
        elif ended is not None:
            fail(future, ended)
        else:
            self._committer.submit(_look_for, step, directory, files, future)
        return future

    def forget(self, rank: int) -> None:
        """A rank has died: it will ask again, unless the owners write already."""
        with self._lock:
            self._back.add(rank)
            for request in filter(None, (self._open, self._running, self._ending)):
                request.futures.pop(rank, None)
                request.begins.pop(rank, None)
            if self._open is not None and not self._open.writing:
                self._open.files.pop(rank, None)
                if not self._open.files:
                    self._open = None

    def made_again(self, rank: int, step: int, directory: Path) -> CheckpointInfo | None:
        """The checkpoint that a rank asks for which has come back, if it was made before. A loop may make several
        between two steps; the rank repeats them until it asks for one that was not made."""
        with self._lock:
            under_way = any(
                each and each.key == (step, directory) for each in (self._open, self._running, self._ending)
            )
            made = self._made.get((step, directory)) if rank in self._back and not under_way else None
            if made is None:
                self._back.discard(rank)
            return made

    def owed(self, rank: int, step: int, directory: Path) -> CheckpointInfo | RayZeroError | None:
        """What came of the checkpoint that a rank asks for, if it ended in a former life of the lead and only others
        have heard of it."""
        with self._lock:
            had = self._owed.pop(rank, None)
        if had is None or (had.step, had.directory) != (step, str(directory)):
            return None
        return had.checkpoint or had.failure

    def go_on(self, ended: Mapping[int, EndedSave | None], begun: Mapping[int, BegunSave | None]) -> None:
        """Begin with what ranks have heard from a former life of the lead. ``ended``: by rank, the last save of which
        it knows the end; the others may not have heard of the newest. ``begun``: the same, of which it knows that it
        has begun beside the training: some ranks may have gone on, so it is not begun again."""
        known = [saved for saved in ended.values() if saved is not None]
        newest = max(known, key=lambda saved: saved.number) if known else None
        with self._lock:
            self._resumes = True
            if newest is not None and newest.checkpoint is not None:  # for ranks that die after this
                self._made = {(newest.step, Path(newest.directory)): newest.checkpoint}
            for rank, saved in ended.items():
                if newest is not None and (saved is None or saved.number < newest.number):
                    self._owed[rank] = newest
            last = max((each for each in begun.values() if each is not None), key=lambda it: it.number, default=None)
            for rank, each in begun.items():
                if last is not None and (each is None or each.number < last.number):
                    self._lost[rank] = last.step, Path(last.directory)

    def holds(self, step: int) -> bool:
        """True while version ``step`` is requested and some owner has not written it yet, or does not keep it."""
        return self._open is not None and self._open.step == step

    @property
    def writing(self) -> bool:
        """Whether owners write files now, or are asked to."""
        with self._lock:
            return self._running is not None or (self._open is not None and self._open.writing)

    def complete(self, world_size: int, version: int) -> CheckpointRequest | None:
        """The request that every rank has made, and that can be begun now. ``version``: the newest that is decided:
        what made a later one is not known yet."""
        with self._lock:
            found = self._open
            ready = found is not None and len(found.files) == world_size and found.step <= version and not found.writing
            return found if ready and self._running is None else None

    def retire(self, error: BaseException) -> None:
        """Fail the ranks that wait for a checkpoint that no owner writes yet; they ask another lead. Their own files
        stay."""
        with self._lock:
            request, self._open = self._open, None
        if request is not None:
            self._fail(request, error)

    def asked(self) -> tuple[int, frozenset[int]] | None:
        """(the requested version, the ranks that requested it); None if there is no request."""
        with self._lock:
            return (self._open.step, frozenset(self._open.files)) if self._open is not None else None

    def waits_for(self, world_size: int) -> str:
        """The ranks or owners that the checkpoint waits for, for errors about waits."""
        with self._lock:
            missing = [rank for rank in range(world_size) if self._open and rank not in self._open.files]
            asked = self._open.asked if self._open is not None else ()
        return f"{have(missing)} not asked for it" if missing else f"{owing(asked)} not written their files"

    def write(
        self,
        request: CheckpointRequest,
        spec: ModelSpec,
        hyper_at: Callable[[int], tuple[Hyper, ...]],
        over: Callable[[], None],
    ) -> None:
        """Make a checkpoint that all ranks have requested. Calls ``over`` once owners have written or failed.

        ``hyper_at``: the hyper-parameters that made a version; raises if they are no longer kept."""
        if not self._begin(request):
            return
        ask = partial(self._ask_owners, request, spec, hyper_at, over)
        if self._resumes:
            self._resumes = False
            self._committer.submit(self._resume, request, ask, over)
        else:
            ask()

    def _resume(self, request: CheckpointRequest, ask: Callable[[], None], over: Callable[[], None]) -> None:
        """Tell ranks of the checkpoint if a former life of the lead has made it; else ``ask`` the owners."""
        try:
            info = resume_commit(request.directory, request.step, request.rank_files)
        except OSError as exc:  # its file system refuses
            self._end(request, self._give_up, request, exc)
            over()
            return
        if info is None:
            ask()
        else:
            self._end(request, self._tell, request, info)
            over()

    def _ask_owners(
        self,
        request: CheckpointRequest,
        spec: ModelSpec,
        hyper_at: Callable[[int], tuple[Hyper, ...]],
        over: Callable[[], None],
    ) -> None:
        """Ask every owner to write. Once all have answered, a thread commits the manifest or discards the staged files.
        Only then do ranks get the result, and may try again."""

        try:
            hyper = hyper_at(request.step)  # now: decisions are not kept for long
        except (OSError, RayZeroError) as exc:  # the checkpoint that the run started from is gone
            self._refuse(request, over, exc)
            return

        def write() -> None:
            request.asked = tuple(peer.write_checkpoint(request.step, request.directory) for peer in self._peers)
            when_ended(request.asked, then, partial(self._refuse, request, over))

        def then(owner_files: list[FileEntry]) -> None:
            self._end(request, self._commit, request, spec, hyper, owner_files)
            over()

        def goes_on(_: object) -> None:
            for begun in self._run(request):
                settle(begun, None)
            over()
            write()

        if request.begins:
            begun = tuple(peer.begin_checkpoint(request.step, request.directory) for peer in self._peers)
            when_ended(begun, goes_on, partial(self._refuse, request, over))
        else:
            write()

    def _refuse(self, request: CheckpointRequest, over: Callable[[], None], error: BaseException) -> None:
        """An owner has not begun or not written its file."""
        self._recorder.add(CHECKPOINT_FAILURES)
        self._end(request, self._give_up, request, error)
        over()

    def _run(self, request: CheckpointRequest) -> list[Future[None]]:
        """Owners keep the version: the step goes on. Returns the ranks that wait for that."""
        with self._lock:
            if self._open is request:  # else the run has failed
                self._open, self._running = None, request
            return list(request.begins.values())

    def _begin(self, request: CheckpointRequest) -> bool:
        """False for a request that was abandoned or is being written already: a rank that had given up asked again."""
        with self._lock:
            begins = self._open is request and not request.writing and self._running is None
            request.writing = request.writing or begins
            return begins

    def _end(self, request: CheckpointRequest, action: Callable[..., None], *args: Any) -> None:
        """Owners have answered: run ``action`` in the committing thread, unless the run has failed in the meantime."""
        with self._lock:
            goes_on = request in (self._open, self._running)
            self._open = None if self._open is request else self._open
            self._running = None if self._running is request else self._running
            self._ending = request if goes_on else self._ending
        if goes_on:  # from here on, a rank that gets a failure can request the next one
            self._committer.submit(action, *args)
        else:
            discard_staging(request.directory)

    def _commit(
        self,
        request: CheckpointRequest,
        spec: ModelSpec,
        hyper: tuple[Hyper, ...],
        owner_files: Sequence[FileEntry],
    ) -> None:
        try:
            with timed(self._recorder, CHECKPOINT_SECONDS, phase="publish"):
                info = commit_checkpoint(
                    request.directory,
                    step=request.step,
                    spec=spec,
                    hyper=hyper,
                    slot_steps={},  # the content of each file carries its own
                    owner_files=owner_files,
                    rank_files=request.rank_files,
                )
        except (OSError, RayZeroError) as exc:
            self._recorder.add(CHECKPOINT_FAILURES)
            self._fail(request, exc)
        else:
            self._recorder.set(CHECKPOINT_LAST_SUCCESS, time.time())
            self._tell(request, info)

    def _tell(self, request: CheckpointRequest, info: CheckpointInfo) -> None:
        with self._lock:
            self._made = {key: made for key, made in self._made.items() if key[0] == request.step} | {request.key: info}
        waiting = self._over(request, info)
        if request.repeated:
            discard_staging(request.directory)  # what ranks that have come back have staged again
        for begun in request.begins.values():  # of one that a former life of the lead has made
            settle(begun, None)
        for future in waiting:
            settle(future, info)

    def _give_up(self, request: CheckpointRequest, error: BaseException) -> None:
        discard_staging(request.directory)
        self._fail(request, error)

    def _fail(self, request: CheckpointRequest, error: BaseException) -> None:
        for future in self._over(request, error):
            fail(future, error)
        for begun in request.begins.values():
            fail(begun, error)

    def _over(
        self, request: CheckpointRequest, outcome: CheckpointInfo | BaseException
    ) -> list[Future[CheckpointInfo]]:
        """Nobody can ask for this request any more; returns who waits for it."""
        with self._lock:
            self._ended = request.key, outcome
            if self._ending is request:
                self._ending = None
            return list(request.futures.values())

    def abandon(self, error: BaseException) -> None:
        """Fail the ranks that wait for a checkpoint. While owners write, ``_end`` cleans up their files, so that ranks
        need not wait for an owner that may be gone."""
        with self._lock:
            found = [each for each in (self._running, self._open) if each is not None]
            self._open = self._running = None
        for request in found:
            if not request.writing:
                discard_staging(request.directory)
            self._fail(request, error)

    def close(self) -> None:
        """Finish the checkpoint that is being committed. Idempotent."""
        self._committer.shutdown(wait=True)


def _look_for(step: int, directory: Path, files: Sequence[FileEntry], future: Future[CheckpointInfo]) -> None:
    """Tell whether a former life of the lead has completed a checkpoint. If not, clear up what it has left."""
    try:
        found = committed(directory, step, files)
    except OSError as exc:  # its file system refuses
        fail(future, CheckpointWriteError(f"cannot read {directory}: {exc}"))
        return
    if found is not None:
        settle(future, found)
        return
    discard_staging(directory)
    fail(
        future,
        CheckpointAbandonedError(
            f"the checkpoint {directory} is abandoned: the optimizer that leads the run died while v{step} was written"
        ),
    )
