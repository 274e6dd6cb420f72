"""Ray Train's TorchTrainer on optimizer actors goes on when processes are killed, with undisturbed bits."""

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
from rayzero.integrations.ray_train import optimizer_actors
from rayzero.store.shm.same_host import why_no_sharing

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.ray,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),  # Ray has some of its own
    pytest.mark.skipif(why_no_sharing() is not None, reason="no shared memory here"),
]

STEPS = 12
FROM_A_CHECKPOINT = [(0, 4)], [(0, 8)]  # Ray Train may not have the newest one yet when it ends the workers
Config = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def by_value() -> Iterator[None]:
    """The workers cannot import this file."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def kill_an_optimizer() -> None:
    """Kill the process of this Ray's newest optimizer actor. It is a fork server's child."""
    named = [one for one in psutil.process_iter(["cmdline"]) if "ray::OptimizerActor" in "".join(one.info["cmdline"])]
    found = [one for one in named if one.environ().get("RAY_RAYLET_PID") == os.environ["RAY_RAYLET_PID"]]
    max(found, key=psutil.Process.create_time).kill()


def kill_worker() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def break_down() -> None:
    raise ValueError("a batch that is broken")


Deed = Callable[[], None]


def loop(config: Config) -> None:
    """Train to STEPS. ``deeds``: (rank, step, whether before its commit, what happens there once)."""
    place = Path(config["place"])
    saved = train.get_checkpoint()
    resume = None if saved is None else saved.path
    with config["owners"].rank(resume=resume) as context:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)), nn.Linear(16, 1)
        )
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = rayzero.prepare(model, optimizer, ZeroConfig(stall_timeout=60.0))
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
            torch.manual_seed(1000 * step + context.rank)
            inputs = torch.randn(8, 16)
            (model(inputs) - inputs[:, :1]).square().mean().backward()
            reach(step, True)
            optimizer.step()
            reach(step, False)
            scheduler.step()
            optimizer.zero_grad()
            if step % 4 == 3:
                state = {} if config["tracks"] else {"scheduler": scheduler.state_dict()}
                path = rayzero.save_checkpoint(optimizer, place / f"step-{step + 1}", state).path
                train.report(
                    {"step": step + 1}, checkpoint=train.Checkpoint.from_directory(path) if not context.rank else None
                )
        weights = rayzero.full_state_dict(model)
        if context.rank == 0:
            save_file(weights, place / "weights.safetensors")


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


def same(ours: Path, theirs: Path) -> bool:
    mine, other = load_file(ours / "weights.safetensors"), load_file(theirs / "weights.safetensors")
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


def begun(place: Path) -> list[tuple[int, int]]:
    """(life, first step) of rank 0's lives."""
    found = sorted((path.stat().st_mtime_ns, path) for path in place.glob("began-0-*"))
    return [(int(path.name.split("-")[2]), int(path.read_text())) for _, path in found]


@pytest.fixture(scope="module")
def undisturbed(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("undisturbed") / "demo"
    fit(place)
    return place


def slabs() -> set[str]:
    """Those of Ray Train's runs; other tests run beside these."""
    return {path.name for path in Path("/dev/shm").glob("rayzero-ray-train-*")}


def test_killed_optimizers_and_workers_change_no_bit(undisturbed: Path, tmp_path: Path) -> None:
    before = slabs()
    place = tmp_path / "demo"
    fit(
        place,
        (0, 2, True, kill_an_optimizer),
        (1, 5, True, kill_worker),
        (0, 9, False, kill_worker),
        failures=2,
    )
    assert same(place, undisturbed)
    assert begun(place) == [(0, 0), (1, 5), (2, 9)]
    assert slabs() == before


def test_a_loop_that_tracks_nothing_restarts_from_the_checkpoint_it_passes(undisturbed: Path, tmp_path: Path) -> None:
    place = tmp_path / "demo"
    fit(place, (1, 10, True, kill_worker), tracks=False, failures=1)
    assert begun(place)[0] == (0, 0)
    assert begun(place)[1:] in FROM_A_CHECKPOINT
    assert same(place, undisturbed)


def test_an_exception_of_the_loop_restarts_it_from_the_checkpoint(undisturbed: Path, tmp_path: Path) -> None:
    place = tmp_path / "demo"
    fit(place, (1, 10, False, break_down), failures=1)
    assert begun(place)[0] == (0, 0)
    assert begun(place)[1:] in FROM_A_CHECKPOINT
    assert same(place, undisturbed)


def test_one_death_of_an_optimizer_too_many_ends_the_fit_by_name(local_ray: None, tmp_path: Path) -> None:
    place, before = tmp_path / "demo", slabs()
    deeds = [(0, step, True, kill_an_optimizer) for step in (2, 4)]
    with pytest.raises(Exception, match=r"optimizer \d died: .* one failure too many: the run has outlived 1 failure"):
        fit(place, *deeds, failures=1, max_failures=1)
    assert slabs() == before


def test_without_shared_memory_a_dead_optimizer_restarts_the_workers(undisturbed: Path, tmp_path: Path) -> None:
    place = tmp_path / "demo"
    fit(place, (0, 10, True, kill_an_optimizer), failures=1, config=ZeroConfig(transport="grpc"))
    assert begun(place)[0] == (0, 0)
    assert begun(place)[1:] in FROM_A_CHECKPOINT
    assert same(place, undisturbed)
