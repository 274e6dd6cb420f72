"""Ray Train's TorchTrainer on optimizer actors goes on when processes are killed, with undisturbed bits.

A fit starts seven processes that import torch, so each of the few here outlives several deaths."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray import train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from safetensors.torch import load_file, save_file
from torch import nn

import rayzero
from rayzero.config import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.integrations.ray_train import optimizer_actors
from rayzero.testing import run_ranks
from tests.support import needs

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.ray,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),  # Ray has some of its own
    needs.shared_memory,
]

STEPS = 16
FROM_A_CHECKPOINT = (0, 4), (0, 8)  # Ray Train may not have the newest one yet when it ends the workers
Config = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def by_value() -> Iterator[None]:
    """The workers cannot import this file."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def kill_an_optimizer() -> None:
    """Kill the process of this Ray's newest optimizer actor. It is a fork server's child."""
    running = psutil.process_iter(["cmdline"])  # None of one that has ended meanwhile
    named = [one for one in running if "ray::OptimizerActor" in "".join(one.info["cmdline"] or ())]
    found = [one for one in named if one.environ().get("RAY_RAYLET_PID") == os.environ["RAY_RAYLET_PID"]]
    max(found, key=psutil.Process.create_time).kill()


def kill_worker() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def break_down() -> None:
    raise ValueError("a batch that is broken")


Deed = Callable[[], None]


def prepared() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)), nn.Linear(16, 1))
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return rayzero.prepare(model, plain, ZeroConfig(stall_timeout=60.0))  # type: ignore[return-value]


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    torch.manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 16)
    return (model(inputs) - inputs[:, :1]).square().mean()  # type: ignore[no-any-return]


def loop(config: Config) -> None:
    """Train to STEPS. ``deeds``: (rank, step, whether before its commit, what happens there once)."""
    place = Path(config["place"])
    saved = train.get_checkpoint()
    resume = None if saved is None else saved.path
    with config["owners"].rank(resume=resume) as context:
        torch.set_num_threads(1)
        model, optimizer = prepared()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if config["tracks"]:
            rayzero.track(scheduler=scheduler)
        elif context.loop_state is not None:
            scheduler.load_state_dict(context.loop_state["scheduler"])
        (place / f"began-{context.rank}-{context.life}-{os.getpid()}").write_text(str(context.step))

        def reach(step: int, before: bool) -> None:
            for number, (rank, at, early, deed) in enumerate(config["deeds"]):
                once = place / f"deed-{number}"
                if (rank, at, early) == (context.rank, step, before) and not once.exists():
                    once.touch()
                    deed()

        for step in range(context.step, STEPS):
            loss_of(model, step, context.rank).backward()
            reach(step, True)
            optimizer.step()
            reach(step, False)
            scheduler.step()
            optimizer.zero_grad()
            if step % 4 == 3:
                state = {} if config["tracks"] else {"scheduler": scheduler.state_dict()}
                path = rayzero.save_checkpoint(optimizer, place / f"step-{step + 1}", state).path
                weights = rayzero.full_state_dict(model)
                if context.rank == 0:
                    save_file(weights, place / f"weights-{step + 1}.safetensors")
                train.report(
                    {"step": step + 1}, checkpoint=train.Checkpoint.from_directory(path) if not context.rank else None
                )


def fit(
    place: Path, *deeds: tuple[int, int, bool, Deed], tracks: bool = True, failures: int = 0, **settings: Any
) -> Any:
    """Two workers and two optimizer actors; returns Ray Train's result."""
    place.mkdir()
    config = settings.pop("config", None)
    with optimizer_actors(config, num_optimizers=2, cpus_per_optimizer=0.5, **settings) as owners:
        return TorchTrainer(
            loop,
            train_loop_config={"owners": owners, "place": str(place), "deeds": deeds, "tracks": tracks},
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
            run_config=RunConfig(
                name=place.name, storage_path=str(place), failure_config=FailureConfig(max_failures=failures)
            ),
        ).fit()


def undisturbed(context: RankContext) -> dict[int, dict[str, torch.Tensor]]:
    """The loop without Ray: the weights after every fourth step."""
    torch.set_num_threads(1)
    model, optimizer = prepared()
    scheduler, after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), {}
    for step in range(STEPS):
        loss_of(model, step, context.rank).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            after[step + 1] = rayzero.full_state_dict(model)
    return after


@pytest.fixture(scope="module")
def weights() -> dict[int, dict[str, torch.Tensor]]:
    return run_ranks(undisturbed, 2, 2, transport="shm", processes=True)[0]  # type: ignore[no-any-return]


def same(place: Path, weights: dict[str, torch.Tensor], step: int = STEPS) -> bool:
    ours = load_file(place / f"weights-{step}.safetensors")
    return ours.keys() == weights.keys() and all(torch.equal(ours[name], weights[name]) for name in weights)


def begun(place: Path) -> list[tuple[int, int]]:
    """(life, first step) of rank 0's lives."""
    found = sorted((path.stat().st_mtime_ns, path) for path in place.glob("began-0-*"))
    return [(int(path.name.split("-")[2]), int(path.read_text())) for _, path in found]


def slabs() -> set[str]:
    """Those of Ray Train's runs; other tests run beside these."""
    return {path.name for path in Path("/dev/shm").glob("rayzero-ray-train-*")}


def test_killed_optimizers_and_workers_and_an_exception_change_no_bit(
    local_ray: None, weights: dict[int, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    before, place = slabs(), tmp_path / "demo"
    fit(
        place,
        (0, 2, True, kill_an_optimizer),
        (1, 10, False, break_down),
        (1, 11, True, kill_worker),
        (0, 13, False, kill_worker),
        failures=3,
    )
    assert same(place, weights[STEPS])
    first, again, *others = begun(place)
    assert (first, others) == ((0, 0), [(1, 11), (2, 13)])
    assert again in FROM_A_CHECKPOINT, "an exception of the loop may have broken what it tracks"
    assert slabs() == before


def test_a_loop_that_tracks_nothing_restarts_from_its_checkpoint_and_one_death_too_many_ends_it_by_name(
    local_ray: None, weights: dict[int, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    before, place = slabs(), tmp_path / "demo"
    deeds = [(1, 10, True, kill_worker), *((0, step, True, kill_an_optimizer) for step in (12, 14))]
    with pytest.raises(Exception, match=r"optimizer \d died: .* one failure too many: the run has outlived 1 failure"):
        fit(place, *deeds, tracks=False, failures=2, max_failures=1)
    first, again, *_ = begun(place)
    assert first == (0, 0)
    assert again in FROM_A_CHECKPOINT
    assert same(place, weights[12], 12)
    assert slabs() == before


def test_without_shared_memory_a_dead_optimizer_restarts_the_workers(
    local_ray: None, weights: dict[int, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    place = tmp_path / "demo"
    fit(place, (0, 10, True, kill_an_optimizer), failures=1, config=ZeroConfig(transport="grpc"))
    first, again = begun(place)
    assert first == (0, 0)
    assert again in FROM_A_CHECKPOINT
    assert same(place, weights[STEPS])
