"""A run that the OOM killer ends without a strategy lives with one: in a real memory cgroup, where one can be made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab.campaigns.strategies import memory_group

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[3]


@pytest.fixture
def can_limit() -> None:
    """Skip by name where this process may make no memory cgroup."""
    try:
        with memory_group(1 << 30):
            pass
    except OSError as exc:
        pytest.skip(f"no memory cgroup can be made here: {exc}")


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("can_limit")
def test_a_run_that_dies_of_its_memory_lives_with_a_strategy_and_has_the_same_weights() -> None:
    command = [sys.executable, "-m", "lab", "strategies", "--strategies", "off", "balanced", "--json"]
    done = subprocess.run([*command, "--steps", "70"], cwd=ROOT, capture_output=True, text=True, check=True)
    free, off, balanced = json.loads(done.stdout)
    assert (free["killed"], off["killed"], balanced["killed"]) == (False, True, False), done.stderr
    assert (off["kills"], off["digest"], off["actions"]) == (1, None, [])
    assert balanced["kills"] == 0
    assert balanced["digest"] == free["digest"] is not None
    assert sum(action["bytes"] for action in balanced["actions"]) > 100 << 20
    assert max(used for _, used in off["used"]) > 0.9 * off["limit"] > max(used for _, used in balanced["used"])
