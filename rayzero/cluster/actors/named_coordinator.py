"""The coordinator's actor, whose name on the cluster is the run's: no two runs of one name are there at a time."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayzero.cluster.actors.actor_calls import forked
from rayzero.cluster.files.metrics_log import MetricsLog
from rayzero.cluster.processes.coordinator import Coordinator
from rayzero.cluster.run import NAMESPACE, coordinator_name
from rayzero.errors import ConfigError

_LOOK_S = 0.2  # between two looks whether a dead driver's run has left the cluster


def make_coordinator(run: str, log: MetricsLog | None, restarts: int) -> Any:
    """Create the actor, on the driver's node, which is how http_sd is found. ``log``: see ``Coordinator``.
    ``restarts``: how often Ray may start it again.

    Raises ConfigError if a run of this name is on the cluster."""
    here = ray.get_runtime_context().get_node_id()
    options = {
        "name": coordinator_name(run),
        "namespace": NAMESPACE,
        "num_cpus": 0,  # for actors without CPUs Ray picks a node at random, and only a hard affinity changes that
        "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False),
        "max_concurrency": 100,
        "max_restarts": restarts,  # by Ray, so that every process's handle stays good
        "max_task_retries": -1 if restarts else 0,
    }
    try:
        return ray.remote(Coordinator).options(**options, **forked()).remote(run, log, time.time())
    except ValueError as error:  # ActorAlreadyExistsError is one
        raise _name_in_use(run) from error


def refuse_name_in_use(run: str, patience_s: float = 0.0) -> None:
    """Raise ConfigError if a run of this name is on the cluster, before waiting for resources that it holds.

    ``patience_s``: how long it may still be there, because its driver is dead."""
    until = time.monotonic() + patience_s
    while _is_there(run):
        if time.monotonic() >= until:
            raise _name_in_use(run)
        time.sleep(_LOOK_S)


def _is_there(run: str) -> bool:
    try:
        ray.get_actor(coordinator_name(run), namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def _name_in_use(run: str) -> ConfigError:
    return ConfigError(
        f"a run named {run!r} is already on this cluster; a run is named after its directory, so choose another one"
    )
