"""Being on a Ray cluster for the length of a run: the one at hand, or a local one that we start and end."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import psutil
import ray

from rayzero.cluster.coordinator import NAMESPACE
from rayzero.cluster.interrupts import shielded
from rayzero.cluster.resources import Node
from rayzero.errors import RunFailedError

__all__ = ["alive_nodes", "free_resources", "ray_session", "started_here"]

_KILL_S = 10.0  # for killed processes to be gone


@contextmanager
def ray_session() -> Iterator[None]:
    """Join Ray, and leave it as it was found.

    In order: the Ray this process is already connected to (left alone afterwards), the cluster of ``RAY_ADDRESS``
    (as under ``ray job submit``), the newest one of ``ray start`` on this machine, else a local one without
    dashboard, which ends with the session. Raises RunFailedError when the cluster cannot be reached, and what a
    signal raises while Ray starts: KeyboardInterrupt, SystemExit(143).
    """
    if ray.is_initialized():
        yield
        return
    _join()
    try:
        yield
    finally:
        with shielded():
            ray.shutdown()


def _join() -> None:
    before = _below()
    try:
        ray.init(include_dashboard=False, namespace=NAMESPACE, logging_level=logging.ERROR)
    except BaseException as error:
        with shielded():
            _end(_below() - before)
            ray.shutdown()
        raise _meaning(error) from error


def _meaning(error: BaseException) -> BaseException:
    """What the end of ``ray.init`` says: Ray has handlers of its own for SIGTERM while it starts, which exit with 1 or
    15, and raises a bare Exception where a node does not start in time."""
    if isinstance(error, SystemExit):
        return SystemExit(128 + signal.SIGTERM)
    if not isinstance(error, Exception):
        return error
    where = os.environ.get("RAY_ADDRESS", "the local machine")
    said = " ".join(str(error).split()) or type(error).__name__
    return RunFailedError(f"cannot join Ray at {where}: {said}")


def _below() -> set[psutil.Process]:
    """All processes that this one has started, and theirs."""
    return set(psutil.Process().children(recursive=True))


def _end(started: set[psutil.Process]) -> None:
    """Of a Ray that has started half: its own clean-up forgets what a raylet has just started."""
    for process in sorted(started, key=lambda process: process.pid):  # who starts others first
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(started, timeout=_KILL_S)


def started_here() -> bool:
    """True when this process started the Ray it is connected to: such a cluster never grows."""
    from ray._private.worker import _global_node

    return _global_node is not None and bool(_global_node.is_head())


def alive_nodes() -> list[Node]:
    """What each node of the cluster has in all."""
    return [_node(node["Resources"], node.get("Labels", {})) for node in ray.nodes() if node["Alive"]]


def free_resources() -> Node:
    """What nobody uses just now, all nodes together."""
    return _node(ray.available_resources(), {})


def _node(has: Mapping[str, float], labels: Mapping[str, str]) -> Node:
    return Node(cpus=has.get("CPU", 0.0), gpus=has.get("GPU", 0.0), memory=has.get("memory", 0.0), labels=labels)
