"""What the coordinator's page says of changes of the optimizers; tests/dashboards/test_live.py has a real one."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from rayzero.cluster.processes.coordinator import Coordinator
from rayzero.cluster.processes.process_exporter import RecorderCollector
from rayzero.elastic.reform import Step
from rayzero.telemetry import names
from rayzero.telemetry.metric import Metric, Role

CHANGES = [metric for metric in names.METRICS if metric.only == "a change of the optimizers"]


def test_every_metric_of_a_change_is_on_the_coordinators_page() -> None:
    coordinator, page = Coordinator("demo", None, 100.0), CollectorRegistry(auto_describe=False)
    page.register(RecorderCollector(coordinator._recorder, Role.COORDINATOR))

    def value(metric: Metric, **labels: str) -> float | None:
        return page.get_sample_value(metric.name, labels)

    assert {metric.name for metric in CHANGES} & {family.name for family in page.collect()} == set()
    steps = {str(step): 0.1 * number for number, step in enumerate(Step, start=1)}
    for pause in (0.5, 0.25):
        asyncio.run(coordinator.rescaled("done", steps, pause, 1000))
    asyncio.run(coordinator.rescaled("given_up", {}, 0.0, 0))
    assert (value(names.RESCALES, outcome="done"), value(names.RESCALES, outcome="given_up")) == (2, 1)
    assert {step: value(names.RESCALE_SECONDS, step=step) for step in steps} == {
        step: 2 * seconds for step, seconds in steps.items()
    }
    assert (value(names.RESCALE_MOVED_BYTES), value(names.RESCALE_PAUSE_SECONDS)) == (2000, 0.25)
    assert len(CHANGES) == 4
    assert all(f" {step}" in f" {names.RESCALE_SECONDS.help}" for step in steps), "its help names each"
