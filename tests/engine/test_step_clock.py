"""A step's seconds by phase: they add up, waits are taken out of what they interrupt, overlap is what nobody saw."""

from __future__ import annotations

import pytest
from clock import Clock

from rayzero.engine.step_clock import PHASES, StepClock
from rayzero.telemetry.names import EXPOSED_WAIT_SECONDS, OVERLAP_RATIO, STEP, STEP_PHASE_SECONDS, STEP_SECONDS
from rayzero.telemetry.recorder import MemoryRecorder


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("rayzero.engine.step_clock.perf_counter", clock)
    return clock


@pytest.fixture
def recorder() -> MemoryRecorder:
    return MemoryRecorder()


@pytest.fixture
def clock(recorder, time) -> StepClock:
    return StepClock(recorder, step=7)


def phases(recorder: MemoryRecorder) -> dict[str, float]:
    found = {phase: recorder.timing(STEP_PHASE_SECONDS, phase=phase).total for phase in PHASES}
    return {phase: seconds for phase, seconds in found.items() if seconds}


def pass_through(clock: StepClock, time: Clock, **seconds: float) -> None:
    for phase, spent in seconds.items():
        clock.enter(phase)
        time.now += spent


def test_every_moment_is_in_one_phase_and_phases_add_up_to_the_step(clock, recorder, time) -> None:
    time.now += 1
    pass_through(clock, time, forward=2, backward=4, data=8, optimizer=16)
    clock.step_over(8)
    assert phases(recorder) == {"data": 9, "forward": 2, "backward": 4, "optimizer": 16}
    assert recorder.timing(STEP_SECONDS).total == 31
    assert recorder.gauge(STEP) == 8


def test_a_phase_that_is_entered_again_goes_on(clock, recorder, time) -> None:
    pass_through(clock, time, backward=1)
    for _ in range(3):
        pass_through(clock, time, backward=2)
    clock.step_over(1)
    assert phases(recorder) == {"backward": 7}


@pytest.mark.parametrize(
    ("cause", "phase"), [("fetch", "fetch_wait"), ("optimizer", "optimizer"), ("push", "grad_push"), ("norm", "norm")]
)
def test_a_wait_is_taken_out_of_the_phase_that_it_interrupts(clock, recorder, time, cause, phase) -> None:
    pass_through(clock, time, forward=5)
    clock.waited(cause, 3)
    clock.step_over(1)
    assert phases(recorder) == {"forward": 2, phase: 3}
    assert recorder.total(EXPOSED_WAIT_SECONDS, cause=cause) == 3


def test_a_wait_within_its_own_phase_stays_there(clock, recorder, time) -> None:
    pass_through(clock, time, optimizer=5)
    clock.waited("optimizer", 3)
    clock.step_over(1)
    assert phases(recorder) == {"optimizer": 5}


def test_every_phase_of_every_step_is_told_and_none_is_negative(clock, recorder, time) -> None:
    pass_through(clock, time, forward=1)
    clock.waited("fetch", 1.5)  # the wait began before the phase: clocks are read one after the other
    clock.step_over(1)
    clock.step_over(2)
    for phase in PHASES:
        timing = recorder.timing(STEP_PHASE_SECONDS, phase=phase)
        assert timing.count == 2
        assert timing.total >= 0


def test_overlap_is_the_part_of_the_update_that_nobody_waited_for(clock, recorder, time) -> None:
    clock.committing()
    assert recorder.gauges().get(OVERLAP_RATIO) is None, "nothing was updated before"
    time.now += 10
    clock.published()
    clock.waited("optimizer", 2)
    clock.waited("fetch", 5)  # not the update's
    clock.committing()
    assert recorder.gauge(OVERLAP_RATIO) == pytest.approx(0.8)
    time.now += 1
    clock.published()
    clock.waited("optimizer", 3)
    clock.committing()
    assert recorder.gauge(OVERLAP_RATIO) == 0, "never below"


def test_a_step_whose_publication_was_not_seen_has_no_overlap(clock, recorder, time) -> None:
    clock.committing()
    time.now += 1
    clock.committing()
    assert recorder.gauges().get(OVERLAP_RATIO) is None


def test_a_trace_has_phases_and_waits_where_they_were(clock, recorder, time) -> None:
    recorder.spans.keep()
    pass_through(clock, time, forward=2)
    time.now += 5
    clock.blocked("optimizer", 1, ago=2)
    clock.waited("fetch", 2)
    pass_through(clock, time, backward=1, optimizer=1)
    clock.step_over(8)
    pass_through(clock, time, forward=1)
    clock.enter("data")
    found = [span for span in recorder.spans.recorded().spans if span.end > span.start]
    assert [(span.lane, span.name, span.start - 100, span.end - 100, span.step) for span in found] == [
        ("wait", "optimizer", 4, 5, 7),
        ("wait", "fetch", 5, 7, 7),
        ("step", "forward", 0, 7, 7),
        ("step", "backward", 7, 8, 7),
        ("step", "optimizer", 8, 9, 7),
        ("step", "forward", 9, 10, 8),
    ]
