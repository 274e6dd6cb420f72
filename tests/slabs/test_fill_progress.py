"""What is said while slabs are made."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rayzero.slabs.header import SlabFacts, lay_out_slab
from rayzero.slabs.slab import FillProgress, create_slabs

GIB = 1 << 30


def said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, times: list[float], done: list[int]
) -> list[str]:
    ticks = iter([0.0, *times])
    monkeypatch.setattr("rayzero.slabs.slab.monotonic", lambda: next(ticks))
    progress = FillProgress("rank 3")
    with caplog.at_level(logging.INFO, "rayzero"):
        for size in done:
            progress(size, 16 * GIB)
    return [record.message for record in caplog.records]


def test_what_takes_less_than_a_second_is_not_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said(caplog, monkeypatch, [0.5, 0.9], [8 * GIB, 16 * GIB]) == []


def test_what_takes_longer_is_told_with_its_speed_now_and_then_and_at_its_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said(caplog, monkeypatch, [0.5, 2.0, 3.0, 7.0, 8.0], [GIB, 4 * GIB, 6 * GIB, 14 * GIB, 16 * GIB]) == [
        "rank 3 has made 4 GiB of 16 GiB of shared memory, 2.1 GB/s",
        "rank 3 has made 14 GiB of 16 GiB of shared memory, 2.1 GB/s",
        "rank 3 has made 16 GiB of 16 GiB of shared memory, 2.1 GB/s",
    ]


def test_the_making_of_slabs_reports_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = SlabFacts(run="r", role="grads", index=0, incarnation=1, layout_digest="d", kernel="k")
    seconds = iter(range(0, 100, 2))
    monkeypatch.setattr("rayzero.slabs.slab.monotonic", lambda: float(next(seconds)))
    with caplog.at_level(logging.INFO, "rayzero"):
        (slab,) = create_slabs(
            [lay_out_slab(facts, [("data", 4096, 0)])],
            tmp_path,
            on_progress=FillProgress("optimizer 1"),
        )
    slab.close()
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "optimizer 1 has made 8 KiB of 8 KiB of shared memory"
    ]
