"""What a simulated device finds: copies that nothing orders, memory freed too early; and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from tests.support import simulated_autograd
from tests.support.happens_before import HappensBefore, RaceError
from tests.support.simulated_copy import FreedError
from tests.support.simulated_lane import SimulatedEvent, SimulatedLane

SEEDS = range(30)


def memory() -> tuple[Tensor, Tensor]:
    """On the device, and on the host."""
    return torch.arange(5000.0), torch.zeros(5000)


def waits_for_the_copy_out(lane: SimulatedLane, device: Tensor, host: Tensor) -> None:
    lane.issue("out", lambda: host.copy_(device, non_blocking=True)).wait()
    device.fill_(-1.0)


def overwrites_what_goes_out(lane: SimulatedLane, device: Tensor, host: Tensor) -> None:
    lane.issue("out", lambda: host.copy_(device, non_blocking=True))
    device.fill_(-1.0)


def uses_what_comes_in(lane: SimulatedLane, device: Tensor, host: Tensor) -> None:
    lane.issue("in", lambda: device.copy_(host, non_blocking=True))
    device.add_(1.0)


def sends_before_it_is_computed(lane: SimulatedLane, device: Tensor, host: Tensor) -> None:
    before = lane.now()
    device.add_(1.0)
    lane.issue("out", lambda: host.copy_(device, non_blocking=True), after=[before])


def brings_what_is_still_leaving(lane: SimulatedLane, device: Tensor, host: Tensor) -> None:
    back = torch.empty_like(device)
    lane.issue("out", lambda: host.copy_(device, non_blocking=True))
    lane.issue("in", lambda: back.copy_(host, non_blocking=True), holds=[back])


def reads_the_host_too_early(lane: SimulatedLane, device: Tensor, host: Tensor) -> None:
    lane.issue("out", lambda: host.copy_(device, non_blocking=True))
    host.sum()


def asks_and_is_told_that_it_is_over(lane: SimulatedLane, device: Tensor, host: Tensor) -> None:
    out = lane.issue("out", lambda: host.copy_(device, non_blocking=True))
    while not out.finished():
        lane.drain("out")
    device.fill_(-1.0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "wrong",
    [
        overwrites_what_goes_out,
        uses_what_comes_in,
        sends_before_it_is_computed,
        brings_what_is_still_leaving,
        reads_the_host_too_early,
    ],
)
def test_accesses_that_nothing_orders_are_found_with_every_seed(
    wrong: Callable[[SimulatedLane, Tensor, Tensor], None], seed: int
) -> None:
    lane = SimulatedLane(seed)
    with pytest.raises(RaceError, match=r"is not ordered after .* both use bytes 0 to 20000"), lane.watching():
        wrong(lane, *memory())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("right", [waits_for_the_copy_out, asks_and_is_told_that_it_is_over])
def test_what_is_ordered_is_let_pass(right: Callable[[SimulatedLane, Tensor, Tensor], None], seed: int) -> None:
    lane, (device, host) = SimulatedLane(seed), memory()
    with lane.watching():
        right(lane, device, host)
    assert torch.equal(host, torch.arange(5000.0))


@pytest.mark.parametrize("held", [True, False])
def test_device_memory_that_nobody_holds_is_gone_when_its_copy_runs(held: bool) -> None:
    lane, (device, host) = SimulatedLane(0), memory()
    memories = [device]
    del device
    copy = lambda device=memories[0]: host.copy_(device)  # noqa: E731
    lane.issue("out", copy, holds=memories if held else [], label="unit 3")
    memories = copy = None  # type: ignore[assignment]
    if held:
        lane.drain("out")
        assert torch.equal(host, torch.arange(5000.0))
    else:
        with pytest.raises(FreedError, match=r"copy 'unit 3' .out. uses torch.float32 .5000,. on the device"):
            lane.drain("out")


def test_a_copy_of_several_operations_makes_all_of_them_later() -> None:
    lane, (device, host) = SimulatedLane(0), memory()
    part = torch.zeros(100, dtype=torch.bfloat16)

    def copy() -> None:
        narrow = device[100:200].to(torch.bfloat16)
        part.copy_(narrow * 2)
        torch._foreach_copy_([host[:50], host[50:100]], [device[:50], device[50:100]])

    out = lane.issue("out", copy, holds=[device])
    assert part.sum() == host.sum() == 0
    assert not out.finished()
    out.wait()
    assert torch.equal(part, (device[100:200].bfloat16() * 2))
    assert torch.equal(host[:100], device[:100])


def test_ranges_of_one_storage_are_told_apart() -> None:
    orders, flat = HappensBefore(), torch.zeros(100)
    orders.access("in", flat[:50], writes=True, what="the first half")
    orders.access("compute", flat[50:], writes=True, what="the second half")
    orders.access("compute", flat[60:70], writes=False, what="a part")
    with pytest.raises(RaceError, match="a row on stream 'compute' is not ordered after the first half"):
        orders.access("compute", flat[49:51], writes=False, what="a row")
    orders.order("compute", orders.record("in"))
    orders.access("compute", flat[49:51], writes=False, what="a row")


def on_a_side_stream(lane: SimulatedLane, *, waits: bool = True, held: bool = True, joined: bool = False) -> Tensor:
    """Memory of the computing stream that another one reads, and that is then freed."""
    memory = torch.ones(100)
    with lane.on("side"):
        if waits:
            lane.wait_stream("compute")
        if held:
            lane.used(memory)
        total = memory.sum()
    if joined:
        lane.wait_stream("side")
    return total


@pytest.mark.parametrize(
    ("options", "race"),
    [
        ({}, None),
        ({"held": False, "joined": True}, None),
        ({"held": False}, r"memory of stream 'compute' was freed, .* after sum.*'side'"),
        ({"waits": False}, r"sum.* on stream 'side' is not ordered after ones"),
    ],
)
def test_memory_that_another_stream_reads_is_ordered_and_held_or_freed_after_that(
    options: dict[str, bool], race: str | None
) -> None:
    lane = SimulatedLane(0)
    with nullcontext() if race is None else pytest.raises(RaceError, match=race), lane.watching():
        on_a_side_stream(lane, **options)
        lane.used(torch.empty(0))


@pytest.mark.parametrize("waits", [True, False])
def test_a_backward_runs_where_its_forward_did(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd orders the streams itself: without its waits the first node on another stream is found."""
    if not waits:
        monkeypatch.setattr(SimulatedEvent, "wait", lambda event: None)
    lane, x = SimulatedLane(0), torch.ones(100, requires_grad=True)
    with lane.watching():
        with lane.on("side"):
            loss = (x * 2.0).square().sum()
        with nullcontext() if waits else pytest.raises(RaceError, match=r"on stream 'side'.* on stream 'compute'"):
            simulated_autograd.backward(lane, loss)
    assert not waits or torch.equal(x.grad, torch.full_like(x, 8.0))


@pytest.mark.parametrize(("uses", "expected"), [(1, "side"), (2, "compute")])
def test_the_gradient_of_a_leaf_arrives_on_the_stream_that_used_it_once(uses: int, expected: str) -> None:
    """And the stream that calls backward comes after that. Of a leaf with several uses, it arrives there."""
    lane, x, streams = SimulatedLane(0), torch.ones(100, requires_grad=True), list[object]()
    x.register_post_accumulate_grad_hook(lambda _: streams.append(lane.stream()))
    with lane.watching():
        with lane.on("side"):
            loss = sum((x * 2.0).square().sum() for _ in range(uses))
        simulated_autograd.backward(lane, loss)
        assert x.grad.sum() == 800.0 * uses
    assert streams == [expected]
