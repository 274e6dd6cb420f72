"""Finds a run whose published weights a process is to follow: by its folder, or by its name on this host."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayzero.cluster.files.key_files import FOLLOWER_FILE, read_follower
from rayzero.cluster.files.run_record import RECORD, is_here, run_status, why_over
from rayzero.cluster.run import RunState
from rayzero.config import ZeroConfig
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.followers.follower import Follower
from rayzero.followers.held_version import Shards
from rayzero.followers.host_shards import HostRun
from rayzero.security.clients import is_loopback
from rayzero.security.credentials import identity_of
from rayzero.slabs.sweep import SHARED_MEMORY

if TYPE_CHECKING:
    from rayzero.followers.remote_shards import RemoteRun, Way

_CONFIG = "config.json"  # of transformers, which the recipe puts into a run's folder
_LOOK_S = 1.0  # between two looks whether owners are on other hosts; a record is written as often

log = logging.getLogger(__name__)


def follow(
    run: str | PathLike[str],
    *,
    model: int = 0,
    config: str | PathLike[str] | None = None,
    slab_dir: str | PathLike[str] | None = None,
) -> Follower:
    """Follow the weights that a run publishes, from any process of this user on the host of its optimizers or, by its
    folder, on any host that reaches them.

    run: its folder, or its name. model: which of the models that the run prepares, in that order. config: a config.json
    of transformers, for the names that it publishes (that of another model is refused when values are read); None: that
    in the run's folder, or else the names of the model's parameters. slab_dir: the run's, if it is followed by its name
    and that is not /dev/shm.

    By its name, a run that starts later is waited for, and a warning says so. Raises ConfigError if there is no such
    folder or config, or the folder's run has not started or has ended; UnsupportedError, also later, if its optimizers
    cannot be reached from here."""
    if not isinstance(run, str | PathLike):
        raise ConfigError(f"run is {run!r} but must be a run's folder or its name")
    if type(model) is not int or model < 0:
        raise ConfigError(f"model is {model!r} but must be 0 for the first that the run prepares, 1 for the next, ...")
    folder = Path(run)
    named, strict = None if config is None else Path(config), config is not None
    if (folder / RECORD).is_file():
        record = run_status(folder)
        name, directory = str(record["run"]), _memory_of(record, folder)
        named = folder / _CONFIG if named is None and (folder / _CONFIG).is_file() else named
    elif folder.is_absolute() or folder.name != os.fspath(run):
        raise ConfigError(f"{folder} holds no run, because it has no {RECORD}")
    else:
        record, name = None, os.fspath(run)
        directory = Path(slab_dir or SHARED_MEMORY)
        if not directory.is_dir():
            raise ConfigError(f"slab_dir is {str(directory)!r}, which is not a directory here: name the run's")
    if named is not None and not named.is_file():
        raise ConfigError(f"config is {str(named)!r}, and there is no such file")
    here = None
    if directory is not None and directory.is_dir():
        here = HostRun(f"{name} model {model}" if model else name, directory)
    if record is None:
        assert here is not None
        if here.shards() is None and here.gone:
            if folder.is_dir():
                raise ConfigError(f"{folder} holds no run, because it has no {RECORD}")
            log.warning("follow(%r) waits for a run of that name: %s", name, here.missing)
        return Follower(here, named, lambda: True)
    found = _RunOfFolder(folder, name, model, here)
    return Follower(found, named, lambda: why_over(run_status(folder)) is not None, strict=strict)


class _RunOfFolder:
    """A ``FollowedRun`` in this host's memory if all of it is there, else over the network.

    Knows a run's folder; not what shards are."""

    def __init__(self, folder: Path, run: str, model: int, here: HostRun | None) -> None:
        """``here``: None: the run shares no memory with processes of this host."""
        self.run, self._folder, self._model, self._here = run, folder, model, here
        self._afar: RemoteRun | None = None  # once it was needed: it brings grpc with it. freed by: close()
        self._looked = -_LOOK_S

    @property
    def missing(self) -> str:
        if self._afar is not None:
            return self._afar.missing
        return f"run {self.run!r} has not said where its optimizers are" if self._here is None else self._here.missing

    def shards(self) -> Shards | None:
        found = None if self._here is None else self._here.shards()
        if found is not None:
            self.close()
            return found
        if self._afar is None and time.monotonic() - self._looked >= _LOOK_S:
            self._looked = time.monotonic()
            if self._is_elsewhere(run_status(self._folder)):
                from rayzero.followers.remote_shards import RemoteRun

                self._afar = RemoteRun(self.run, self._way)
        return None if self._afar is None else self._afar.shards()

    def has(self, shards: Shards) -> bool:
        if self._afar is not None:
            return self._afar.has(shards)
        return self._here is not None and self._here.has(shards)

    def close(self) -> None:
        if self._afar is not None:
            self._afar.close()
            self._afar = None

    def _is_elsewhere(self, record: Mapping[str, Any]) -> bool:
        """Whether a run goes on with optimizers that this host's memory does not have. Raises UnsupportedError if no
        other host can call them."""
        if record["state"] != RunState.RUNNING or not record["addresses"]:
            return False
        inside = all(map(is_loopback, record["addresses"]))
        if inside and not _began_here(record):
            raise UnsupportedError(
                f"the optimizers of run {self.run!r} listen at loopback of another host, because all of it is on one "
                "node: start it with run.network, such as 10.0.0.0/8, to follow it from here"
            )
        return self._here is None or self._here.gone or not inside

    def _way(self) -> Way | str:
        from rayzero.store.wire.rpc import CallTerms

        record, key = run_status(self._folder), read_follower(self._folder)
        if (why := why_over(record)) is not None or record["state"] != RunState.RUNNING:
            return f"run {self.run!r} has no optimizers now, because {why or 'it is starting'}"
        if key is None:
            return f"{self._folder / FOLLOWER_FILE} is not there: copy it from the run's folder, together with {RECORD}"
        return record["addresses"], CallTerms(token=key.token, tls=identity_of(key.tls), model=self._model)


def _memory_of(record: Mapping[str, Any], folder: Path) -> Path | None:
    """The directory of a run's shared memory; None: it shares none."""
    if (why := why_over(record)) is not None:
        newest = record["checkpoint"]
        instead = f"its newest checkpoint is {newest}" if newest else "it has no checkpoint"
        raise ConfigError(f"run {record['run']!r} publishes nothing any more, because {why}: {instead}")
    try:
        return ZeroConfig.from_mapping(record["config"]["zero"]).shared_directory
    except (KeyError, TypeError, ConfigError) as error:
        raise ConfigError(f"{folder / RECORD} does not say how the run is configured: {error}") from error


def _began_here(record: Mapping[str, Any]) -> bool:
    """Whether a run's driver is on this host, as far as the record says."""
    states = record["states"]
    if states is None:
        return bool(record["driver"]["host"] == os.uname().nodename)
    return is_here(Path(states["directory"]), states["memory"])
