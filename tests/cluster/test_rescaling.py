"""What becomes of requests for other optimizers, without a Ray: actors and the cluster are stand-ins."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rayzero.cluster.actors.calls import START_S
from rayzero.cluster.nodes.owner_places import Host
from rayzero.cluster.run import Rescaled
from rayzero.cluster.upkeep import rescaling as module
from rayzero.cluster.upkeep.rescaling import Rescaling
from rayzero.config import ScalingConfig, ZeroConfig
from rayzero.elastic import reform
from rayzero.elastic.controller import Controller
from rayzero.elastic.members import Kind, MemberId, Process
from rayzero.elastic.reform import Step
from rayzero.elastic.requests import ScaleRequest
from rayzero.errors import ConfigError
from rayzero.protocol.ownership import Prepared


@dataclass
class Trial:
    """In place of ``ReachTrial``."""

    calls: dict[str, str] = field(default_factory=dict)  # whose they are
    failed: str | None = None

    def take(self, call: str) -> None:
        del self.calls[call]

    def require(self) -> None:
        assert not self.calls, "not all have tried"
        if self.failed is not None:
            raise ConfigError(self.failed)


@dataclass
class Actors:
    """In place of ``RunActors``: nothing answers by itself."""

    places = SimpleNamespace(needs="1 CPU")
    members: dict[str, Any] = field(
        default_factory=lambda: {
            who: SimpleNamespace(node="n", host="10.0.0.1") for who in ("rank 0", "optimizer 0", "optimizer 1")
        }
    )
    ended: int = 0
    limits: dict[tuple[int, tuple[str, ...]], str] = field(default_factory=dict)  # what ``too_few_files`` says
    trial: Trial = field(default_factory=Trial)  # of the next one that joins

    def too_few_files(self, num_owners: int, others: dict[str, Any]) -> str | None:
        return self.limits.get((num_owners, tuple(others)))

    def joined(self, joining: Any, member: Any, target: Any) -> None:
        joining.member = member

    def __post_init__(self) -> None:
        self.coordinator = SimpleNamespace(rescaled=SimpleNamespace(remote=lambda *_: None))

    def join_owner(self, index: int, ownership: Any, node: str) -> tuple[Any, str]:
        actor = SimpleNamespace(watch=SimpleNamespace(remote=lambda: f"watch of optimizer {index}"))
        return SimpleNamespace(actor=actor, member=None), f"start of optimizer {index}"

    def try_to_reach(self, joining: Any, address: str, addresses: Any) -> Trial:
        return self.trial

    def handle(self, who: str) -> str:
        return f"handle of {who}"

    def tell(self, who: str, what: str) -> str:
        return f"{who} was told to {what}"

    def end_joining(self) -> None:
        self.ended += 1


class Run:
    """A run of one rank and two optimizers, whose owners are asked to change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: dict[str, tuple[Any, Step]] = {}
        self.answers: dict[str, Any] = {}
        self.outcomes: list[Rescaled] = []
        self.said: list[str] = []
        monkeypatch.setattr(module, "hosts", lambda: [Host("n", "10.0.0.1", {}, 1e12)])
        monkeypatch.setattr(module, "control", lambda method: method)
        monkeypatch.setattr(ray, "wait", lambda calls, **_: (calls, []))
        monkeypatch.setattr(ray, "get", self.answer)
        self.controller = Controller(1, ["a", "b"], max_failures=3)
        self.actors = Actors()
        self.rescaling = Rescaling(
            self.actors,  # type: ignore[arg-type]
            self.controller,
            zero=ZeroConfig(),
            scaling=ScalingConfig(),
            perform=self.perform,
            joined=lambda process, lives: None,
            died=lambda process, pid: None,
            parts=lambda process: None,
            say=self.said.append,
            progress=lambda what: None,
            ended=lambda rescaled, routing: self.outcomes.append(rescaled),
        )
        self.rescaling._ask = self.ask  # type: ignore[method-assign]

    def ask(self, step: Step, processes: Any, arguments: Any) -> None:
        """As ``Rescaling._ask`` does, of handles that are texts."""
        assert self.rescaling._change is not None
        self.rescaling._change.began[step] = time.monotonic()
        for process in processes:
            self.rescaling._handles.setdefault(process, "handle")
            self.rescaling._asked[f"{step} of {process} {process.life}"] = process, step

    def perform(self, actions: Any) -> None:
        for action in actions:
            if isinstance(action, reform.Action):
                self.rescaling.perform(action)

    def answer(self, call: str) -> Any:
        answer = self.answers[call]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def scale(self, optimizers: int) -> ScaleRequest:
        request = ScaleRequest(num_optimizers=optimizers)
        self.rescaling.request(request)
        return request

    def take(self, call: str, answer: Any = None) -> None:
        self.answers[call] = answer
        assert self.rescaling.take(call)

    def process(self, owner: int) -> Process:
        return Process(MemberId(Kind.OWNER, owner), 0)

    def come_up(self, owner: int, trial: Trial) -> None:
        """An owner that joins is up, and others try to reach it."""
        self.actors.trial = trial
        self.take(f"start of optimizer {owner}", (SimpleNamespace(node="n", host="10.0.0.1", pid=7), "c", None))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_a_change_whose_processes_find_no_place_is_refused_once_and_the_next_one_begins(run: Run) -> None:
    large, small = run.scale(5), run.scale(3)
    assert list(run.rescaling._starts) == [f"start of optimizer {i}" for i in (2, 3, 4)]
    run.rescaling.give_up_late(time.monotonic() + START_S + 1)
    assert [(one.id, one.failed) for one in run.outcomes] == [
        (large.id, f"optimizer 2: it was not up within {START_S + 1:.0f} s; it needs 1 CPU")
    ]
    assert list(run.rescaling._starts) == ["start of optimizer 2"], "of the next change"
    assert run.rescaling._change is not None
    assert run.rescaling._change.request == small


def test_more_owners_than_a_process_may_connect_to_are_refused_before_any_starts(run: Run) -> None:
    run.actors.limits[200, ()] = "rank 0 may have too few files open"
    run.scale(200)
    assert [one.failed for one in run.outcomes] == ["rank 0 may have too few files open"]
    assert not run.rescaling._starts


def test_an_owner_that_may_open_too_few_files_does_not_join(run: Run) -> None:
    run.actors.limits[3, ("optimizer 2",)] = "it may have too few files open"
    run.scale(3)
    run.come_up(2, Trial())
    assert [one.failed for one in run.outcomes] == ["optimizer 2: it may have too few files open"]
    assert run.actors.ended == 1
    assert not run.rescaling._watched


def test_the_lead_stops_for_an_owner_that_joins_once_all_have_reached_it(run: Run) -> None:
    """What stands in the next epoch cannot be given up."""
    run.scale(3)
    run.come_up(2, Trial({"a": "rank 0", "b": "optimizer 0"}))
    for call in ("a", "b"):
        assert not run.rescaling._asked
        assert call in run.rescaling.calls
        run.take(call)
    assert set(run.rescaling._asked.values()) == {(run.process(owner), Step.HOLD) for owner in (0, 1)}
    assert run.controller.coming.num_owners == 3


def test_an_owner_that_a_host_does_not_reach_ends_the_change_and_the_others_may_go_on_trying(run: Run) -> None:
    run.scale(4)
    run.come_up(2, Trial({"a": "rank 0"}, failed="the host a cannot connect to it"))
    run.come_up(3, Trial({"b": "rank 0"}))
    run.take("a")
    assert [one.failed for one in run.outcomes] == ["optimizer 2: the host a cannot connect to it"]
    assert run.actors.ended == 1
    assert run.rescaling.calls == []
    assert not run.rescaling.take("b"), "nobody waits for it any more"


def test_a_trial_that_does_not_end_is_refused_once_by_the_names_of_who_is_awaited(run: Run) -> None:
    """One of them may be stopped on another host, where nobody sees it."""
    large, small = run.scale(4), run.scale(3)
    run.come_up(2, Trial({"a": "optimizer 0", "b": "rank 0"}))
    run.come_up(3, Trial({"c": "rank 0"}))
    run.take("a")
    run.rescaling.give_up_late(time.monotonic() + START_S - 1)
    assert not run.outcomes
    run.rescaling.give_up_late(time.monotonic() + START_S + 1)
    assert [(one.id, one.failed) for one in run.outcomes] == [
        (
            large.id,
            f"optimizer 2: rank 0 gave no answer within {START_S + 1:.0f} s to whether the run's hosts reach each "
            "other; see whether they are stopped, and ask again",
        )
    ]
    assert run.rescaling._change is not None
    assert run.rescaling._change.request == small
    assert run.rescaling.calls == ["start of optimizer 2"]


def test_what_refuses_a_step_is_named_in_one_line(run: Run) -> None:
    run.scale(1)
    error = ray.exceptions.RayTaskError("carry_out", "Traceback\n...", RuntimeError("no luck\nat all"))
    run.take("hold of optimizer 0 0", error)
    assert [one.failed for one in run.outcomes] == ["optimizer 0: RuntimeError: no luck"]


def test_a_request_that_came_with_a_newer_one_hears_so(run: Run) -> None:
    request = ScaleRequest(num_optimizers=3)
    run.rescaling.replace(request)
    assert [(one.id, one.failed, one.after) for one in run.outcomes] == [
        (request.id, "another change was asked for before it began", 2)
    ]


def test_figures_of_a_change_that_is_tried_again_are_of_its_last_attempt_and_pauses_add_up(run: Run) -> None:
    run.scale(1)
    for step in ("hold", "settle"):
        for owner in (0, 1):
            run.take(f"{step} of optimizer {owner} 0", None)
    change = run.rescaling._change
    assert change is not None
    run.take("prepare of optimizer 0 0", Prepared(True, 4096))
    assert change.moved_bytes == 4096
    change.began[Step.HOLD] -= 2.0  # it has stood for two seconds
    change.begin_again(time.monotonic())
    assert change.moved_bytes == 0
    assert change.stood == pytest.approx(2.0, abs=0.5)
    assert list(change.began) == [Step.START]
    change.began[Step.HOLD] = time.monotonic() - 1.0
    assert change.rescaled(time.monotonic()).pause == pytest.approx(3.0, abs=0.5)
    assert change.rescaled(time.monotonic(), "given up").moved_bytes == 0
