"""Connects to Ray for the length of a run: to a running cluster, or to a local one that starts and ends with it."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import ray
from ray._private import utils as ray_utils
from ray._raylet import Config  # type: ignore[attr-defined]  # a compiled module

from rayzero.cluster.nodes.local_ray import LocalRay
from rayzero.cluster.nodes.ray_address import find_ray
from rayzero.cluster.nodes.resources import Node
from rayzero.cluster.run import NAMESPACE
from rayzero.cluster.supervision import interruptible, shielded
from rayzero.errors import RunFailedError
from rayzero.security.clients import host_and_port

_CONNECT_S = 5.0  # how long a running Ray may take to answer
_LOOK_S = 1.0  # between two looks whether Ray is still there

log = logging.getLogger(__name__)


_started: set[str] = set()  # the addresses of the Rays that sessions of this process have started and not yet ended


@contextmanager
def ray_session(say: Callable[[str], None] = log.info, begun: LocalRay | None = None) -> Iterator[None]:
    """Join Ray, and leave it as it was. ``say`` is called with a short description before each thing that is done.

    In order: the Ray this process is already connected to (left alone afterwards), the cluster of ``RAY_ADDRESS`` (as
    under ``ray job submit``), the newest one of ``ray start`` on this machine, else a local one without dashboard,
    which ends with the session; that one, too, where what ``ray start`` left is a file only. ``begun``: a local one
    that has begun to start. Raises ConfigError if no Ray answers at ``RAY_ADDRESS``, RunFailedError if the cluster
    cannot be reached, and what a signal raises (KeyboardInterrupt, SystemExit(143)), at once.
    """
    if ray.is_initialized():
        yield
        return
    found = find_ray()
    if found.ignored:
        log.warning("%s", found.ignored)
    say("starting Ray on this machine" if found.joined is None else f"joining Ray at {found.joined}")
    if found.joined is not None:
        with _joined(found.joined, None):  # Ray finds it again itself, because only then does it look for a token
            yield
        return
    with begun or LocalRay() as local:
        address = local.address()
        if address is None:  # a Ray that was there is gone
            raise RunFailedError("the Ray of this machine has just ended; start the run again")
        Config.initialize("")  # Ray read its settings before local.address() set some
        _started.add(address)
        try:
            with _joined(address, address):
                yield
        finally:
            _started.remove(address)


@contextmanager
def _joined(where: str, address: str | None) -> Iterator[None]:
    try:
        with interruptible(), _handlers_kept():
            _init(address, where)
        yield
    finally:
        with shielded():
            ray.shutdown()


def _init(address: str | None, where: str) -> None:
    try:
        ray.init(address=address, include_dashboard=False, namespace=NAMESPACE, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises a bare Exception if a node does not start in time
        said = " ".join(str(error).split()) or type(error).__name__
        raise RunFailedError(f"cannot join Ray at {where}: {said}") from error


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Keep our signal handlers while Ray starts. Ray would set its own for SIGTERM, which exit midway and leave the
    processes that a raylet has just started for ever."""
    theirs, ray_utils.set_sigterm_handler = ray_utils.set_sigterm_handler, lambda _: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = theirs


def ray_answers() -> bool:
    """Whether something still listens at the address of the cluster's GCS. A signal to the whole process group
    (``timeout``, a service manager) also ends a Ray that this process started. Does not ask Ray, whose own calls would
    wait a minute and then end the process."""
    gcs = host_and_port(ray.get_runtime_context().gcs_address)
    try:
        socket.create_connection(gcs, timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def answered(calls: Sequence[Any], timeout_s: float) -> tuple[list[Any], list[Any]]:
    """The calls that are answered within ``timeout_s``, and the others. Does not wait for a Ray that is gone: nobody
    would tell this process that the callee is dead, and a minute later Ray would end this process, too."""
    until = time.monotonic() + timeout_s
    while True:
        left = max(0.0, until - time.monotonic())
        ready, late = ray.wait(list(calls), num_returns=len(calls), timeout=min(_LOOK_S, left))
        if not late or left <= _LOOK_S or not ray_answers():
            return ready, late


def started_here() -> bool:
    """True when this process started the Ray it is connected to: such a cluster never grows."""
    from ray._private.worker import _global_node

    if _global_node is None:
        return False
    return bool(_global_node.is_head()) or _global_node.gcs_address in _started


def alive_nodes() -> list[Node]:
    return [
        _node(node["Resources"], node["NodeID"], node["NodeManagerAddress"], node.get("Labels", {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


def free_resources() -> Node:
    return _node(ray.available_resources())


def _node(
    has: Mapping[str, float], id: str = "", address: str = "", labels: Mapping[str, str] = MappingProxyType({})
) -> Node:
    cpus, gpus, memory = (has.get(resource, 0.0) for resource in ("CPU", "GPU", "memory"))
    return Node(id=id, address=address, cpus=cpus, gpus=gpus, memory=memory, labels=labels)
