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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"member": "owner 1"}, "member is 'owner 1'; it must be like 'rank 1' or 'optimizer 0'"),
        ({"point": "owner.sleep"}, "point is 'owner.sleep'; it must be one of owner.start, "),
        ({"member": "rank 1"}, "a fault of rank 1 is at 'owner.collect', where no rank comes"),
        ({"act": "burn"}, "act at 'owner.collect' is 'burn'; it must be one of delay, duplicate, kill, raise, stop"),
        ({"point": "owner.norm", "act": "drop"}, "act at 'owner.norm' is 'drop'; it must be one of delay, kill, raise"),
        ({"point": "owner.adam", "act": "stop"}, "act at 'owner.adam' is 'stop'; it must be one of kill"),
        ({"nth": 0}, "nth 0, life None and seconds 0.3; nth counts from 1"),
        ({"method": "Finish"}, "a fault at 'owner.collect' has method 'Finish'; only calls have one"),
    ],
)
def test_what_does_not_exist_is_refused_in_one_line(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Fault(**({"member": "optimizer 1", "point": "owner.collect"} | wrong))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


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
