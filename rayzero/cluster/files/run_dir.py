"""A run's directory: who may write to it, what a resumed run starts from, and its record ``run.json``."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rayzero.checkpoint import Catalog, CheckpointReader, checkpoint_folders, stale_folders, sweep_stale
from rayzero.checkpoint.manifest import MANIFEST
from rayzero.cluster.files.run_lock import LOCK, RunLock
from rayzero.config import RunConfig
from rayzero.errors import CheckpointError, ConfigError
from rayzero.files import parse_json, read_text, replace_file

__all__ = ["RECORD", "RunCheckpoints", "RunDirectory", "Start", "checkpoints_of", "find_start", "read_record"]

RECORD = "run.json"

_CHECKPOINTS = "checkpoints"
_MAX_RECORD = 1 << 28  # bytes

_SETTING = "run_config.storage_path / run_config.name"  # names the directory, unless the caller says otherwise

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The checkpoint that a run starts from."""

    checkpoint: Path | None  # None: it is a fresh run
    step: int  # steps that the checkpoint has done


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
        """Read the manifests of all of them."""
        return Catalog.of(self.folder, self._elsewhere)

    def folders(self) -> list[Path]:
        """The folders of all checkpoints, complete or not; reads no manifest."""
        return [*checkpoint_folders(self.folder), *(path for path in self._elsewhere if (path / MANIFEST).exists())]

    def __contains__(self, checkpoint: Path) -> bool:
        """Whether ``checkpoint`` is the run's own."""
        return checkpoint.is_relative_to(self.folder.parent) or checkpoint in self._elsewhere

    def anything_stale(self) -> bool:
        """Whether an interrupted save left anything in the folder."""
        return bool(stale_folders(self.folder))

    def sweep(self) -> None:
        """Repair what interrupted saves left. Call it while the run is locked."""
        sweep_stale(self.folder)
        for path in self._elsewhere:
            sweep_stale(path.parent, path.name)

    def name_of(self, checkpoint: Path) -> str:
        """Its name if it is in the folder, else its path."""
        return checkpoint.name if checkpoint.parent == self.folder else str(checkpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """The directory of one run's files, locked against other drivers until :meth:`close` or the end of the process.
    Created by :meth:`open`, which checks everything that can be checked."""

    path: Path
    start: Start
    checkpoints: RunCheckpoints
    fresh: bool  # open() created the directory
    lock: RunLock  # freed by: close()

    @classmethod
    def open(cls, config: RunConfig, *, setting: str = _SETTING) -> RunDirectory:
        """Find or create the directory and lock it. If it is refused, nothing is written, except to repair what an
        interrupted save left.

        ``setting``: the setting by which the user chose the directory, for messages. Raises ConfigError if a run is
        using the directory, if it holds checkpoints of another run or newer ones than that to resume from, or if it
        cannot be written; CheckpointError if there is no checkpoint to resume from or it is damaged.
        """
        path = config.path.absolute()
        fresh = not path.exists()
        checkpoints = checkpoints_of(path)
        lock = _lock_run(path, checkpoints)
        try:
            start = _choose(config, path, checkpoints, setting)
            _make(checkpoints.folder, setting)
            lock = lock or RunLock.take(path)
            lock.sign()
            if start.checkpoint is not None and start.checkpoint in checkpoints:
                checkpoints.note(start.checkpoint)
        except BaseException:
            if lock is not None:
                lock.close()
            raise
        return cls(path=path, start=start, checkpoints=checkpoints, fresh=fresh, lock=lock)

    @property
    def resume(self) -> Path | None:
        """The checkpoint the run starts from."""
        return self.start.checkpoint

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock. Idempotent."""
        self.lock.close()

    def withdraw(self) -> None:
        """Remove the directory if :meth:`open` created it and it holds nothing else."""
        if not self.fresh:
            return
        with suppress(OSError):  # it holds another file, so it stays
            self.checkpoints.folder.rmdir()
            (self.path / LOCK).unlink()
            self.path.rmdir()

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Replace ``run.json`` as a whole: a reader sees the old one or the new one."""
        replace_file(self.path / RECORD, json.dumps(record, indent=1, default=str) + "\n")

    def read_record_file(self) -> bytes | None:
        """The content of ``run.json`` now; None if there is none."""
        with suppress(FileNotFoundError):
            return (self.path / RECORD).read_bytes()
        return None

    def restore_record_file(self, earlier: bytes | None) -> None:
        """Restore ``run.json`` to what :meth:`read_record_file` returned."""
        if earlier is None:
            (self.path / RECORD).unlink(missing_ok=True)
        else:
            replace_file(self.path / RECORD, earlier)


def read_record(path: Path) -> dict[str, Any] | None:
    """``run.json`` of a run directory; None if there is none. Raises ConfigError if the file is not a run's record."""
    try:
        record = parse_json(read_text(path / RECORD, at_most=_MAX_RECORD))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path / RECORD}: {error}") from error
    if wrong := _wrong_in(record):
        raise ConfigError(f"{path / RECORD} is not a run's record: {wrong} is missing or wrong")
    found: dict[str, Any] = record
    return found


def _wrong_in(record: object) -> str | None:
    """The first entry that is missing or wrong; None if the record is sound."""
    if not isinstance(record, dict):
        return "everything"
    return next((name for name, right in _ENTRIES.items() if not right(record.get(name))), None)


def _is_text(told: object) -> bool:
    """Whether it is printable text: JSON may hold half a surrogate pair."""
    return isinstance(told, str) and told.encode(errors="ignore").decode() == told


def _is_number(told: object) -> bool:
    """Whether it is a number that arithmetic can use."""
    return isinstance(told, int | float) and abs(told) < 1e18


def _is_driver(told: object) -> bool:
    return isinstance(told, dict) and _is_text(told.get("host")) and isinstance(told.get("pid"), int)


def _is_telemetry(told: object) -> bool:
    """Whether it is a valid telemetry entry. None: the run has no telemetry."""
    if told is None:
        return True
    return isinstance(told, dict) and _is_text(told.get("http_sd")) and _all(_is_target, told.get("targets"))


def _is_target(told: object) -> bool:
    return isinstance(told, dict) and isinstance(told.get("address"), str) and isinstance(told.get("labels"), dict)


def _is_member(told: object) -> bool:
    return _is_driver(told) and isinstance(told, dict) and _is_text(told.get("who"))


def _all(right: Callable[[object], bool], told: object) -> bool:
    return isinstance(told, list) and all(map(right, told))


def _is_paths(told: object) -> bool:
    """Whether it is a list of paths. None: an early record, or a run without such checkpoints."""
    return told is None or _all(_is_text, told)


_ENTRIES: dict[str, Callable[[object], bool]] = {
    "run": _is_text,
    "state": _is_text,
    "started_at": _is_number,
    "driver": _is_driver,
    "telemetry": _is_telemetry,
    "members": lambda told: told is None or _all(_is_member, told),  # None: nothing has been started yet
    "ended_at": lambda told: told is None or _is_number(told),
    "checkpoints_elsewhere": _is_paths,
    "error": lambda told: told is None or _is_text(told),
}


def checkpoints_of(run_dir: Path) -> RunCheckpoints:
    """The checkpoints of the run in ``run_dir``; if its record is damaged, those in its folder, with a warning."""
    try:
        record = read_record(run_dir)
    except ConfigError as error:
        log.warning("only checkpoints in %s are found, because the run's record cannot be read: %s", run_dir, error)
        record = None
    return RunCheckpoints(run_dir, map(Path, (record or {}).get("checkpoints_elsewhere") or ()))


def find_start(config: RunConfig, *, setting: str = _SETTING) -> Start:
    """What :meth:`RunDirectory.open` would start from now. Raises the same errors; creates nothing and keeps no
    lock."""
    path = config.path.absolute()
    checkpoints = checkpoints_of(path)
    with _lock_run(path, checkpoints) or nullcontext():
        return _choose(config, path, checkpoints, setting)


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


def _choose(config: RunConfig, path: Path, checkpoints: RunCheckpoints, setting: str) -> Start:
    """Decide what a run in ``path`` starts from; no other function does."""
    if config.resume is False:
        _refuse_other_run(path, checkpoints, setting)
        return Start(checkpoint=None, step=0)
    found = _newest(checkpoints) if config.resume is True else Path(config.resume).absolute()
    with CheckpointReader(found) as checkpoint:  # raises unless it is complete
        start = Start(checkpoint=found, step=checkpoint.step)
    if found in checkpoints:
        _refuse_older(start, checkpoints, setting)
    else:
        _refuse_other_run(path, checkpoints, setting)
    return start


def _newest(checkpoints: RunCheckpoints) -> Path:
    catalog = checkpoints.catalog()
    if (found := catalog.newest()) is None:
        damaged = "".join(f"; {why}" for why in catalog.damaged.values())
        raise CheckpointError(f"nothing to resume: {checkpoints.folder} holds no complete checkpoint{damaged}")
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


def _refuse_older(start: Start, checkpoints: RunCheckpoints, setting: str) -> None:
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
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot make {path}: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{setting}: cannot write to {path}")
