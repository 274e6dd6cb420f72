"""Finds a run whose published weights a process is to follow: by its folder, or by its name on this host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from rayzero.cluster.files.run_record import LOST, RECORD, run_status
from rayzero.cluster.run import RunState
from rayzero.config import ZeroConfig
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.followers.follower import Follower
from rayzero.followers.host_shards import HostRun
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.store.shm.same_host import host_identity

_CONFIG = "config.json"  # of transformers, which the recipe puts into a run's folder
_GOES_ON = RunState.STARTING, RunState.RUNNING


def follow(
    run: str | PathLike[str],
    *,
    model: int = 0,
    config: str | PathLike[str] | None = None,
    slab_dir: str | PathLike[str] | None = None,
) -> Follower:
    """Follow the weights that a run publishes, from any process of this user on the host of its optimizers.

    run: its folder, or its name. model: which of the models that the run prepares, in that order. config: a config.json
    of transformers, for the names that it publishes; None: that in the run's folder, or else the names of the model's
    parameters. slab_dir: the run's, if it is followed by its name and that is not /dev/shm.

    A run that starts later is waited for. Raises ConfigError if there is no such run, folder or config, or the run has
    ended, UnsupportedError if its optimizers share no memory with this process."""
    folder = Path(run)
    named = config
    if (folder / RECORD).is_file():
        record = run_status(folder)
        name, directory = str(record["run"]), _memory_of(record, folder)
        named = folder / _CONFIG if named is None and (folder / _CONFIG).is_file() else named
        on_another_host = _began_on_another_host(record)
    elif folder.is_absolute() or folder.name != os.fspath(run):
        raise ConfigError(f"{folder} holds no run, because it has no {RECORD}")
    else:
        record, on_another_host = None, False
        name, directory = os.fspath(run), Path(slab_dir or SHARED_MEMORY)
    if not directory.is_dir():
        raise ConfigError(f"slab_dir is {str(directory)!r}, which is not a directory here: name the run's")
    if named is not None and not Path(named).is_file():
        raise ConfigError(f"config is {os.fspath(named)!r}, and there is no such file")
    found = HostRun(f"{name} model {model}" if model else name, directory)
    if on_another_host and found.shards() is None:
        raise UnsupportedError(
            f"{found.missing}: a follower reads in the memory of the host that has all of a run's optimizers, and does "
            "not follow from another host yet"
        )
    over = (lambda: True) if record is None else (lambda: run_status(folder)["state"] not in _GOES_ON)
    return Follower(found, None if named is None else Path(named), over)


def _memory_of(record: Mapping[str, Any], folder: Path) -> Path:
    """The directory of a run's shared memory."""
    if record["state"] not in _GOES_ON:
        newest = record["checkpoint"]
        instead = f"its newest checkpoint is {newest}" if newest else "it has no checkpoint"
        why = "its driver is gone" if record["state"] == LOST else f"it has {record['state']}"
        raise ConfigError(f"run {record['run']!r} publishes nothing any more, because {why}: {instead}")
    try:
        directory = ZeroConfig.from_mapping(record["config"]["zero"]).shared_directory
    except (KeyError, TypeError, ConfigError) as error:
        raise ConfigError(f"{folder / RECORD} does not say how the run is configured: {error}") from error
    if directory is None:
        raise UnsupportedError(
            f"run {record['run']!r} shares no memory (transport='grpc'): followers need transport='auto' or 'shm'"
        )
    return directory


def _began_on_another_host(record: Mapping[str, Any]) -> bool:
    """Whether a run that goes on began on another host."""
    states = record["states"]
    if record["state"] != RunState.RUNNING or states is None:
        return False
    return bool(states["memory"] != host_identity(Path(states["directory"])))
