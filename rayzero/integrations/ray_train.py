"""Runs Ray Train's ``TorchTrainer`` on RayZero: its workers are the ranks, and optimizer actors hold the states.

::

    def loop(config):
        with config["owners"].rank():                                     # this worker is a rank of the run
            model, optimizer = rayzero.prepare(model, optimizer)          # was: ray.train.torch.prepare_model(model)
            ...                                                           # train.report(...) as before

    with optimizer_actors(num_optimizers=2) as owners:
        TorchTrainer(loop, train_loop_config={"owners": owners}, scaling_config=...).fit()

Ray Train places, starts and ends the workers; the ``with`` block starts and ends the optimizer actors.

If an optimizer actor dies, another process takes its place and its memory, ``max_failures`` times at most, and the
workers wait. If a worker dies, Ray Train starts all workers again, as often as its ``FailureConfig(max_failures=N)``
says, and they go on in one of two ways:

- **At the step that was open**, with the same bits as without the death, if the loop calls ``rayzero.track()``, begins
  at ``context.step``, and everybody is on one host. The checkpoint that the loop passes to ``rank()`` does not count
  then. If a worker had not ended the iteration before, all do its end again, and ``context.repeating`` says so: a loss
  that was computed there was computed with newer weights.
- **From the checkpoint that the loop passes to** ``rank(resume=...)``, say ``train.get_checkpoint()``: after an
  exception of the loop, with another number of workers, and in loops that track nothing. Without one it begins anew.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray import train
from ray.train.torch import get_device
from ray.util import get_current_placement_group, placement_group_table

from rayzero.cluster.group_owners import GroupEnded, GroupOwners, GroupsAsked, WorkerGroup
from rayzero.cluster.janitor import leaving_nothing
from rayzero.cluster.nodes.places import placed
from rayzero.cluster.nodes.resources import plan_optimizers
from rayzero.cluster.nodes.session import ray_session
from rayzero.cluster.processes.rank_worker import RankStart, rank_context
from rayzero.concurrency.processes import raise_open_files
from rayzero.config import RunConfig, ScalingConfig, SecurityConfig, TelemetryConfig, ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.errors import ConfigError, RunFailedError, UnsupportedError
from rayzero.security.credentials import Identity, identity_of
from rayzero.store.remote.owner_table import OwnerTable
from rayzero.telemetry.recorder import MemoryRecorder

__all__ = ["Owners", "optimizer_actors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """A run's optimizer actors; travels to the workers in ``train_loop_config``."""

    run: str
    config: ZeroConfig
    groups: GroupsAsked  # knows where they are

    @contextmanager
    def rank(self, resume: Path | str | None = None) -> Iterator[RankContext]:
        """Make a Ray Train worker a rank: inside the context it has the rank that Ray Train gave it, and
        ``rayzero.prepare`` gives its model to these optimizer actors.

        resume: a checkpoint of ``rayzero.save_checkpoint`` to continue from, on a file system that all nodes see; the
        same on every worker. It does not count where workers that were started again go on at the open step.

        Raises RunFailedError if there are no optimizer actors any more; if they are lost while the loop runs, the
        error of its waiting call becomes one."""
        place = train.get_context()
        name, nodes = _group()
        group = WorkerGroup(
            name=name,
            run=place.get_experiment_name(),
            world_size=place.get_world_size(),
            nodes=nodes,
            resume=None if resume is None else Path(os.path.abspath(resume)),
        )
        start = self.groups.join(group, place.get_world_rank(), f"pid {os.getpid()} on {platform.node()}")
        if isinstance(start, GroupEnded):
            raise RunFailedError(f"rank {place.get_world_rank()} has no optimizer actors: {start.why}")
        raise_open_files()  # nobody has started this process for RayZero
        table = OwnerTable(start.addresses, start.ownership)
        identity = identity_of(start.tls)
        context = self._context(place, group, start, table, identity)
        with leaving_nothing(start.remains, self.config.shared_directory):
            follower = _Follower(self.groups, group, start, table, identity, context)
            try:
                with running_in(context):
                    yield context
            except Exception as error:
                if follower.ended is not None:
                    raise RunFailedError(follower.ended) from error
                raise
            finally:
                follower.close()

    def _context(
        self, place: Any, group: WorkerGroup, start: RankStart, table: OwnerTable, identity: Identity | None
    ) -> RankContext:
        rank = place.get_world_rank()
        first = rank - place.get_local_rank()  # Ray Train numbers workers node by node
        return rank_context(
            rank,
            start if start.life else replace(start, resume=group.resume),
            table,
            identity,
            config=self.config,
            ranks_here=range(first, first + place.get_local_world_size()),
            outlives_owners=self.config.shared_directory is not None,
            recorder=MemoryRecorder(),
            world_size=place.get_world_size(),
            device=get_device(),
            run=self.run,
        )


def _group() -> tuple[str, tuple[str, ...]]:
    """A name that the workers of one group share, and no other group has: that of their placement group. And the node
    (id) of each place in it, which all workers know before the last one is there."""
    group = get_current_placement_group()
    assert group is not None, "Ray Train starts its workers in a placement group"
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return group.id.hex(), tuple(nodes[place] for place in sorted(nodes))


class _Follower:
    """Tells a worker's rank where its owners are, and what it shows them, in a thread, while its loop runs."""

    def __init__(
        self,
        groups: GroupsAsked,
        group: WorkerGroup,
        start: RankStart,
        table: OwnerTable,
        identity: Identity | None,
        context: RankContext,
    ) -> None:
        self.ended: str | None = None  # why there are no owners any more
        self._groups, self._group, self._known = groups, group.name, start
        self._table, self._context, self._identity = table, context, identity
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="rayzero-owners", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The loop has ended."""
        self._closed.set()
        self._thread.join()

    def _follow(self) -> None:
        while self.ended is None:
            answer = self._groups.news(self._group, self._known, self._closed)
            if answer is None:
                return
            self._take(answer)

    def _take(self, answer: RankStart | GroupEnded) -> None:
        if isinstance(answer, GroupEnded):
            self.ended = f"rank {self._context.rank} has lost its optimizer actors: {answer.why}"
            self._context.close(self.ended)  # its loop may wait for them
            return
        for owner, (before, now) in enumerate(zip(self._known.addresses, answer.addresses, strict=True)):
            if now != before:
                self._table.succeed(owner, now)
        if self._identity is not None and answer.tls is not None:
            self._identity.renew(answer.tls)
        self._known = answer


@contextmanager
def optimizer_actors(
    config: ZeroConfig | None = None,
    *,
    num_optimizers: int = 1,
    cpus_per_optimizer: float = 1.0,
    max_failures: int = 3,
    security: SecurityConfig | None = None,
) -> Iterator[Owners]:
    """Start the optimizer actors of one ``fit()`` from the driver, and end them with the block.

    config: what ``rayzero.prepare`` uses in the workers if it is given no config.
    max_failures: how many deaths of optimizer actors are outlived in all. Those of workers are for Ray Train's
        ``FailureConfig``.
    security: how connections between the actors and the workers are protected; None: the defaults.

    Joins a Ray that is running or starts a local one, which Ray Train uses too. Raises ConfigError if the cluster has
    no place for the actors, and UnsupportedError for settings that need owners or memory in the workers' processes."""
    config = config or ZeroConfig()
    _check(config)
    if type(max_failures) is not int or max_failures < 0:
        raise ConfigError(f"max_failures is {max_failures!r}; pass a whole number >= 0")
    scaling = ScalingConfig(num_optimizers=num_optimizers, cpus_per_optimizer=cpus_per_optimizer)
    run = RunConfig(
        name=f"ray-train-{secrets.token_hex(4)}",
        max_failures=max_failures,
        keep_states=0,
        telemetry=TelemetryConfig(enabled=False),
        security=security or SecurityConfig(),
    )
    with (
        ray_session(),
        placed(plan_optimizers(scaling), timeout_s=scaling.placement_timeout) as places,
        GroupOwners(run, config, places) as owners,
    ):
        yield Owners(run=run.name, config=config, groups=GroupsAsked(owners.groups))


def _check(config: ZeroConfig) -> None:
    if config.host_fraction < 1:
        raise UnsupportedError(
            f"offload_fraction={config.host_fraction:g} needs owners in the ranks' processes, which Ray Train starts; "
            "leave it at 1 here, or use rayzero.ZeroTrainer"
        )
    if config.transport == "inproc":
        raise UnsupportedError(
            "transport='inproc' only reaches owners in the same process, and Ray Train's workers are other processes; "
            "use transport='auto' or 'grpc'"
        )
