"""What every benchmark says beside its figures."""

from __future__ import annotations

import mmap
import os

from rayzero.bench.figures import Busy, Spread, about, plain, resident_bytes


def test_a_spread_is_median_least_and_most():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([0.5]).text(100, 0) == "50 (50-50)"


def test_plain_values_go_into_json():
    assert plain({"a": [Spread(1.0, 0.0, 2.0)]}) == {"a": [{"median": 1.0, "least": 0.0, "most": 2.0}]}


def test_resident_bytes_count_what_was_written():
    size = 64 << 20
    before = resident_bytes(os.getpid())
    with mmap.mmap(-1, size) as held:
        held.write(bytes(size))
        assert resident_bytes(os.getpid()) - before > 0.9 * size


def test_own_work_is_not_counted_as_others():
    before = Busy(at=0.0, machine=10.0, ours=4.0)
    cpus = os.cpu_count()
    assert Busy(at=10.0, machine=10.0 + 5 * cpus, ours=4.0 + 5 * cpus).others_since(before) == 0.0
    assert Busy(at=10.0, machine=10.0 + 5 * cpus, ours=4.0).others_since(before) == 0.5


def test_the_machine_is_named():
    assert {"date", "processor", "cpus", "load", "torch", "rayzero"} <= about().keys()
