"""Message buffers that stay: each in a process of its own, because the setting is the process's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import rayzero.engine as engine
from rayzero.testing import run_ranks

FAULTS = """
import resource

def faults(size, count):
    for _ in range(3):  # what is kept is kept from the first round on
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            [b"x" * size for _ in range(count)]
        found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return found
"""
ONE_LARGE = (40 << 20, 1)  # more than the allocator would keep by itself
SOME_MESSAGES = (2 << 20, 4)  # as many as are on their way at a time


def said_by(program: str, **env: str) -> list[str]:
    """What another process prints."""
    lines = [sys.executable, "-c", FAULTS + program]
    return subprocess.run(lines, capture_output=True, text=True, check=True, env=os.environ | env).stdout.split()


@pytest.mark.parametrize(("keep", "sizes"), [("keep_message_buffers", ONE_LARGE), ("keep_some_buffers", SOME_MESSAGES)])
def test_freed_buffers_are_used_again_without_page_faults(keep: str, sizes: tuple[int, int]) -> None:
    program = f"from rayzero.memory.malloc import {keep}\nprint(faults{sizes}, {keep}(), faults{sizes})"
    before, done, after = said_by(program)
    if done == "False":
        pytest.skip("no glibc")
    assert int(after) < 1000 < int(before)


@pytest.mark.parametrize(
    "setting", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}]
)
def test_the_users_own_thresholds_stay(setting: dict[str, str]) -> None:
    program = f"from rayzero.memory.malloc import keep_some_buffers\nprint(keep_some_buffers(), faults{SOME_MESSAGES})"
    done, after = said_by(program, **setting)
    assert done == "False"
    assert int(after) > 1000


def attached(ctx: engine.RankContext) -> int:
    """Page faults of a rank that has met its owners."""
    model = torch.nn.Linear(4, 4)
    engine.prepare(model, torch.optim.AdamW(model.parameters()))
    space: dict[str, int] = {}
    exec(f"{FAULTS}\nfound = faults{SOME_MESSAGES}", space)
    return space["found"]


def test_ranks_keep_the_buffers_of_messages_where_there_are_any() -> None:
    (messages,) = run_ranks(attached, 1, 1, "grpc", processes=True)
    (shared,) = run_ranks(attached, 1, 1, "shm", processes=True)
    assert messages < 1000 < shared
