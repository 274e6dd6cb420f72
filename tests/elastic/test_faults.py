"""Named faults: what is refused, where they lie, and that each strikes once and only where it was asked for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from rayzero.config import ZeroConfig
from rayzero.elastic.members import MemberId, MemberKind
from rayzero.errors import ConfigError
from rayzero.owner.service import ShardService
from rayzero.testing import run_ranks
from tests.support.faults import POINTS, Fault, FaultError, Faults, find

OWNER = MemberId(MemberKind.OWNER, 1)
COLLECT = Fault("optimizer 1", "owner.collect", "raise", 2)


@pytest.fixture
def collect(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ``ShardService.collect`` was called with, while it does nothing else."""
    calls: list[str] = []
    monkeypatch.setattr(ShardService, "collect", lambda service, what: calls.append(what) or what)
    return calls


def ask(what: str) -> Any:
    return ShardService.collect(None, what)  # type: ignore[call-arg,arg-type]


@pytest.mark.parametrize("point", POINTS)
def test_a_point_is_a_function_of_the_package(point: str) -> None:
    holder, name = find(POINTS[point])
    assert callable(getattr(holder, name))


def test_a_run_refuses_faults_of_members_that_are_no_processes_of_it(tmp_path: Path) -> None:
    faults = Faults(tmp_path, (COLLECT,))
    with pytest.raises(ConfigError, match="faults strike processes; pass processes=True"):
        run_ranks(print, faults=faults)
    for max_failures in (0, 1):
        with pytest.raises(ConfigError, match=r"member is 'optimizer 1'; the run has 1 optimizer$"):
            run_ranks(print, 2, 1, "grpc", True, max_failures=max_failures, faults=faults)
    beside_ranks = ZeroConfig(offload_fraction=0.5)  # owners that have another name
    with pytest.raises(ConfigError, match=r"member is 'optimizer 1'; the run has 1 optimizer$"):
        run_ranks(print, 2, 1, "grpc", True, config=beside_ranks, max_failures=1, faults=faults)


def test_a_fault_strikes_the_nth_time_and_never_again_in_any_life(collect: list[str], tmp_path: Path) -> None:
    faults = Faults(tmp_path, (COLLECT,))
    faults.arm(OWNER, 0)
    assert ask("first") == "first"
    assert faults.struck(0) is None
    with pytest.raises(FaultError, match=r"optimizer 1 owner\.collect raise, as a test asked for"):
        ask("second")
    struck = faults.struck(0)
    assert struck is not None
    assert struck.life == 0
    assert struck.at <= time.monotonic()
    faults.arm(OWNER, 1)
    assert [ask(what) for what in ("third", "fourth", "fifth")] == ["third", "fourth", "fifth"]
    assert collect == ["first", "third", "fourth", "fifth"]


def test_a_call_may_be_made_twice_or_late(collect: list[str], tmp_path: Path) -> None:
    twice = Fault("optimizer 1", "owner.collect", "duplicate", 2)
    late = Fault("optimizer 1", "owner.collect", "delay", 1, seconds=0.05)
    Faults(tmp_path, (twice, late)).arm(OWNER, 0)
    began = time.monotonic()
    assert ask("first") == "first"
    assert time.monotonic() - began >= 0.05
    assert ask("second") == "second"
    assert collect == ["first", "second", "second"]
