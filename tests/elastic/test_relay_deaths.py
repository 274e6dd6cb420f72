"""Ranks that fetch for each other die, stop and come back, owners come and go, and no bit changes."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine.models import seeded

from rayzero import ZeroConfig
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.store.shm.same_host import why_no_sharing
from rayzero.testing import run_ranks
from tests.support.faults import Fault

from .disturbed import OWNERS_ELSEWHERE, Disturbed, another_host, differences
from .test_scaling_cases import UNITS, Small, Training, assert_same

pytestmark = [
    pytest.mark.skipif(why_no_sharing() is not None, reason="no shared memory here"),
]

_ATTEMPTS = 4  # until the rank that is to die has been the first to need a part

DEATHS = {
    "with a claim and nothing asked for": (Fault("rank 0", "rank.claim", nth=2),),
    "the maker with its first claim": (Fault("rank 0", "rank.claim"), Fault("rank 1", "rank.claim")),
    "with half of a shard": (Fault("rank 1", "rank.receive", nth=2),),
    "with all of it and nothing said": (Fault("rank 0", "rank.brought", nth=2),),
    "both, in the middle": (Fault("rank 0", "rank.receive", nth=2), Fault("rank 1", "rank.brought", nth=2)),
    "and again in its next life": (
        Fault("rank 1", "rank.brought", nth=2, life=0),
        Fault("rank 1", "rank.claim", life=1),
    ),
    "around a write": (Fault("rank 0", "rank.write"), Fault("rank 1", "rank.write-asked")),
    "stopped with a claim": (Fault("rank 0", "rank.claim", "stop", nth=2),),
    "an owner under a fetch": (Fault("optimizer 1", "owner.between-shards", nth=3),),
    "the lead and a fetcher": (Fault("optimizer 0", "lead.after-record", nth=2), Fault("rank 1", "rank.claim", nth=2)),
}


@pytest.mark.spread(1, second=5)
@pytest.mark.parametrize("faults", DEATHS.values(), ids=DEATHS)
def test_a_death_among_ranks_that_fetch_for_each_other_changes_no_bit(
    faults: tuple[Fault, ...], expected: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with another_host(*OWNERS_ELSEWHERE) as hosts:
        for attempt in range(_ATTEMPTS):
            caplog.clear()
            folder = tmp_path / str(attempt)
            folder.mkdir()
            disturbed = Disturbed(folder, *faults, hosts=hosts, stall_timeout=20.0)
            assert differences(disturbed.results(), expected) == []
            if disturbed.all_struck:
                break
        disturbed.check(caplog.messages)


CASES: dict[str, dict[str, Any]] = {
    "fp32": {"config": ZeroConfig(units=UNITS)},
    "bf16, units fetched for every use": {
        "config": ZeroConfig(units=UNITS, precision="bf16", gpu_param_memory_budget="96KiB")
    },
    "a frozen base, lossless": {
        "config": ZeroConfig(units=UNITS, precision="bf16", cpu_compression="lossless"),
        "frozen": ("embed", "layers.0"),
    },
    "two models": {"config": ZeroConfig(units=UNITS), "models": 2},
}


@pytest.mark.spread(1, second=6)
@pytest.mark.parametrize(
    "there",
    [
        ("optimizer 0", "optimizer 1", "optimizer 2"),
        ("optimizer 1", "optimizer 2", "optimizer 3"),
        ("optimizer 0 in life 1", "optimizer 1"),
    ],
    ids=["all elsewhere", "some elsewhere", "and one that moves there"],
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_owners_elsewhere_come_and_go_while_ranks_fetch_for_each_other(
    case: dict[str, Any], there: tuple[str, ...], tmp_path: Path
) -> None:
    loop = Training(base=seeded(Small, 3), folder=tmp_path, wanted={2: 4, 5: 1, 8: 3}, **case)
    plain = partial(Training, base=seeded(Small, 3), folder=tmp_path, wanted={}, **case)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-host-") as other:
        hosts = dict.fromkeys(there, Path(other))
        found = run_ranks(loop, 2, 2, "shm", True, max_failures=1, run_dir=tmp_path, stall_timeout=30.0, hosts=hosts)
    assert_same(found, run_ranks(plain(), 2, 2))
