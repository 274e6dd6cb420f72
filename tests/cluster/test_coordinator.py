"""What the coordinator takes of the ranks' reports, what the driver has not read yet, and what its page says of changes
of the optimizers; tests/dashboards/test_live.py has a real one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prometheus_client import CollectorRegistry

from rayzero.cluster.processes import coordinator
from rayzero.cluster.processes.coordinator import Coordinator, HeardReports
from rayzero.cluster.processes.process_exporter import LOOPBACK, ExporterSettings, RecorderCollector
from rayzero.cluster.run import Member, Report, RunState
from rayzero.elastic.reform import Step
from rayzero.telemetry import names
from rayzero.telemetry.metric import Metric, Role
from rayzero.telemetry.scrape import Viewer

from .ray_cluster import free_port


def read_of(*batches: list[Report]) -> list[list[int]]:
    """The steps that the driver reads of these reports, call by call."""
    made = coordinator.Coordinator("demo", None, 100.0)

    async def read() -> list[list[int]]:
        await made.move(RunState.RUNNING)
        life = await made.life()
        for batch in batches:
            await made.report(batch, None)
        await made.end_news()
        return [[report.step for report in (await made.next_reports(life)).reports] for _ in range(2)]

    return asyncio.run(read())


def test_unread_reports_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(coordinator, "REPORTS_KEPT", 3)
    assert read_of([Report(rank=0, step=step) for step in range(5)]) == [[2, 3, 4], []]


def test_what_a_rank_reports_again_in_its_next_life_is_taken_once():
    heard = HeardReports()

    def made(life, *at):
        return [Report(rank=0, life=life, step=step, number=number) for step, number in at]

    def new(reports):
        return [(report.step, report.number) for report in reports if heard.is_new(report)]

    assert new(made(0, (0, 0), (1, 0), (1, 1))) == [(0, 0), (1, 0), (1, 1)]
    assert new(made(1, (0, 0), (1, 0), (1, 1), (1, 2), (2, 0))) == [(1, 2), (2, 0)]
    assert new(made(2, (1, 2))) == []
    assert new(made(3, (2, 0), (2, 1))) == [(2, 1)]
    assert [heard.is_new(Report(rank=1, step=step)) for step in (4, 3)] == [True, True], "another rank's, in one life"


def made_at(rank: int, *steps: int) -> list[Report]:
    return [Report(rank=rank, step=step, time=0.0) for step in steps]


def test_the_last_reports_come_again_from_everybody_after_the_coordinators_death():
    heard = HeardReports()
    assert list(filter(heard.is_new, made_at(0, 3, 4))) == made_at(0, 3, 4)
    assert list(filter(heard.is_new, made_at(0, 4))) == made_at(0, 4), "a loop may go back to an earlier step"
    heard.come_again()
    assert list(filter(heard.is_new, made_at(0, 3, 4, 5))) == made_at(0, 5)
    assert list(filter(heard.is_new, made_at(1, 4))) == made_at(1, 4), "another rank's"


def test_another_coordinator_may_be_told_twice_of_the_run(monkeypatch, tmp_path):
    """Once for a life that died before it answered, and Ray asks the next one; once more when the driver sees that."""
    member = Member(who="coordinator", pid=1, node="n", host=LOOPBACK)
    monkeypatch.setattr(coordinator, "this_process", lambda who: member)
    settings = ExporterSettings(
        run="demo", role=Role.COORDINATOR, who="coordinator", index=None, node=LOOPBACK, host=LOOPBACK,
        port=free_port(), slab_dir=Path(tmp_path), trace=False,
    )  # fmt: skip
    made = coordinator.Coordinator("demo", None, 100.0)

    async def twice():
        return [await made.resume([member], (), settings, Viewer()) for _ in range(2)]

    try:
        answers = asyncio.run(twice())
    finally:
        if made._exporter is not None:
            made._exporter.close()
    assert answers == [member, member]


# ---- what its page says of changes of the optimizers ----------------------------------------------------------------


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
