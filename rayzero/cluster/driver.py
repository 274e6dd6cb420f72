"""One run from the driver's side: start the actors, follow them to the end, take everything down."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import ray

from rayzero.cluster.actors.actor_calls import STOP_S, refuse_name_in_use
from rayzero.cluster.actors.certificates import Certificates
from rayzero.cluster.actors.run_actors import RunActors
from rayzero.cluster.files.key_files import viewable
from rayzero.cluster.files.metrics_log import MetricsLog, trim_log, written_rows
from rayzero.cluster.files.run_record import RECORD
from rayzero.cluster.interrupts import postponed
from rayzero.cluster.janitor import KeptStates, announced
from rayzero.cluster.journal import Journal, RunRequest
from rayzero.cluster.loggers.feed import Loggers
from rayzero.cluster.nodes.places import Reservation, placed
from rayzero.cluster.nodes.resources import plan_resources, rescaled
from rayzero.cluster.nodes.session import alive_nodes, ray_session
from rayzero.cluster.run import Recovery, RunState, rank_name
from rayzero.cluster.supervision import Verdict, run_failed
from rayzero.cluster.upkeep.follower import Follower, ownership_of, remains_of
from rayzero.config import ScalingConfig
from rayzero.config.zero import Placement
from rayzero.elastic.controller import (
    still_outlived,
    wait_before_restart,
)
from rayzero.errors import ConfigError, RayZeroError, RunFailedError
from rayzero.protocol.ownership import Ownership, device_owners
from rayzero.quantities import count
from rayzero.telemetry.scrape import service_discovery

_LOOK_S = 1.0  # between two looks for places
_GONE_S = 60.0  # until the processes of a driver that was killed have left the cluster


def drive(request: RunRequest, journal: Journal) -> None:
    """Run to the end and leave nothing behind; keeps ``journal`` up to date.

    A run that has lost what only a checkpoint brings back starts again from the newest one, ``max_failures`` times at
    most. Raises RunFailedError with the cause, ConfigError when the cluster has no place for the run, and what a signal
    raises (KeyboardInterrupt, SystemExit) or ``on_report`` raised, once the ranks have been stopped. Call it inside
    ``interruptible()``.
    """
    start = request.directory.start
    with ray_session(request.on_phase, request.ray):
        journal.ray_address = ray.get_runtime_context().gcs_address
        refuse_name_in_use(request.run.name, _GONE_S if start.is_after_kill else 0.0)
        if start.step or start.why:
            request.on_phase(str(start))
        lost = _attempt(_with_optimizers(request, ownership_of(start)), journal)
        while lost is not None:
            lost = _again(request, journal, lost)


def _with_optimizers(request: RunRequest, ownership: Ownership | None) -> RunRequest:
    return request if ownership is None else replace(request, scaling=_of(request.scaling, ownership.num_optimizers))


def _of(scaling: ScalingConfig, num_optimizers: int) -> ScalingConfig:
    most = scaling.max_optimizers
    return scaling.replace(num_optimizers=num_optimizers, max_optimizers=most and max(most, num_optimizers))


def _again(request: RunRequest, journal: Journal, lost: RunFailedError) -> RunFailedError | None:
    journal.state = RunState.STARTING
    journal.restarts += 1
    try:
        _prepare_again(request, journal, lost)
        scaling = _of(request.scaling, journal.num_optimizers or request.scaling.num_optimizers)
        scaling = _places_left(scaling, request.zero.placement)
        return _attempt(replace(request, scaling=scaling), journal)
    except (RayZeroError, OSError) as failed:
        if journal.state is not RunState.STARTING:
            raise
        if not isinstance(failed, RunFailedError) or journal.outlived >= request.run.max_failures:
            raise RunFailedError(f"{lost}\nThe run cannot start again: {failed}") from failed
        journal.outlived += 1
        return failed


def _prepare_again(request: RunRequest, journal: Journal, lost: RunFailedError) -> None:
    directory, wait_s = request.directory, wait_before_restart(journal.restarts)
    directory.restart()
    trim_log(directory.path, directory.rows_until)
    left = still_outlived(request.run.max_failures, journal.outlived)
    why = str(lost).partition("\n")[0]
    request.on_phase(f"{why}; {directory.start}, in {wait_s:g} s {left}")
    request.record.write()
    time.sleep(wait_s)  # whatever ended the run may not be over: a host that restarts, a cluster that shrinks
    refuse_name_in_use(request.run.name, _GONE_S)  # Ray frees a name some time after its actor has ended


def _places_left(scaling: ScalingConfig, placement: Placement) -> ScalingConfig:
    """The processes that a run may start again; waits for the cluster to have a place for all of them."""
    until = time.monotonic() + scaling.placement_timeout
    while scaling.rescale_on_failure and rescaled(scaling, alive_nodes(), placement) != scaling:
        if time.monotonic() >= until:
            return rescaled(scaling, alive_nodes(), placement)
        time.sleep(_LOOK_S)
    return scaling


def _attempt(request: RunRequest, journal: Journal) -> RunFailedError | None:
    """Start the run and follow it. Returns None at its good end, and what ended it if it may start again."""
    scaling, run = request.scaling, request.run.name
    plan = plan_resources(scaling, alive_nodes(), request.zero.placement)
    request.on_phase(
        f"starting {count(scaling.num_workers, 'rank')} and {count(scaling.num_optimizers, 'optimizer actor')}"
    )
    continues = request.directory.start.continuation is not None
    log = MetricsLog(
        request.directory.path, request.make_row, written_rows(request.directory.path) if continues else None
    )
    places = placed(plan, timeout_s=scaling.placement_timeout)
    cpus_are_set = scaling.cpus_per_optimizer is not None
    if request.access is not None:
        request.access.refresh()  # it may have been made long ago
    certificates = Certificates(run, request.run.security, request.access)
    viewer = None if request.access is None else request.access.viewer
    tools = viewable(request.directory.path, viewer, certificates.of_follower())
    loggers = _loggers(request, journal)
    with (
        loggers,
        places as placement,
        tools,
        RunActors(run, placement, certificates, log, cpus_are_set=cpus_are_set) as actors,
    ):
        _start(request, placement, actors, journal)
        loggers.start(actors.coordinator.logged.remote)
        try:
            with _discoverable(request, actors):
                lost = _follow(request, actors, journal)
                if lost is not None:
                    loggers.state = "restarting"
                    actors.end(politely=False)
                return lost
        finally:
            journal.rescaling, journal.replacing = None, []
            request.directory.let_go()  # now that the owners have them; the actors' end sweeps


def _loggers(request: RunRequest, journal: Journal) -> Loggers:
    """This attempt's. They begin anew where the run does: not if it starts again by itself."""
    anew = request.directory.rows_until < 0 and not journal.restarts
    path = request.directory.path
    journal.loggers = Loggers(request.run.report_to, request.run.name, path, request.settings, anew)
    return journal.loggers


def _start(request: RunRequest, placement: Reservation, actors: RunActors, journal: Journal) -> None:
    start, run = request.directory.start, request.run
    needed, goes_on = _nodes_of_doors(request, placement), ownership_of(start)
    ownership = actors.places.add_doors(needed, goes_on, actors.driver_node)
    if doors := len(ownership.door_numbers):
        request.on_phase(
            f"starting {count(doors, 'more optimizer actor')}, without shards, for ranks that have none near"
        )
    journal.addresses = actors.start(
        request.zero,
        run.telemetry,
        ownership,
        remains_of(request, actors),
        max_failures=run.max_failures,
        replaces_members=run.max_failures > 0,
        keep=KeptStates(run=run.name, lineage=start.lineage, seconds=run.keep_states),
        former=start.former,
        succeeds=start.continuation is not None,
        network=run.network,
        beside_ranks=_beside_ranks(request),
        discovery_dir=run.discovery_dir if run.telemetry.enabled else None,
        warm_spares=run.warm_spares,
    )
    _see_storage(request, actors)
    journal.members = list(actors.members.values())
    journal.latest = {rank: report for rank, report in journal.latest.items() if rank_name(rank) in actors.members}
    journal.measured = {who: measured for who, measured in journal.measured.items() if who in actors.members}
    journal.targets = actors.exporters.targets
    actors.move(RunState.RUNNING)
    journal.state = RunState.RUNNING
    if journal.lost_at is not None:
        seconds, journal.lost_at = time.monotonic() - journal.lost_at, None
        actors.coordinator.recovered.remote("run", "the run", {"restart": seconds})
        journal.recoveries.append(Recovery(who="the run", pid=None, seconds=seconds))
    record = request.record.write()
    if request.on_start is not None:
        request.on_start(record)
    is_https = any(target.scheme == "https" for target in journal.targets)
    if is_https and request.access is not None and request.access.given is None:
        request.on_phase(
            "metrics are readable for rayzero top and rayzero trace alone, because they cross the network; set "
            "run.telemetry.web_config for Prometheus, or run.telemetry.bind=node for everybody"
        )
    request.on_phase("every process is up; starting the training loops")


def _see_storage(request: RunRequest, actors: RunActors) -> None:
    """Say which hosts do not see the run's folder. Raises ConfigError if the loop is known to save checkpoints."""
    without = actors.hosts_without(request.directory.path / RECORD)
    if not without:
        return
    why = (
        f"{', '.join(without)} cannot see {request.directory.path}, so no checkpoint can be completed in it; set "
        "run.storage_path to a folder that all hosts share, the driver's too"
    )
    if request.saves_checkpoints:
        actors.stop_owners(STOP_S)  # killed, they would leave their lobbies in other hosts' memory for a while
        raise ConfigError(why)
    request.on_phase(why)


def _nodes_of_doors(request: RunRequest, placement: Reservation) -> list[str]:
    """The nodes that get an optimizer actor without shards: owners beside ranks are on each, and without shared memory
    it would be no nearer than the others."""
    if request.zero.shared_directory is None or _beside_ranks(request) is not None:
        return []
    return placement.nodes_without_optimizer(placement.rank_nodes())


def _beside_ranks(request: RunRequest) -> str | None:
    """The device of owners beside the ranks; None: there are none."""
    if not device_owners(request.scaling.num_workers, request.zero.host_fraction):
        return None
    return "cuda:0" if request.scaling.use_gpu else "cpu"


def _discoverable(request: RunRequest, actors: RunActors) -> AbstractContextManager[object]:
    """A context in which the run is announced in the directory that Prometheus watches."""
    if not actors.exporters.targets:
        return nullcontext()
    return announced(request.run.discovery_dir, request.run.name, service_discovery(actors.exporters.targets))


def _follow(request: RunRequest, actors: RunActors, journal: Journal) -> RunFailedError | None:
    follower = Follower(actors, journal, request)
    try:
        watch = follower.follow()
        if watch.verdict(time.monotonic()) is Verdict.FINISHED:
            follower.finish()
            return None
    except (KeyboardInterrupt, SystemExit) as interruption:
        reason = f"the run was interrupted ({type(interruption).__name__})"
        follower.take_down(RunState.STOPPED, reason)
        raise
    except BaseException as error:  # on_report raised, or the coordinator is gone: end the ranks, then re-raise
        follower.take_down(RunState.FAILED, f"the driver failed: {type(error).__name__}: {error}")
        raise
    failed, reason = run_failed(request.run.name, watch.cause, watch.others), f"{watch.cause.who} {watch.cause.what}"
    if follower.starts_again():
        with postponed():  # a signal is to end the run, which would go on without it
            follower.take_down_at_once(RunState.FAILED, reason)
        return failed
    follower.take_down(RunState.FAILED, reason)
    raise failed
