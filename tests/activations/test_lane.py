"""The lane of threads."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from rayzero.activations.copy_lane import Parcel, Resident, ThreadLane
from rayzero.activations.tensors.codec import codec_for
from rayzero.errors import RayZeroError

RAW = codec_for("none", torch.uint8)


def parcel(nbytes: int) -> Parcel:
    return Parcel(torch.full((nbytes,), 255, dtype=torch.uint8), RAW, torch.uint8)


def test_a_copy_in_waits_for_its_copy_out():
    go = threading.Event()
    lane = ThreadLane(before_copy=lambda direction, label: direction == "out" and go.wait(10) and None)
    cleared: list[int] = []
    data, there, target = torch.arange(100, dtype=torch.uint8), parcel(100), torch.zeros(100, dtype=torch.uint8)
    out = lane.copy_out(Resident(data, cleared.append), there, take=100, keep=False)
    back = lane.copy_in(there, target, after=out)
    assert not back.finished()
    go.set()
    back.wait()
    assert torch.equal(target, data)
    assert cleared == [100]
    lane.close()


def test_a_held_source_stays_and_a_dropped_one_is_not_copied():
    go = threading.Event()
    lane = ThreadLane(before_copy=lambda direction, label: go.wait(10) and None)
    cleared: list[int] = []
    held = Resident(torch.zeros(10, dtype=torch.uint8), cleared.append)
    dropped = Resident(torch.zeros(20, dtype=torch.uint8), cleared.append)
    first, second = parcel(10), parcel(20)
    tickets = [lane.copy_out(held, first, take=10, keep=False), lane.copy_out(dropped, second, take=20, keep=False)]
    assert held.hold()
    lane.drop_out(dropped, tickets[1])
    go.set()
    for ticket in tickets:
        ticket.wait()
    assert held.bytes is not None
    assert not dropped.hold()
    assert cleared == [20]
    assert second.host.eq(255).all()
    lane.drop_out(held, tickets[0])
    assert cleared == [20, 10]
    assert [span.nbytes for span in lane.spans()] == [10], "what is not copied says nothing of the link's speed"
    lane.close()


def test_a_failed_copy_is_raised_by_wait_and_keeps_its_source():
    def fail(direction: str, label: str) -> None:
        raise OSError("cable")

    lane = ThreadLane(before_copy=fail)
    source = Resident(torch.zeros(10, dtype=torch.uint8), lambda nbytes: None)
    ticket = lane.copy_out(source, parcel(10), take=10, keep=True)
    with pytest.raises(RayZeroError, match="cable"):
        ticket.wait()
    lane.let_go(source, ticket)
    assert ticket.failed()
    assert source.bytes is not None
    lane.close()


def test_after_close_copies_run_in_the_caller():
    lane = ThreadLane()
    lane.close()
    there = parcel(10)
    ticket = lane.copy_out(Resident(torch.ones(10, dtype=torch.uint8), lambda n: None), there, take=10, keep=False)
    assert ticket.finished()
    assert there.host.eq(1).all()


def test_a_program_that_ends_during_copies_ends_well():
    """Such a thread, in torch's C++ when the interpreter goes, ended the process: "terminate called", status 134."""
    program = """
        import threading, torch
        from rayzero.activations.tensors.codec import codec_for
        from rayzero.activations.copy_lane import Parcel, Resident, ThreadLane

        began = threading.Event()
        lane = ThreadLane(before_copy=lambda direction, label: began.set())
        size = 100_000_000
        values = torch.ones(size, dtype=torch.uint8)
        there = Parcel(torch.zeros(size, dtype=torch.uint8), codec_for("none", torch.uint8), torch.uint8)
        for _ in range(20):
            lane.copy_out(Resident(values, lambda count: None), there, take=size, keep=True)
        began.wait()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
