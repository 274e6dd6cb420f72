"""Message buffers that stay: a process of its own, because the setting is the process's."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource
from rayzero.memory.malloc import keep_message_buffers

def faults():
    for _ in range(3):  # what is kept is kept from the first round on
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            b"x" * (40 << 20)  # more than the allocator would keep by itself
        found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return found

before = faults()
print(keep_message_buffers(), before, faults())
"""


def test_freed_buffers_are_used_again_without_page_faults() -> None:
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.split()
    if said[0] == "False":
        pytest.skip("no glibc")
    before, after = int(said[1]), int(said[2])
    assert after < 1000 < before
