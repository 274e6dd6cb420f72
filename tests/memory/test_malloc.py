"""Message buffers that stay: each in a process of its own, because the setting is the process's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import rayzero.engine as engine
from rayzero.memory.process_memory import heap_use
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
SOME_MESSAGES = (2 << 20, 4)  # as many as are on their way at a time


def said_by(program: str, **env: str) -> list[str]:
    """What another process prints."""
    lines = [sys.executable, "-c", FAULTS + program]
    return subprocess.run(lines, capture_output=True, text=True, check=True, env=os.environ | env).stdout.split()


@pytest.mark.parametrize(
    ("buffers", "call"),
    [(SOME_MESSAGES, "keep()"), ((16 << 20, 3), "keep(alone=True)")],
    ids=["messages", "a lone rank"],
)
def test_freed_buffers_are_used_again_without_page_faults(buffers: tuple[int, int], call: str) -> None:
    program = "from rayzero.memory.process_memory import keep_some_buffers as keep\n"
    program += f"import ctypes; ctypes.CDLL(None).mallopt(-3, 1 << 20)\nprint(faults{buffers}, {call}, faults{buffers})"
    before, done, after = said_by(program)
    if done == "False":
        pytest.skip("no glibc")
    assert int(after) < 1000 < int(before)


def test_one_of_several_ranks_gives_large_buffers_back() -> None:
    program = "from rayzero.memory.process_memory import keep_some_buffers as keep\n"
    program += f"print(keep(), faults{(16 << 20, 3)})"
    done, faults = said_by(program)
    if done == "False":
        pytest.skip("no glibc")
    assert int(faults) > 1000


@pytest.mark.parametrize(
    "setting", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}]
)
def test_the_users_own_thresholds_stay(setting: dict[str, str]) -> None:
    program = "from rayzero.memory.process_memory import keep_some_buffers as keep\n"
    program += f"print(keep(), faults{SOME_MESSAGES})"
    done, after = said_by(program, **setting)
    assert done == "False"
    assert int(after) > 1000


def kept_by_a_rank(ctx: engine.RankContext) -> float:
    """Freed bytes that its heap keeps after a few steps, over the bytes of a gradient."""
    width, layers = 2048, 8
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
    model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = heap_use()
    assert found is not None
    return found.free / (4 * width**2)


def test_a_rank_keeps_neither_its_constructors_memory_nor_gradients() -> None:
    """glibc's own thresholds keep several of each: their holes do not fit the next ones. (A lone rank keeps those.)"""
    kept = run_ranks(kept_by_a_rank, 2, 1, "shm", processes=True)
    assert max(kept) < 2
