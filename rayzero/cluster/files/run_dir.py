"""A run's directory: who may write to it, and what a resumed run starts from."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rayzero.checkpoint import Catalog, CheckpointReader, checkpoint_folders, stale_folders, sweep_stale
from rayzero.checkpoint.manifest import MANIFEST
from rayzero.cluster.continuation import Continuation, Lost, Successor, find_continuation
from rayzero.cluster.files.run_record import RECORD, DriverProcess, RunRecord, read_record, why_over
from rayzero.cluster.run import RunState
from rayzero.config import RunConfig
from rayzero.convert.remote_checkpoints import local_checkpoint
from rayzero.errors import CheckpointError, ConfigError
from rayzero.files import read_bytes, replace_file, to_json
from rayzero.protocol.ownership import Ownership
from rayzero.records import parse_record
from rayzero.slabs.sweep import Hold

LOCK = ".lock"
_CHECKPOINTS = "checkpoints"
_FETCHED = ".fetched"  # beside the runs, where every node sees it: copies of remote checkpoints
_ENDS_S = 60.0  # how long the processes of a killed driver may take to end: its janitor kills those that stay

_SETTING = "run_config.storage_path / run_config.name"  # names the directory, unless the caller says otherwise

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """What a run starts from: nothing, a checkpoint, or what a killed run has left in memory."""

    checkpoint: Path | None  # that gives the run its first values; None: it begins with those of its loop
    step: int  # steps that are done
    continuation: Continuation | None = None  # from memory
    lineage: str = field(default_factory=lambda: secrets.token_hex(8))  # of the run's states in shared memory
    former: str | None = None  # the lineage that an earlier run, or this one, had there before and may have left
    is_after_kill: bool = False  # the run before was killed, so its processes may still be ending
    why: str | None = None  # why the memory of a killed run is not used

    @property
    def life(self) -> int:
        """Of every rank."""
        return 0 if self.continuation is None else self.continuation.life

    @property
    def ownership(self) -> Ownership | None:
        """Who owns what in a run that goes on from memory, if that is to be known; else None."""
        return None if self.continuation is None else self.continuation.ownership

    def __str__(self) -> str:
        if self.continuation is not None:
            return f"continuing at step {self.step}, with what the killed run has left in this host's shared memory"
        place = "anew" if self.checkpoint is None else f"from step {self.step}, with {self.checkpoint}"
        return f"starting {place}" + (f"; the killed run's memory is not used, because {self.why}" if self.why else "")


class RunCheckpoints:
    """Knows where a run's checkpoints are: in its folder, or where its reports said.

    Knows paths; not what a run does with them."""

    def __init__(self, run_dir: Path, elsewhere: Iterable[Path] = ()) -> None:
        """``elsewhere``: checkpoints of the run outside its folder."""
        self.folder = run_dir / _CHECKPOINTS
        self.latest: Path | None = None  # the checkpoint that the run last started from or reported
        self._elsewhere = dict.fromkeys(elsewhere)  # in the order of their first reports

    @property
    def elsewhere(self) -> tuple[Path, ...]:
        """The checkpoints outside of ``folder``, for the record."""
        return tuple(self._elsewhere)

    def note(self, checkpoint: Path | str | None) -> None:
        """Note a checkpoint that the run starts from or reports. A later model's is part of the first model's."""
        if checkpoint is None:
            return
        path = Path(checkpoint)
        whole = path.parent if (path.parent / MANIFEST).exists() else path
        self.latest = whole
        if whole.parent != self.folder:
            self._elsewhere[whole] = None

    def catalog(self) -> Catalog:
        return Catalog.of(self.folder, self._elsewhere)

    def folders(self) -> list[Path]:
        """The folders of all checkpoints, complete or not; reads no manifest."""
        return [*checkpoint_folders(self.folder), *(path for path in self._elsewhere if (path / MANIFEST).exists())]

    def __contains__(self, checkpoint: Path) -> bool:
        return checkpoint.is_relative_to(self.folder.parent) or checkpoint in self._elsewhere

    def anything_stale(self) -> bool:
        return bool(stale_folders(self.folder))

    def sweep(self) -> None:
        """Repair what interrupted saves left. Call it while the run is locked."""
        sweep_stale(self.folder)
        for path in self._elsewhere:
            sweep_stale(path.parent, path.name)

    def name_of(self, checkpoint: Path) -> str:
        return checkpoint.name if checkpoint.parent == self.folder else str(checkpoint)


class RunLock:
    """An exclusive flock on ``.lock`` in a run directory, held from :meth:`take` to :meth:`close`.

    The file stays after the run, because only the lock on it counts. Programs that the holder starts do not inherit the
    lock."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor  # freed by: close()

    @classmethod
    def take(cls, directory: Path) -> RunLock:
        """Lock ``directory``, which must exist. Raises ConfigError when another driver holds it or it cannot be
        locked."""
        try:
            descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"cannot write to {directory}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(
                f"{directory} is in use by a run that is still running ({_holder(directory)}); wait until it ends, "
                "stop it, or choose another run directory"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(f"cannot lock {directory / LOCK}: {error.strerror}; use another file system") from error
        return cls(descriptor)

    def sign(self) -> None:
        """Write who holds the lock, for the message of a driver that is refused."""
        assert self._descriptor is not None
        text = DriverProcess(pid=os.getpid(), host=socket.gethostname()).model_dump_json()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _holder(directory: Path) -> str:
    """Who holds the lock; a holder that has only just taken it has not signed yet."""
    try:
        holder = parse_record(read_bytes(directory / LOCK, at_most=1 << 16), DriverProcess)
        return f"pid {holder.pid} on {holder.host}"
    except (OSError, ValueError):
        return "a process that has only just begun"


@dataclass(slots=True, kw_only=True)
class RunDirectory:
    """The directory of one run's files, locked against other drivers until :meth:`close` or the end of the process.
    Created by :meth:`open`, which checks everything that can be checked."""

    path: Path
    start: StartPoint  # changed by: restart()
    began: Path | None  # the checkpoint of the first ``start``
    checkpoints: RunCheckpoints
    fresh: bool  # open() created the directory
    lock: RunLock  # freed by: close()
    hold: Hold | None = None  # keeps what the run continues until its own processes have it; freed by: close()

    @classmethod
    def open(cls, config: RunConfig, successor: Successor | None = None, *, setting: str = _SETTING) -> RunDirectory:
        """Find or create the directory and lock it. If it is refused, nothing is written, except to repair what an
        interrupted save left.

        ``successor``: the run that may continue a killed one from its memory; None: only from checkpoints.
        ``setting``: the setting by which the user chose the directory, for messages. Raises ConfigError if a run is
        using the directory, if it holds checkpoints of another run or newer ones than that to resume from, or if it
        cannot be written; CheckpointError if there is no checkpoint to resume from or it is damaged.
        """
        path = config.path.absolute()
        fresh = not path.exists()
        checkpoints = checkpoints_of(path)
        lock, hold = _lock_run(path, checkpoints), None
        try:
            before = _record_before(path)
            hold = _hold(before, successor)
            start = _choose(config, path, before, checkpoints, successor, setting)
            _make(checkpoints.folder, setting)
            lock = lock or RunLock.take(path)
            lock.sign()
            if start.checkpoint is not None and start.checkpoint in checkpoints:
                checkpoints.note(start.checkpoint)
        except BaseException:
            if hold is not None:
                hold.close()
            if lock is not None:
                lock.close()
            raise
        if hold is not None and start.continuation is None:
            hold.close()
        return cls(
            path=path, start=start, began=start.checkpoint, checkpoints=checkpoints, fresh=fresh, lock=lock, hold=hold
        )

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.let_go()
        self.lock.close()

    def let_go(self) -> None:
        """Hold a killed run's states no longer: this run's processes have them. Idempotent."""
        if self.hold is not None:
            self.hold.close()

    def restart(self) -> None:
        """Set ``start`` to the newest checkpoint, or to the run's beginning if there is none; repairs what an
        interrupted save left. Call it when no process of the run is left. Raises CheckpointError if the run began with
        a checkpoint that is gone, and there is no newer one."""
        self.checkpoints.sweep()
        place = self.checkpoints.catalog().newest() or self.began
        if place is None:
            self.start = StartPoint(checkpoint=None, step=0, former=self.start.lineage)
            return
        with CheckpointReader(place) as checkpoint:
            self.start = StartPoint(checkpoint=place, step=checkpoint.step, former=self.start.lineage)
        if place in self.checkpoints:
            self.checkpoints.note(place)

    @property
    def rows_until(self) -> int:
        """The last step whose rows of metrics.jsonl stay; -1: none, because the run makes all of its rows again."""
        start = self.start
        goes_on = start.continuation is not None or (
            start.checkpoint is not None and start.checkpoint in self.checkpoints
        )
        return start.step if goes_on else -1

    def withdraw(self) -> None:
        """Remove the directory if :meth:`open` created it and it holds nothing else."""
        if not self.fresh:
            return
        with suppress(OSError):  # it holds another file, so it stays
            self.checkpoints.folder.rmdir()
            (self.path / LOCK).unlink()
            self.path.rmdir()

    def write_record(self, record: RunRecord) -> None:
        """Replace ``run.json`` as a whole: a reader sees the old one or the new one."""
        replace_file(self.path / RECORD, to_json(record.model_dump(), indent=1) + "\n")

    def read_record_file(self) -> bytes | None:
        """The content of ``run.json`` now; None if there is none."""
        with suppress(FileNotFoundError):
            return (self.path / RECORD).read_bytes()
        return None

    def restore_record_file(self, earlier: bytes | None) -> None:
        if earlier is None:
            (self.path / RECORD).unlink(missing_ok=True)
        else:
            replace_file(self.path / RECORD, earlier)


def checkpoints_of(run_dir: Path) -> RunCheckpoints:
    """The checkpoints of the run in ``run_dir``; if its record is damaged, those in its folder, with a warning."""
    try:
        record = read_record(run_dir)
    except ConfigError as error:
        log.warning("only checkpoints in %s are found, because the run's record cannot be read: %s", run_dir, error)
        record = None
    return RunCheckpoints(run_dir, map(Path, record["checkpoints_elsewhere"] if record else ()))


def find_start(config: RunConfig, successor: Successor | None = None, *, setting: str = _SETTING) -> StartPoint:
    """What :meth:`RunDirectory.open` would start from now. Raises the same errors; creates nothing and keeps no
    lock."""
    path = config.path.absolute()
    _require_place(path, setting)
    checkpoints = checkpoints_of(path)
    lock = _lock_run(path, checkpoints)
    with nullcontext() if lock is None else closing(lock):
        start = _choose(config, path, _record_before(path), checkpoints, successor, setting)
        _require_place(checkpoints.folder, setting)
        return start


def _lock_run(path: Path, checkpoints: RunCheckpoints) -> RunLock | None:
    """Lock the files of an earlier run and repair what an interrupted save of it left. None: there is nothing to lock.

    Call it before choosing a checkpoint: one that was being replaced gets its name back here."""
    if not (path / LOCK).exists() and not checkpoints.anything_stale():
        return None
    lock = RunLock.take(path)
    try:
        checkpoints.sweep()
    except BaseException:
        lock.close()
        raise
    return lock


def _choose(
    config: RunConfig,
    path: Path,
    before: Mapping[str, Any] | None,
    checkpoints: RunCheckpoints,
    successor: Successor | None,
    setting: str,
) -> StartPoint:
    """Decide what a run in ``path`` starts from; no other function does. ``before``: the record of the run before."""
    killed = _if_killed(before)
    # what is left of a run that has not finished may be in this one's way
    former = _lineage(before) if before is not None and before["state"] != RunState.FINISHED else None
    if config.resume is False:
        _refuse_other_run(path, checkpoints, setting)
        return StartPoint(checkpoint=None, step=0, former=former, is_after_kill=killed is not None)
    why = None
    if config.resume is True:
        if killed is not None and successor is not None:
            found = _continued(killed, checkpoints, successor)
            if isinstance(found, StartPoint):
                return found
            why = found.why
        place = _newest(checkpoints, why)
    else:
        place = local_checkpoint(config.resume, Path(config.storage_path) / _FETCHED).absolute()
    with CheckpointReader(place) as checkpoint:  # raises unless it is complete
        start = StartPoint(
            checkpoint=place, step=checkpoint.step, former=former, is_after_kill=killed is not None, why=why
        )
    if place in checkpoints:
        _refuse_older(start, checkpoints, setting)
    else:
        _refuse_other_run(path, checkpoints, setting)
    return start


def _record_before(path: Path) -> dict[str, Any] | None:
    with suppress(ConfigError):  # a damaged one was warned of
        return read_record(path)
    return None


def _if_killed(before: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The record of the run before, if its driver could not write its end."""
    return before if before is not None and why_over(before) is None else None


def _lineage(killed: Mapping[str, Any]) -> str | None:
    states: dict[str, str] | None = killed["states"]
    return None if states is None else states["lineage"]


def _continued(killed: Mapping[str, Any], checkpoints: RunCheckpoints, successor: Successor) -> StartPoint | Lost:
    """The start from a killed run's memory, unless a checkpoint is newer."""
    found = find_continuation(killed, successor, patience_s=_ENDS_S)
    if isinstance(found, Lost):
        return found
    newest = max((one.step for one in checkpoints.catalog().sound), default=-1)
    if newest > found.step:
        return Lost(why=f"it is of step {found.step}, and a checkpoint of step {newest}")
    began = killed["resumed_from"]
    checkpoint = Path(began) if began and (Path(began) / MANIFEST).exists() else None
    lineage = _lineage(killed)
    assert lineage is not None
    return StartPoint(
        checkpoint=checkpoint,
        step=found.step,
        continuation=found,
        lineage=lineage,
        former=lineage,
        is_after_kill=True,
    )


def _hold(before: Mapping[str, Any] | None, successor: Successor | None) -> Hold | None:
    """Hold what a killed run has left, before looking at it. None: there was no such run."""
    killed = _if_killed(before)
    lineage = None if killed is None else _lineage(killed)
    if lineage is None or successor is None or successor.directory is None:
        return None
    try:
        return Hold(successor.directory, lineage)
    except OSError as error:
        raise ConfigError(f"cannot write to {successor.directory}: {error.strerror}") from error


def _newest(checkpoints: RunCheckpoints, why: str | None) -> Path:
    catalog = checkpoints.catalog()
    if (found := catalog.newest()) is None:
        damaged = "".join(f"; {why}" for why in catalog.damaged.values())
        memory = f"; the killed run's memory is not used, because {why}" if why else ""
        raise CheckpointError(f"nothing to resume: {checkpoints.folder} holds no complete checkpoint{damaged}{memory}")
    return found


def _refuse_other_run(path: Path, checkpoints: RunCheckpoints, setting: str) -> None:
    """Raise ConfigError if the directory holds another run's checkpoints: they could not be told apart. A run that left
    none may be run again."""
    if found := checkpoints.folders():
        sound = checkpoints.catalog().sound
        newest = checkpoints.name_of(sound[-1].path if sound else found[-1])
        raise ConfigError(
            f"{path} already holds checkpoints of a run (newest: {newest}); resume it, or choose another place "
            f"with {setting}"
        )


def _refuse_older(start: StartPoint, checkpoints: RunCheckpoints, setting: str) -> None:
    """Raise ConfigError if newer checkpoints exist: the next resume would take them for the continuation of an older
    one."""
    if newer := [checkpoints.name_of(one.path) for one in checkpoints.catalog().sound if one.step > start.step]:
        names = newer[0] if len(newer) == 1 else f"{newer[0]} to {newer[-1]}"
        raise ConfigError(
            f"run.resume is {start.checkpoint}, but {checkpoints.folder} holds newer checkpoints of this run "
            f"({names}), from which it would resume the next time; move them away or delete them, or "
            f"choose another place with {setting}"
        )


def _make(path: Path, setting: str) -> None:
    _require_place(path, setting)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot make {path}: {error.strerror}") from error


def _require_place(path: Path, setting: str) -> None:
    """Raise ConfigError if ``path`` is no folder that can be written to, nor one that can be made. Makes nothing."""
    there = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not there.is_dir():
        raise ConfigError(f"{setting}: cannot make {path}, because {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{setting}: cannot write to {there}")
