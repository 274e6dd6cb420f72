"""An owner that dies gets a successor while the ranks wait, and the run ends with the bits of one without deaths."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.context import RankContext
from rayzero.errors import RunFailedError
from rayzero.slabs.sweep import list_slabs
from rayzero.testing import run_ranks
from tests.support import needs

from .test_comeback import AT, base, loop, run, same

pytestmark = [
    pytest.mark.thorough,
    needs.shared_memory,
]

Death = tuple[str, int, str]  # at a point of rank 1's loop, in a step: who dies ("rank 1", "optimizer 0")


def owner_pid(run: str, owner: int) -> int:
    """The process that has the control slab of an owner."""
    headers = [slab.header for slab in list_slabs() if slab.header is not None and slab.alive]
    facts = [(header.pid, header.facts) for header in headers if header.facts.run == run]
    (pid,) = {pid for pid, f in facts if (f.role, f.index) == ("control", owner) and f.kernel != "rank"}
    return pid


def name_of(death: Death) -> str:
    return "-".join(map(str, death))


@dataclass(frozen=True)
class Deaths:
    """Kills processes as rank 1 comes to points of its loop; each kill happens once."""

    at: tuple[Death, ...]
    folder: Path  # where it notes what has happened, for rank 1's next life
    how: int = signal.SIGKILL

    def __call__(self, context: RankContext) -> Callable[[str, int], None]:
        def fault(point: str, step: int) -> None:
            for death in self.at:
                if context.rank == 1 and death[:2] == (point, step):
                    self.kill(context, death)

        return fault

    def kill(self, context: RankContext, death: Death) -> None:
        done = self.folder / name_of(death)
        if done.exists():
            return
        done.touch()
        kind, _, index = death[2].partition(" ")
        os.kill(os.getpid() if kind == "rank" else owner_pid(context.run, int(index)), self.how)


def train(
    folder: Path,
    *at: Death,
    how: int = signal.SIGKILL,
    failures: int | None = None,
    owners: int = 2,
    stall_timeout: float = 30.0,
) -> Any:
    folder.mkdir(exist_ok=True)
    one = functools.partial(loop, base=base(), folder=folder, faults=Deaths(at, folder, how))
    allowed = len(at) if failures is None else failures
    found = run_ranks(one, 2, owners, "shm", True, stall_timeout=stall_timeout, max_failures=allowed)
    assert all((folder / name_of(death)).exists() for death in at), "every death was died"
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("plain"))


EACH = [
    (("forward", 1, "optimizer 0"), ("clipped", 2, "optimizer 1"), ("mean", 3, "optimizer 0")),
    (("backward", 1, "optimizer 1"), ("pushed", 2, "optimizer 0"), ("finished", 3, "optimizer 1")),
    (("pushes", 1, "optimizer 0"), ("norm", 2, "optimizer 0"), ("stepped", 3, "optimizer 0")),
    (("fetch", 1, "optimizer 1"), ("finish", 2, "optimizer 0"), ("writing", 2, "optimizer 1")),
]


@pytest.mark.parametrize("at", EACH, ids=range(len(EACH)))
def test_ranks_wait_for_the_successor(at: tuple[Death, ...], undisturbed: Any, tmp_path: Path) -> None:
    assert same(train(tmp_path / "run", *at), undisturbed)


def test_an_only_owner_is_replaced(undisturbed: Any, tmp_path: Path) -> None:
    assert same(train(tmp_path / "run", ("pushed", AT, "optimizer 0"), owners=1), undisturbed)


def test_two_may_die_at_once(undisturbed: Any, tmp_path: Path) -> None:
    both = ("pushed", AT, "optimizer 0"), ("pushed", AT, "optimizer 1")
    assert same(train(tmp_path / "owners", *both), undisturbed)
    mixed = ("finished", AT, "optimizer 0"), ("finished", AT, "rank 1")
    assert same(train(tmp_path / "mixed", *mixed), undisturbed)


def test_a_process_that_is_stopped_for_too_long_is_killed_and_replaced(undisturbed: Any, tmp_path: Path) -> None:
    at = ("pushed", 1, "optimizer 1"), ("forward", AT, "rank 1")
    began = time.monotonic()
    assert same(train(tmp_path / "run", *at, how=signal.SIGSTOP, stall_timeout=6.0), undisturbed)
    assert time.monotonic() - began > 4.0, "each was waited for"


def test_a_run_without_failures_left_names_who_died(tmp_path: Path) -> None:
    at = ("pushed", 1, "optimizer 1"), ("pushed", 2, "optimizer 0")
    with pytest.raises(RunFailedError, match="process of optimizer 0 died: it was one failure too many: the run has"):
        train(tmp_path / "one", *at, failures=1)
