"""What every benchmark says beside its figures."""

from __future__ import annotations

import os
import subprocess
import sys

from lab.bench.figures import Busy, Spread, about, resident_bytes


def test_a_spread_is_median_least_and_most():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([0.5]).text(100, 0) == "50 (50-50)"


HOLDER = """
import mmap, sys
held = mmap.mmap(-1, 64 << 20)
print(flush=True)
sys.stdin.readline()
for at in range(0, len(held), mmap.PAGESIZE):
    held[at] = 1
print(flush=True)
sys.stdin.readline()
"""


def test_resident_bytes_count_what_was_written():
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        before = resident_bytes(other.pid)
        other.stdin.write(b"\n")
        other.stdin.flush()
        other.stdout.readline()
        assert (64 << 20) <= resident_bytes(other.pid) - before < (66 << 20)
        other.stdin.write(b"\n")
        other.stdin.flush()


def test_own_work_is_not_counted_as_others():
    before = Busy(at=0.0, machine=10.0, ours=4.0)
    cpus = os.cpu_count()
    assert Busy(at=10.0, machine=10.0 + 5 * cpus, ours=4.0 + 5 * cpus).others_since(before) == 0.0
    assert Busy(at=10.0, machine=10.0 + 5 * cpus, ours=4.0).others_since(before) == 0.5


def test_the_machine_is_named():
    assert {"date", "processor", "cpus", "load", "torch", "rayzero"} <= about().keys()
