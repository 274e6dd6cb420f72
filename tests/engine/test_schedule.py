"""What happens in a step, in order, written out; and what the schedule foretells."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.engine.engine import Engine
from rayzero.engine.units.schedule import Phase, UnitSchedule

from .models import Net, fit, prepared_copy, seeded, tight

Events = list[tuple[str, str]]


def prepared(config: ZeroConfig) -> tuple[nn.Module, rayzero.ZeroOptimizer, Engine]:
    model, optimizer = prepared_copy(seeded(Net), torch.optim.AdamW, config)
    return model, optimizer, optimizer.engine


def events_of_step(model: nn.Module, optimizer: rayzero.ZeroOptimizer, step: int) -> Events:
    events: Events = []
    observer = lambda verb, unit: events.append((verb, unit.removeprefix("layers.")))  # noqa: E731
    optimizer.engine.cache.observers.append(observer)
    fit(model, optimizer, [step])
    optimizer.engine.cache.observers.remove(observer)
    return events


def test_one_unit_ahead(alone: RankContext) -> None:
    model, optimizer, _ = prepared(tight(Net(), prefetch_buffer_size=1))
    events_of_step(model, optimizer, 0)
    assert events_of_step(model, optimizer, 1) == [
        # forward: root and 0 were asked for by the last step
        ("unshard", "root"),
        ("prefetch", "1"),
        ("unshard", "0"),
        ("reshard", "0"),
        ("prefetch", "2"),
        ("unshard", "1"),
        ("unshard", "2"),
        # backward: 2 is still up, and 1, which comes next
        ("push", "2"),
        ("reshard", "2"),
        ("prefetch", "0"),
        ("push", "1"),
        ("unshard", "0"),
        ("push", "0"),
        ("push", "root"),
        # step: all that is up is out of date
        ("reshard", "root"),
        ("reshard", "0"),
        ("reshard", "1"),
        ("finish", ""),
        ("prefetch", "root"),
        ("prefetch", "0"),
    ]


def test_nothing_is_asked_for_before_it_is_needed_without_prefetch(alone: RankContext) -> None:
    model, optimizer, _ = prepared(tight(Net(), async_prefetch=False, spare=0))
    events_of_step(model, optimizer, 0)
    events = events_of_step(model, optimizer, 1)
    assert ("prefetch", "0") not in events
    up = [event for event in events if event[0] in ("fetch", "unshard", "reshard")]
    assert up[:8] == [
        ("fetch", "root"),
        ("unshard", "root"),
        ("fetch", "0"),
        ("unshard", "0"),
        ("reshard", "0"),
        ("fetch", "1"),
        ("unshard", "1"),
        ("reshard", "1"),
    ]


@pytest.mark.usefixtures("full_depth")
def test_a_model_that_fits_is_fetched_once_a_step(alone: RankContext) -> None:
    model, optimizer, _ = prepared(ZeroConfig())
    events_of_step(model, optimizer, 0)
    events = events_of_step(model, optimizer, 1)
    assert [unit for verb, unit in events if verb == "unshard"] == ["root", "0", "1", "2"]
    assert [unit for verb, unit in events if verb == "prefetch"] == ["root", "0", "1", "2"]  # for the next step
    assert [unit for verb, unit in events if verb == "push"] == ["2", "1", "0", "root"]
    assert events.index(("push", "0")) < events.index(("reshard", "root"))


def test_the_first_step_is_foretold_from_module_order() -> None:
    schedule = UnitSchedule(4)
    assert schedule.first(2) == (0, 1)
    schedule.begin_pass()
    schedule.used(Phase.FORWARD, 0)
    assert schedule.upcoming(2, wrap=False) == (1, 2)
    schedule.used(Phase.FORWARD, 3)
    assert schedule.upcoming(2, wrap=False) == (2, 1)
    schedule.used(Phase.BACKWARD, 1)
    assert schedule.upcoming(3, wrap=False) == (0,)
    assert schedule.upcoming(3, wrap=True) == (0, 2, 3)


def test_later_passes_are_foretold_from_the_last_one_with_a_backward() -> None:
    schedule = UnitSchedule(4, always=[3])
    for phase, unit in [("forward", 2), ("forward", 0), ("backward", 0), ("backward", 2)]:
        schedule.used(Phase(phase), unit)
    schedule.begin_pass()
    assert schedule.first(1) == (3, 2)
    schedule.used(Phase.FORWARD, 1)  # evaluation of something else
    schedule.begin_pass()
    schedule.used(Phase.FORWARD, 2)
    assert schedule.upcoming(4, wrap=False) == (0,)
    schedule.used(Phase.FORWARD, 0)
    schedule.used(Phase.BACKWARD, 0)
    assert schedule.upcoming(4, wrap=False) == (2,)
