"""What counts as a wait for a unit: on the CPU what the host waited, on a device what its computing stream stood."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.engine.step_clock import StepClock
from rayzero.engine.units.partition import build_layout
from rayzero.engine.units.residency import DeviceCopy, Fetching, UnitBuffer, Waited
from rayzero.engine.units.schedule import Phase, PrefetchPace, UseTimes
from rayzero.memory.pool import MemoryBudget
from rayzero.telemetry.names import (
    EXPOSED_WAIT_SECONDS,
    PREFETCH_GROUP_LATE_SECONDS,
    PREFETCH_LATE_SECONDS,
    PREFETCH_LEAD_SECONDS,
    PREFETCH_REQUESTS,
)
from rayzero.telemetry.recorder import MemoryRecorder
from tests.support.simulated_lane import SimulatedLane, device_behind

from .models import seeded, tight


class At:
    """An event at a second of the device's clock."""

    def __init__(self, at: float) -> None:
        self.at = at

    def wait(self) -> None:
        """The host does not."""


class DeviceClock:
    """The part of a lane that measures: a device that has come as far as ``reached``."""

    def __init__(self) -> None:
        self.at = self.reached = 0.0

    def now(self) -> At:
        return At(self.at)

    def seconds(self, start: At, stop: At) -> float | None:
        return stop.at - start.at if max(start.at, stop.at) <= self.reached else None


@pytest.fixture
def lane() -> DeviceClock:
    return DeviceClock()


@pytest.fixture
def recorder() -> MemoryRecorder:
    return MemoryRecorder()


@pytest.fixture
def times(lane: Any, recorder: MemoryRecorder, monkeypatch: pytest.MonkeyPatch) -> UseTimes:
    monkeypatch.setattr("rayzero.engine.step_clock.perf_counter", lambda: 0.0)
    return UseTimes(lane, StepClock(recorder), recorder, ["g0"])


def done() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(None)
    return future


def fetching(copy: tuple[float, float] | None, *, ahead: bool = True) -> Fetching:
    """A fetch to a device, whose copy runs in these seconds of its clock; None: to the CPU."""
    lease = MemoryBudget(None).reserve(0)
    assert lease is not None
    buffer = UnitBuffer(flat=torch.empty(0), slices=(), lease=lease)
    ready: Future[Any] | None = None
    if copy is not None:
        ready = Future()
        ready.set_result(DeviceCopy(At(copy[1]), [At(copy[0]), At(copy[1])]))  # type: ignore[arg-type]
    return Fetching(1, done(), done=ready or done(), request=done(), buffer=buffer, ahead=ahead, ready=ready)


UNIT, AT_ONCE = build_layout(nn.Linear(8, 8)).layout.units[0], Waited(0.0, 0.0)


def wait(times: UseTimes, lane: DeviceClock, fetch: Fetching, host: Waited = AT_ONCE) -> None:
    """The device's computing stream waits for the copy."""
    began = times.now()
    if fetch.copied is not None:
        lane.at = max(lane.at, fetch.copied.moments[-1].at)  # type: ignore[union-attr]
    times.waited(UNIT, fetch, not host.total, host, began)


def results(recorder: MemoryRecorder) -> list[float]:
    return [recorder.total(PREFETCH_REQUESTS, result=result) for result in ("hit", "late", "miss")]


def test_a_unit_is_late_if_the_device_stood_for_it_though_the_host_did_not_wait(
    times: UseTimes, lane: DeviceClock, recorder: MemoryRecorder
) -> None:
    lane.at = 1.0
    wait(times, lane, fetching((0.5, 3.0)))
    assert results(recorder) == [0, 0, 0], "the device is not there yet"
    lane.reached = 3.0
    times.count()
    assert results(recorder) == [0, 1, 0]
    assert recorder.timing(PREFETCH_LATE_SECONDS).total == 2.0
    assert recorder.total(PREFETCH_GROUP_LATE_SECONDS, group="g0") == 2.0
    assert recorder.total(EXPOSED_WAIT_SECONDS, cause="fetch") == 2.0
    assert times.arrived.value.seconds == pytest.approx(2.5, abs=0.1)


def test_a_unit_is_in_time_if_the_device_did_not_stand_for_it_though_the_host_waited(
    times: UseTimes, lane: DeviceClock, recorder: MemoryRecorder
) -> None:
    """The host was ahead of the device by more than it waited."""
    lane.at, lane.reached = 7.0, 9.0
    wait(times, lane, fetching((2.0, 4.0)), Waited(0.5, 0.25))
    assert results(recorder) == [1, 0, 0]
    assert recorder.timing(PREFETCH_LEAD_SECONDS).total == 3.0
    assert recorder.total(EXPOSED_WAIT_SECONDS) == 0


def test_what_the_device_stood_for_is_the_copys_then_the_hosts_wait_for_bytes_then_the_updates(
    times: UseTimes, lane: DeviceClock, recorder: MemoryRecorder
) -> None:
    lane.at, lane.reached = 10.0, 99.0
    wait(times, lane, fetching((12.0, 13.0)), Waited(1.5, 0.5))  # stands 3 s: 1 + 0.5 for bytes, 1.5 before
    assert recorder.total(EXPOSED_WAIT_SECONDS, cause="fetch") == 1.5
    assert recorder.total(EXPOSED_WAIT_SECONDS, cause="optimizer") == 1.5
    wait(times, lane, fetching((12.5, 14.0)), Waited(1.5, 0.5))  # stands 1 s, all of it for the copy
    assert recorder.total(EXPOSED_WAIT_SECONDS, cause="fetch") == 2.5


def test_on_the_cpu_the_hosts_wait_is_all_there_is(
    times: UseTimes, lane: DeviceClock, recorder: MemoryRecorder
) -> None:
    lane.reached = 9.0
    wait(times, lane, fetching(None), Waited(2.0, 1.0))
    wait(times, lane, fetching(None))
    wait(times, lane, fetching(None, ahead=False), Waited(0.0, 0.5))
    assert results(recorder) == [1, 1, 1]
    assert recorder.total(EXPOSED_WAIT_SECONDS, cause="optimizer") == 2.0
    assert recorder.total(EXPOSED_WAIT_SECONDS, cause="fetch") == 1.5


def test_waits_and_what_lies_between_passes_are_not_compute(times: UseTimes, lane: DeviceClock) -> None:
    lane.reached = 1e9
    times.used(Phase.FORWARD)
    wait(times, lane, fetching((0.0, 2.0)))
    lane.at = 3.0
    times.used(Phase.FORWARD)  # 1 s of compute
    lane.at = 50.0
    times.pause()
    lane.at = 100.0
    times.used(Phase.FORWARD)
    lane.at = 101.0
    times.used(Phase.FORWARD)  # 1 s
    lane.at = 200.0
    times.used(Phase.BACKWARD)
    times.pace = after = PrefetchPace()
    after.computed(Phase.FORWARD, 1.0)
    after.fetched(4.0)
    assert after.depth(16) == 4


# ---- the engine on a simulated device ---------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Compute(torch.autograd.Function):
    """A kernel that takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, seconds: float) -> Tensor:
        clock.now += seconds
        ctx.clock, ctx.seconds = clock, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.clock.now += 2 * ctx.seconds
        return grad.clone(), None, None


WIDTH, LAYERS, FORWARDS, LAYER_S = 64, 12, 4, 0.1  # seconds, long beside what the host really takes


class Layer(nn.Linear):
    def __init__(self, clock: Clock) -> None:
        super().__init__(WIDTH, WIDTH)
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(Compute.apply(x, self.clock, LAYER_S)))


def trained(copy_s: float) -> Any:
    """The depth and the stats of a model whose layers compute for ``LAYER_S`` forward and take ``copy_s`` to copy."""
    clock = Clock()
    model = seeded(lambda: nn.Sequential(*(Layer(clock) for _ in range(LAYERS))))
    size = 4 * (WIDTH * WIDTH + WIDTH)
    lane = SimulatedLane(1, link=size / copy_s, clock=clock)

    config: ZeroConfig = tight(model, units=["Layer"], prefetch_buffer_size=5, spare=0)
    with device_behind(lane):
        model, optimizer = rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), config)
    for _ in range(3):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.engine.cache.wait_published()  # or its threads, which take real time, would issue copies
    rayzero.stats(model, reset=True)
    with torch.no_grad():
        for _ in range(FORWARDS):
            model(torch.ones(2, WIDTH))
    return optimizer.engine.cache.depth, rayzero.stats(model)


def test_over_a_slow_link_units_are_late_and_fetched_far_ahead(alone: RankContext) -> None:
    """A copy takes three times the forward of a layer, so about two layers of it are waited for."""
    depth, found = trained(3 * LAYER_S)
    assert depth >= 3
    assert found.prefetch.late > 0.8 * LAYERS * FORWARDS
    assert found.waits["fetch"].total == pytest.approx(2 * LAYER_S * LAYERS * FORWARDS, rel=0.1)
    assert found.to_device.copies.bandwidth == pytest.approx(4 * (WIDTH * WIDTH + WIDTH) / (3 * LAYER_S), rel=0.1)


def test_over_a_fast_link_units_are_in_time_and_fetched_one_ahead(alone: RankContext) -> None:
    depth, found = trained(LAYER_S / 4)
    assert depth == 1
    assert found.prefetch.late <= FORWARDS, "at most the first layer of each"
    assert found.prefetch.hits > 7 * FORWARDS
    assert found.waits["fetch"].total == pytest.approx(found.prefetch.late * LAYER_S / 4)
