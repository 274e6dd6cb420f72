"""Being on a Ray cluster for the length of a run: the one at hand, or a local one that we start and end."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray
from ray._private import utils as ray_utils

from rayzero.cluster.coordinator import NAMESPACE
from rayzero.cluster.interrupts import postponed, shielded
from rayzero.cluster.resources import Node
from rayzero.errors import RunFailedError

__all__ = ["alive_nodes", "free_resources", "ray_session", "started_here"]


@contextmanager
def ray_session() -> Iterator[None]:
    """Join Ray, and leave it as it was found.

    In order: the Ray this process is already connected to (left alone afterwards), the cluster of ``RAY_ADDRESS``
    (as under ``ray job submit``), the newest one of ``ray start`` on this machine, else a local one without
    dashboard, which ends with the session. Raises RunFailedError when the cluster cannot be reached, and what a
    signal that came while Ray started raises once it has: KeyboardInterrupt, SystemExit(143).
    """
    if ray.is_initialized():
        yield
        return
    try:
        _join()
        yield
    finally:
        with shielded():
            ray.shutdown()


def _join() -> None:
    try:
        with postponed(), _handlers_kept():
            ray.init(include_dashboard=False, namespace=NAMESPACE, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises a bare Exception where a node does not start in time
        where = os.environ.get("RAY_ADDRESS", "the local machine")
        said = " ".join(str(error).split()) or type(error).__name__
        raise RunFailedError(f"cannot join Ray at {where}: {said}") from error


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Ray's own handlers for SIGTERM, which it sets while it starts, exit in the middle of that, and what a raylet has
    just started then stays for ever."""
    theirs, ray_utils.set_sigterm_handler = ray_utils.set_sigterm_handler, lambda _: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = theirs


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
