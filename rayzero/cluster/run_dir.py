"""A run's directory: who may write to it, what a resumed run starts from, and ``run.json``, what became of the run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rayzero.checkpoint import CheckpointReader, latest_checkpoint, sweep_stale
from rayzero.cluster.run_lock import LOCK, RunLock
from rayzero.config import RunConfig
from rayzero.errors import CheckpointError, ConfigError

__all__ = ["RECORD", "RunDirectory", "read_record"]

RECORD = "run.json"

_SETTING = "run_config.storage_path / run_config.name"  # what names the place, unless the caller says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """The place of one run's files, locked against other drivers until :meth:`close` or the process's end. Made by
    :meth:`open`, which checks everything that can be checked."""

    path: Path
    resume: Path | None  # the checkpoint the run starts from
    fresh: bool  # it was not there before
    lock: RunLock  # freed by: close()

    @classmethod
    def open(cls, config: RunConfig, *, setting: str = _SETTING) -> RunDirectory:
        """Find or make the directory and lock it; nothing is written where it is refused.

        ``setting`` is what the user chose the place with, for messages. Raises ConfigError when a run is going on
        there, another run's checkpoints are there, or the place cannot be written, and CheckpointError when there is
        no checkpoint to resume from or it is damaged.
        """
        path = config.path.absolute()
        fresh = not path.exists()
        lock = RunLock.take(path) if (path / LOCK).exists() else None
        try:
            resume = _resume_from(config, path)
            _refuse_other_run(path, resume, setting)
            _make(path / "checkpoints", setting)
            lock = lock or RunLock.take(path)
            lock.sign()
            sweep_stale(path / "checkpoints")
        except BaseException:
            if lock is not None:
                lock.close()
            raise
        return cls(path=path, resume=resume, fresh=fresh, lock=lock)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let other drivers in. Idempotent."""
        self.lock.close()

    def withdraw(self) -> None:
        """Take away what :meth:`open` made, where it made the directory and nothing else is in it."""
        if not self.fresh:
            return
        with suppress(OSError):  # somebody put a file there: then it stays
            (self.path / "checkpoints").rmdir()
            (self.path / LOCK).unlink()
            self.path.rmdir()

    def newest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint in this directory."""
        return latest_checkpoint(self.path)

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Replace ``run.json`` as a whole: a reader sees the old one or the new one."""
        temporary = self.path / f".{RECORD}.tmp"
        temporary.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
        os.replace(temporary, self.path / RECORD)


def read_record(path: Path) -> dict[str, Any] | None:
    """``run.json`` of a run directory, or None where there is none; raises ConfigError when it is not one."""
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path / RECORD}: {error}") from error
    if not _is_record(record):
        raise ConfigError(
            f"{path / RECORD} is not a run's record: run, state, started_at, driver or telemetry is missing or wrong"
        )
    found: dict[str, Any] = record
    return found


def _is_record(record: object) -> bool:
    """Whether it has what every reader relies on."""
    if not isinstance(record, dict) or not isinstance(record.get("driver"), dict):
        return False
    driver, started = record["driver"], record.get("started_at")
    texts = (record.get("run"), record.get("state"), driver.get("host"))
    return (
        all(isinstance(text, str) for text in texts)
        and isinstance(started, int | float)
        and isinstance(driver.get("pid"), int)
        and _is_telemetry(record.get("telemetry"))
    )


def _is_telemetry(told: object) -> bool:
    """None: the run tells nothing of itself."""
    if told is None:
        return True
    return isinstance(told, dict) and isinstance(told.get("http_sd"), str) and isinstance(told.get("targets"), list)


def _resume_from(config: RunConfig, path: Path) -> Path | None:
    """The checkpoint to start from, opened once to see that it is whole."""
    if config.resume is False:
        return None
    found = latest_checkpoint(path) if config.resume is True else Path(config.resume).absolute()
    if found is None:
        raise CheckpointError(f"nothing to resume: {path / 'checkpoints'} holds no complete checkpoint")
    with CheckpointReader(found):
        return found


def _refuse_other_run(path: Path, resume: Path | None, setting: str) -> None:
    """Two runs' checkpoints in one place could not be told apart; a run that left none may be run again."""
    found = latest_checkpoint(path)
    continues = resume is not None and resume.is_relative_to(path)
    if found is not None and not continues:
        raise ConfigError(
            f"{path} already holds checkpoints of a run (newest: {found.name}); resume it, or choose another place "
            f"with {setting}"
        )


def _make(path: Path, setting: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot make {path}: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{setting}: cannot write to {path}")
