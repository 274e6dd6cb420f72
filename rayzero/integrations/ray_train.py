"""Runs Ray Train's ``TorchTrainer`` on RayZero: its workers are the ranks, and optimizer actors hold the states.

::

    def loop(config):
        with config["owners"].rank():                                     # this worker is a rank of the run
            model, optimizer = rayzero.prepare(model, optimizer)          # was: ray.train.torch.prepare_model(model)
            ...                                                           # train.report(...) as before

    with optimizer_actors(num_optimizers=2) as owners:
        TorchTrainer(loop, train_loop_config={"owners": owners}, scaling_config=...).fit()

Ray Train places, starts and ends the workers; the ``with`` block starts and ends the optimizer actors. If a worker or
an optimizer actor dies, the run ends for the others with an error that names it. Leave ``FailureConfig`` at its
``max_failures=0``: Ray Train would start all workers again, and the optimizer actors refuse them by name, because they
hold a later step than any checkpoint. Call ``fit()`` again in a new block, with the checkpoint to continue from.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ray import train
from ray.train.torch import get_device

from rayzero.cluster.actors import RunActors
from rayzero.cluster.nodes.placement import placed
from rayzero.cluster.nodes.resources import plan_optimizers
from rayzero.cluster.nodes.session import ray_session
from rayzero.cluster.run import RunState
from rayzero.config import ScalingConfig, TelemetryConfig, ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.errors import UnsupportedError
from rayzero.protocol.store import ParameterStore
from rayzero.store.rank.owner_table import OwnerTable
from rayzero.store.rank.select import connect_store
from rayzero.telemetry.recorder import MemoryRecorder

__all__ = ["Owners", "optimizer_actors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """The addresses of a run's optimizer actors; travels to the workers in ``train_loop_config``."""

    run: str
    config: ZeroConfig
    addresses: tuple[str, ...]  # by owner index
    token: str = field(repr=False)  # owners ask for it in every call

    @contextmanager
    def rank(self, resume: Path | str | None = None) -> Iterator[RankContext]:
        """Make a Ray Train worker a rank: inside the context it has the rank that Ray Train gave it, and
        ``rayzero.prepare`` gives its model to these optimizer actors.

        resume: a checkpoint of ``rayzero.save_checkpoint`` to continue from, on a file system that all nodes see; the
        same on every worker."""
        place, recorder = train.get_context(), MemoryRecorder()

        def connect(model: int) -> ParameterStore:
            rank = place.get_world_rank()
            return connect_store(
                rank, OwnerTable(self.addresses), token=self.token, config=self.config, recorder=recorder, model=model
            )

        context = RankContext(
            rank=place.get_world_rank(),
            world_size=place.get_world_size(),
            device=get_device(),
            run=self.run,
            resume=None if resume is None else Path(resume),
            config=self.config,
            connect=connect,
            recorder=recorder,
        )
        with running_in(context):
            yield context


@contextmanager
def optimizer_actors(
    config: ZeroConfig | None = None, *, num_optimizers: int = 1, cpus_per_optimizer: float = 1.0
) -> Iterator[Owners]:
    """Start the optimizer actors of one ``fit()`` from the driver, and end them with the block.

    config: what ``rayzero.prepare`` uses in the workers if it is given no config. Joins a Ray that is running or starts
    a local one, which Ray Train uses too. Raises ConfigError if the cluster has no place for the actors, and
    UnsupportedError for settings that need owners or memory in the workers' processes."""
    config = config or ZeroConfig()
    _check(config)
    scaling = ScalingConfig(num_optimizers=num_optimizers, cpus_per_optimizer=cpus_per_optimizer)
    run = f"ray-train-{secrets.token_hex(4)}"
    with (
        ray_session(),
        placed(plan_optimizers(scaling), timeout_s=scaling.placement_timeout) as placement,
        RunActors(run, placement) as actors,
    ):
        routing = actors.start(
            owner_memory=config.cpu_memory_budget,
            share=config.shared_directory,
            slab_dir=Path(config.slab_dir),
            telemetry=TelemetryConfig(enabled=False),
        )
        actors.move(RunState.RUNNING)
        yield Owners(run=run, config=config, addresses=routing.addresses, token=actors.token)
        actors.move(RunState.FINISHED)
        actors.stop_owners()


def _check(config: ZeroConfig) -> None:
    config.require_supported()
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
