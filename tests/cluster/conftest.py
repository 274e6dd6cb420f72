"""What the tests on a real Ray share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rayzero.cluster.driver import ZeroTrainer
from rayzero.config import RunConfig, ScalingConfig, ZeroConfig
from tests.support.waiting import until

from .compared_run import Undisturbed, train_undisturbed
from .processes import end_scripts, is_called, left_in_shared_memory, shared_memory


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """What a run comes to that nothing disturbs."""
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def trainer(local_ray: None, tmp_path: Path) -> Callable[..., ZeroTrainer]:
    """``trainer(loop, config, ...)``: a trainer of two ranks and two optimizers that writes under tmp_path."""

    def make(loop: Callable[..., Any], config: Any = None, **settings: Any) -> ZeroTrainer:
        scaling = {"num_workers": 2, "num_optimizers": 2, "threads_per_worker": 1, "threads_per_optimizer": 1}
        return ZeroTrainer(
            loop,
            train_loop_config=config,
            zero_config=settings.pop("zero_config", ZeroConfig(stall_timeout=60.0)),
            scaling_config=ScalingConfig(**scaling | settings.pop("scaling", {})),
            run_config=RunConfig(name="demo", storage_path=str(tmp_path), **settings.pop("run", {})),
            **settings,
        )

    return make


@pytest.fixture
def ray_files() -> Iterator[Path]:
    """A temporary folder for a Ray; short, because sockets have their path there."""
    with tempfile.TemporaryDirectory(prefix="rz", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def _no_script_goes_on() -> Iterator[None]:
    """A failed test's script would train on beside all tests after it."""
    yield
    end_scripts()


def ray_processes() -> list[str]:
    """What the workers of this process's Ray are busy with: the names of their actors, "IDLE" for none."""
    raylets = [str(process.pid) for process in filter(is_called("raylet"), psutil.Process().children())]
    names = []
    for process in psutil.process_iter():  # a fork server's children are not below the raylet
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it ended meanwhile
            if process.environ().get("RAY_RAYLET_PID") in raylets:
                names.append(" ".join(process.cmdline()))
    return [name.removeprefix("ray::").split(".")[0].strip() for name in names if name.startswith("ray::")]


@pytest.fixture
def nothing_left(local_ray: None) -> Iterator[None]:
    """After the test, Ray knows no actor and holds no CPU of the run, and /dev/shm is as before."""
    shm = shared_memory()
    yield
    until(lambda: ray.util.list_named_actors(all_namespaces=True) == [], what="Ray knows actors")
    ours = {"RankWorker", "OptimizerActor", "Coordinator"}
    until(lambda: ours.isdisjoint(ray_processes()), what="Ray holds CPUs of the run")
    assert left_in_shared_memory(shm) == set()
