"""One rank asks the lead, and hears owners, for all of its host; it dies, hangs and comes back, so do the lead and the
others, owners come and go, and no bit changes."""

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
    pytest.mark.thorough,
    pytest.mark.skipif(why_no_sharing() is not None, reason="no shared memory here"),
]

DEATHS = {
    "the voice with a question of another rank": (Fault("rank 0", "rank.voice-takes", nth=4),),
    "the voice with answers that it has not passed on": (Fault("rank 0", "rank.voice-answers", nth=3),),
    "the voice stopped before it asks": (Fault("rank 0", "rank.voice-asks", "stop", nth=3),),
    "the voice with publications that it has not passed on": (Fault("rank 0", "rank.voice-passes-on", nth=9),),
    "the lead with an answer, and a rank": (
        Fault("optimizer 0", "lead.norm", nth=2),
        Fault("rank 1", "rank.finished", nth=3),
    ),
}


@pytest.mark.parametrize("faults", DEATHS.values(), ids=DEATHS)
def test_a_death_around_a_voice_changes_no_bit(
    faults: tuple[Fault, ...], expected: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with another_host(*OWNERS_ELSEWHERE) as hosts:
        config = ZeroConfig(host_voice="always")
        disturbed = Disturbed(tmp_path, *faults, hosts=hosts, stall_timeout=20.0, tls=True, config=config)
        assert differences(disturbed.results(), expected) == []
        disturbed.check(caplog.messages)


def test_owners_come_and_go_while_a_voice_asks_the_lead(tmp_path: Path) -> None:
    config, there = ZeroConfig(units=UNITS, host_voice="always"), ("optimizer 0", "optimizer 1", "optimizer 2")
    loop = Training(base=seeded(Small, 3), folder=tmp_path, wanted={2: 3, 5: 1}, config=config)
    plain = partial(Training, base=seeded(Small, 3), folder=tmp_path, wanted={}, config=config)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-host-") as other:
        hosts = dict.fromkeys(there, Path(other))
        found = run_ranks(
            loop, 2, 2, "shm", True, max_failures=1, run_dir=tmp_path, stall_timeout=30.0, hosts=hosts, config=config
        )
    assert_same(found, run_ranks(plain(), 2, 2))
