"""What holds for every test."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from unittest.mock import patch

import pytest
from hypothesis import settings
from tiers import mark_soak, mark_thorough

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the cores to the other parts
os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112 - Ray ends processes where others fill the machine
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - 15 is Ray's: its workers starve beside the other parts' tests

settings.register_profile("rayzero", settings(), deadline=None)  # a loaded machine is no failure
settings.register_profile("first tier", settings.get_profile("rayzero"), max_examples=15)
settings.load_profile("rayzero")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``scripts/soak tests`` runs what the mark ``soak`` keeps out of the other tiers."""
    parser.addoption("--soak", action="store_true", help="the tests with the mark soak, too")


def pytest_configure(config: pytest.Config) -> None:
    """Properties have fewer examples in the first tier, except where a test says how many."""
    if "not thorough" in config.getoption("markexpr"):
        settings.load_profile("first tier")


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of products are in the first tier with each value once. Those that share a Ray come last: one that nobody
    uses takes a twentieth of a core."""
    mark_soak(items)
    if not config.getoption("soak"):
        third = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=third)
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
    mark_thorough(items)
    items.sort(key=lambda item: isinstance(item, pytest.Function) and "local_ray" in item.fixturenames)


def pytest_collection_finish() -> None:
    """Processes that test files start begin with pytest, which they import too: 0.2 s each. And see ``_keep``: the
    thousands of collected tests, and what collecting them has imported."""
    if "rayzero.testing.rank_processes" in sys.modules:  # else no test here needs torch
        sys.modules["rayzero.testing.rank_processes"].PRELOADED.insert(0, "pytest")
    _keep()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """The same after each file: its tests may have imported a library, or a compiler."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        _keep()


def _keep() -> None:
    """Let no garbage collection look through what is there now again: code under test asks for collections, and each
    took 0.2-1 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_ray_without_the_mark(request: pytest.FixtureRequest) -> Iterator[None]:
    """Many of Ray's functions start a Ray where there is none: ten seconds, and the tests that come later join it."""
    began = "ray" not in sys.modules or not sys.modules["ray"].is_initialized()  # else tests with the mark share it
    yield
    ray = sys.modules.get("ray")
    if began and ray is not None and request.node.get_closest_marker("ray") is None and ray.is_initialized():
        ray.shutdown()
        pytest.fail("a test without the mark ray has started a Ray")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes in one thread: sums and products have other bits with other numbers of threads."""
    import torch  # not above: some tests do without

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One Ray for the tests of all folders, with more CPUs than the machine has: they are only counted."""
    import ray  # not above: it takes 1 s, which most tests do without
    from ray._private import services

    get_node, memory = services.get_node, 200 << 20

    def get_at_last(*asked: object) -> object:
        """What is known of a node once it has started. Ray gives up after 30 s, however busy the machine is."""
        until = time.monotonic() + 100
        while True:
            try:
                return get_node(*asked)
            except RuntimeError:
                if time.monotonic() > until:
                    raise
            time.sleep(0.1)

    with patch.object(services, "get_node", get_at_last):
        ray.init("local", num_cpus=8, include_dashboard=False, logging_level="ERROR", object_store_memory=memory)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def forked_with_trainers() -> None:
    """Each process would import what the integrations do, which takes 4 s."""
    modules = ["lightning", "rayzero.integrations.transformers", "rayzero.integrations.lightning"]
    _fork_with(*modules, "transformers.models.gpt2.modeling_gpt2")


@pytest.fixture(scope="session")
def forked_with_compiler() -> None:
    """Each process would import it with the first step of one of torch's optimizers, which takes 2 s."""
    _fork_with("torch._dynamo")


def _fork_with(*modules: str) -> None:
    """Start the server anew that forks the processes of ranks, with these imported."""
    from rayzero.testing.rank_processes import PRELOADED  # not above: it imports torch, which many tests do without

    forkserver._forkserver._stop()  # the one that runs has imported something else
    *ours, last = PRELOADED
    multiprocessing.set_forkserver_preload([*ours, *modules, last])
    forkserver.ensure_running()
