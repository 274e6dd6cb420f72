"""What becomes of requests for other optimizers, without a Ray: actors and the cluster are stand-ins. Who asks waits
for the driver, and not for one that is gone."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from clock import Clock

from rayzero.cluster.actor_calls import ANSWER_S, START_S
from rayzero.cluster.nodes.resources import Node
from rayzero.cluster.run import Rescaled
from rayzero.cluster.status import RunStatus
from rayzero.cluster.upkeep import ray_processes
from rayzero.cluster.upkeep import rescaling as module
from rayzero.cluster.upkeep import rescaling as scale_module
from rayzero.cluster.upkeep.ray_processes import RayProcesses
from rayzero.cluster.upkeep.replacement import Replacement
from rayzero.cluster.upkeep.rescaling import Rescaling, scale
from rayzero.config import RunConfig, ScalingConfig, ZeroConfig
from rayzero.elastic.controller import Controller
from rayzero.elastic.members import Answered, MemberId, MemberKind, Process
from rayzero.elastic.reform import Step
from rayzero.elastic.scaling import ScaleRequest, take
from rayzero.errors import ConfigError, RunFailedError
from rayzero.layout.shard_map import Rescale
from rayzero.protocol.ownership import Ownership, Prepared


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


class Handle:
    """In place of an actor: a call is a text that says which it is."""

    def __init__(self, who: str) -> None:
        for method in ("watch", "succeed", "change", "stop"):
            setattr(self, method, SimpleNamespace(remote=lambda *_, method=method: f"{method} of {who}"))
        self.call_owner = SimpleNamespace(remote=lambda method, arguments: f"{method} of {who}")


@dataclass
class Actors:
    """In place of ``RunActors``: nothing answers by itself."""

    places = SimpleNamespace(needs="1 CPU")
    members: dict[str, Any] = field(
        default_factory=lambda: {
            who: SimpleNamespace(node="n", host="10.0.0.1", pid=6) for who in ("rank 0", "optimizer 0", "optimizer 1")
        }
    )
    ended: int = 0
    limits: dict[tuple[int, tuple[str, ...]], str] = field(default_factory=dict)  # what ``check_files`` says
    trial: Trial = field(default_factory=Trial)  # of the next one that joins
    local = SimpleNamespace(pid=lambda who: None, stopped=[])

    def check_files(self, num_owners: int, num_doors: int, others: dict[str, Any]) -> None:
        if (num_owners, tuple(others)) in self.limits:
            raise ConfigError(self.limits[num_owners, tuple(others)])

    def joined(self, joining: Any, member: Any, target: Any) -> None:
        joining.member = member

    def __post_init__(self) -> None:
        self.coordinator = SimpleNamespace(rescaled=SimpleNamespace(remote=lambda *_: None))
        self.handles = {who: Handle(who) for who in self.members}
        self.owners = {who: handle for who, handle in self.handles.items() if who.startswith("optimizer")}
        self.exporters = SimpleNamespace(targets=())

    def join_owner(self, index: int, ownership: Any, node: str) -> tuple[Any, str]:
        settings = SimpleNamespace(ownership=ownership)
        joining = SimpleNamespace(actor=Handle(f"optimizer {index}"), settings=settings, member=None)
        return joining, f"start of optimizer {index}"

    def listen_at_nodes(self, addresses: Any) -> Any:
        return addresses

    def try_to_reach(self, joining: Any, address: str, addresses: Any) -> Trial:
        return self.trial

    def handle(self, who: str) -> Any:
        return self.handles[who]

    def end_joining(self) -> None:
        self.ended += 1

    def enter(self, ownership: Any) -> None:
        self.handles["optimizer 2"], self.members["optimizer 2"] = Handle("optimizer 2"), self.members["optimizer 1"]

    def enlist(self) -> None:
        """Nobody is told."""

    def has_lost_host(self, who: str) -> bool:
        return False

    def start_owner(self, owner: int) -> str:
        self.handles[f"optimizer {owner}"] = Handle(f"optimizer {owner}")
        return f"start of optimizer {owner}"

    def took_place(self, who: str, member: Any, target: Any) -> None:
        self.members[who] = member


class Run:
    """A run of one rank and two optimizers, whose owners are asked to change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, Any] = {}
        self.said: list[str] = []
        monkeypatch.setattr(module, "alive_nodes", lambda: [Node(id="n", address="10.0.0.1", memory=1e12)])
        monkeypatch.setattr(ray_processes, "control", lambda method: method)
        monkeypatch.setattr(ray, "wait", lambda calls, **_: (calls, []))
        monkeypatch.setattr(ray, "get", self.answer)
        self.controller = Controller(1, ["a", "b"], max_failures=3)
        self.actors, self.status = Actors(), RunStatus(say=self.said.append)
        actors: Any = self.actors
        lives = dict.fromkeys(self.controller.running, 0)
        self.processes = RayProcesses(actors, lives, replaces=True, stall_timeout=30.0)
        self.replacement = Replacement(actors, self.controller, self.processes, self.status)
        self.rescaling = self.replacement.rescaling = Rescaling(
            actors,
            self.replacement.supervisor,
            self.processes,
            self.status,
            zero=ZeroConfig(),
            scaling=ScalingConfig(),
        )

    @property
    def outcomes(self) -> list[Rescaled]:
        return self.status.rescales

    @property
    def open(self) -> list[str]:
        """Calls that are waited for, but for those that last as long as an owner."""
        return [call for call in self.processes.calls if "watch" not in call]

    @property
    def change(self) -> Any:
        assert self.rescaling._change is not None
        return self.rescaling._change

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
        assert call in self.processes.calls
        self.replacement.take(call)

    def refuse_late(self, now: float) -> None:
        for event in self.processes.refusals(now):
            self.replacement.do(event)

    def come_up(self, owner: int, trial: Trial) -> None:
        """An owner that joins is up, and others try to reach it."""
        self.actors.trial = trial
        self.take(f"start of optimizer {owner}", (SimpleNamespace(node="n", host="10.0.0.1", pid=7), "c", None))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_a_change_whose_processes_find_no_place_is_refused_once_and_the_next_one_begins(run: Run) -> None:
    large, small = run.scale(5), run.scale(3)
    assert run.open == [f"start of optimizer {i}" for i in (2, 3, 4)]
    run.refuse_late(time.monotonic() + START_S + 1)
    assert [(one.id, one.failed) for one in run.outcomes] == [
        (large.id, f"optimizer 2: it was not up within {START_S + 1:.0f} s; it needs 1 CPU")
    ]
    assert [call for call in run.open if "start" in call] == ["start of optimizer 2"], "of the next change"
    assert run.change.request == small


@pytest.mark.parametrize(
    ("doors", "num", "change", "nodes"),
    [
        (0, 1, Rescale((0, None), 1), {1: "m"}),  # the last optimizer of a node with ranks leaves a door
        (1, 2, Rescale((0, None)), {1: "m"}),  # which parts once there is one with shards again
        (1, 3, Rescale((0, None, None)), {1: "m", 2: "n"}),
    ],
)
def test_after_a_change_each_node_with_ranks_has_an_optimizer(
    doors: int, num: int, change: Rescale, nodes: dict[int, str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "alive_nodes", lambda: [Node(id=node, address=node, memory=1e12) for node in "nm"])
    run.controller.ownership = Ownership(2, doors=doors)
    run.actors.members["rank 1"] = run.actors.members["optimizer 1"] = SimpleNamespace(node="m", host="m", pid=7)
    request = run.scale(num)
    assert (run.controller.coming.changes, run.processes.nodes) == ((change,), nodes)
    assert (run.change.request, run.change.before) == (request, 2 - doors)


def test_more_owners_than_a_process_may_connect_to_are_refused_before_any_starts(run: Run) -> None:
    run.actors.limits[200, ()] = "rank 0 may have too few files open"
    run.scale(200)
    assert [one.failed for one in run.outcomes] == ["rank 0 may have too few files open"]
    assert not run.open


def test_an_owner_that_may_open_too_few_files_does_not_join_and_no_other_is_awaited(run: Run) -> None:
    run.actors.limits[4, ("optimizer 2",)] = "it may have too few files open"
    run.scale(4)
    run.come_up(2, Trial())
    assert [one.failed for one in run.outcomes] == ["optimizer 2: it may have too few files open"]
    assert run.actors.ended == 1
    assert "watch of optimizer 2" not in run.processes.calls
    assert run.open == []


def test_the_lead_stops_for_an_owner_that_joins_once_all_have_reached_it(run: Run) -> None:
    """What stands in the next epoch cannot be given up."""
    run.scale(3)
    run.come_up(2, Trial({"a": "rank 0", "b": "optimizer 0"}))
    for call in ("a", "b"):
        assert sorted(run.open) == sorted({"a", "b"} if call == "a" else {"b"})
        run.take(call)
    assert run.open == ["hold of optimizer 0", "hold of optimizer 1"]
    assert run.controller.coming.num_owners == 3


def test_an_owner_that_a_host_does_not_reach_ends_the_change_and_the_others_may_go_on_trying(run: Run) -> None:
    run.scale(4)
    run.come_up(2, Trial({"a": "rank 0"}, failed="the host a cannot connect to it"))
    run.come_up(3, Trial({"b": "rank 0"}))
    run.take("a")
    assert [one.failed for one in run.outcomes] == ["optimizer 2: the host a cannot connect to it"]
    assert run.actors.ended == 1
    assert run.open == [], "nobody waits for the other one any more"


def test_a_trial_that_does_not_end_is_refused_once_by_the_names_of_who_is_awaited(run: Run) -> None:
    """One of them may be stopped on another host, where nobody sees it."""
    large, small = run.scale(4), run.scale(3)
    run.come_up(2, Trial({"a": "optimizer 0", "b": "rank 0"}))
    run.come_up(3, Trial({"c": "rank 0"}))
    run.take("a")
    run.refuse_late(time.monotonic() + START_S - 1)
    assert not run.outcomes
    run.refuse_late(time.monotonic() + START_S + 1)
    assert [(one.id, one.failed) for one in run.outcomes] == [
        (
            large.id,
            f"optimizer 2: rank 0 gave no answer within {START_S + 1:.0f} s to whether the run's hosts reach each "
            "other; see whether they are stopped, and ask again",
        )
    ]
    assert run.change.request == small
    assert run.open == ["start of optimizer 2"]


def test_what_refuses_a_step_is_named_in_one_line(run: Run) -> None:
    run.scale(1)
    error = ray.exceptions.RayTaskError("call_owner", "Traceback\n...", RuntimeError("no luck\nat all"))
    run.take("hold of optimizer 0", error)
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
            run.take(f"{step} of optimizer {owner}", None)
    change = run.change
    run.take("prepare of optimizer 0", Prepared(True, 4096))
    assert change.moved_bytes == 4096
    change.began[Step.HOLD] -= 2.0  # it has stood for two seconds
    change.begin_again(time.monotonic())
    assert change.moved_bytes == 0
    assert change.stood == pytest.approx(2.0, abs=0.5)
    assert list(change.began) == [Step.START]
    change.began[Step.HOLD] = time.monotonic() - 1.0
    assert change.rescaled(time.monotonic()).pause == pytest.approx(3.0, abs=0.5)
    assert change.rescaled(time.monotonic(), "given up").moved_bytes == 0


def test_a_process_that_dies_once_it_stands_in_the_next_epoch_is_one_failure_too_many_by_name(run: Run) -> None:
    """It is no member of Ray's side yet, and its death shows in the call that lasts as long as the process."""
    for _ in range(3):
        assert run.controller.spend() is None
    run.scale(3)
    run.come_up(2, Trial())
    for step in ("hold", "settle", "prepare"):
        for owner in (0, 1, 2) if step == "prepare" else (0, 1):
            run.take(f"{step} of optimizer {owner}", Prepared(owner == 0, 0) if step == "prepare" else None)
    assert run.open == ["let_stand of optimizer 0"]
    run.take("watch of optimizer 2")
    (failure,) = run.replacement.failed()
    assert (failure.who, failure.restarts) == ("optimizer 2", False)
    assert "It was one failure too many: the run has outlived 3 failures" in failure.what
    assert "pid 7" in failure.what
    assert run.replacement.failed() == [], "it is told once"


def test_an_owner_that_joins_is_watched_from_then_on_and_its_successor_is_told_of_the_others(run: Run) -> None:
    run.actors.coordinator.recovered = SimpleNamespace(remote=lambda *_: None)
    run.scale(3)
    run.come_up(2, Trial())
    for step in ("hold", "settle", "prepare", "let_stand", "enter"):
        for call in [call for call in run.open if call.startswith(step)]:
            run.take(call, Prepared(call.endswith("0"), 0) if step == "prepare" else None)
    assert run.open == ["change of rank 0"]
    run.take("change of rank 0")
    assert [(one.failed, one.after) for one in run.outcomes] == [(None, 3)]
    assert run.status.num_optimizers == 3
    assert run.processes.present("optimizer 2") == Process(MemberId(MemberKind.OWNER, 2), 0)
    run.take("watch of optimizer 2", ray.exceptions.ActorDiedError())
    died = time.monotonic() + 1
    (death,) = run.processes.died(died)
    run.replacement._take_death(death)
    assert run.open == ["start of optimizer 2"]
    assert run.status.replacing == ["optimizer 2"]
    run.take("start of optimizer 2", (SimpleNamespace(node="n", host="10.0.0.1", pid=8), "d", None))
    assert "watch of optimizer 2" in run.processes.calls
    run.take("connect_peers of optimizer 2")
    told = [f"succeed of {who}" for who in ("rank 0", "optimizer 0", "optimizer 1")]
    assert sorted(run.open) == sorted(told)
    for call in told:
        assert not run.status.recoveries
        run.take(call)
    assert [(one.who, one.pid) for one in run.status.recoveries] == [("optimizer 2", 8)]
    assert run.status.replacing == []


def test_a_successor_that_does_not_say_that_it_knows_the_others_is_refused(run: Run) -> None:
    late = time.monotonic() + ANSWER_S + 1
    run.processes.call([Process(MemberId(MemberKind.OWNER, 1), 0)], "connect_peers", ("a", "b"))
    run.processes.call([Process(MemberId(MemberKind.RANK, 0), 0)], "succeed", 1, "b")
    assert run.processes.refusals(time.monotonic()) == []
    (event,) = run.processes.refusals(late)
    assert isinstance(event, Answered)
    assert event.refused == f"no answer within {ANSWER_S:g} s"
    assert run.processes.refusals(late) == []


# ---- who asks -------------------------------------------------------------------------------------------------------


ELSEWHERE = {"pid": 4711, "host": "another-host"}  # whose processes nobody here sees


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time that passes while ``scale`` sleeps."""
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(scale_module.time, "monotonic", clock)
    monkeypatch.setattr(scale_module.time, "sleep", sleep)
    return clock


def record(folder: Path, **entries: Any) -> None:
    config = {"zero": ZeroConfig().model_dump(mode="json"), "run": RunConfig(max_failures=1).model_dump(mode="json")}
    content = {"run": "demo", "state": "running", "started_at": 1.0, "driver": ELSEWHERE, "config": config} | entries
    (folder / "run.json").write_text(json.dumps(content))


def test_a_driver_that_takes_no_request_is_named_and_finds_none_later(tmp_path: Path, clock: Clock) -> None:
    record(tmp_path)
    with pytest.raises(RunFailedError, match=r"'demo', pid 4711 on another-host, has not taken .* within 120 s: see"):
        scale(tmp_path, 3)
    assert take(tmp_path) == []
    assert clock.now == pytest.approx(100.0 + 120.0, abs=1.0)


def test_a_run_that_starts_is_waited_for(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path, state="starting")
    looks = iter(range(10_000))

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if next(looks) == 5_000:
            record(tmp_path)

    monkeypatch.setattr(scale_module.time, "sleep", sleep)
    with pytest.raises(RunFailedError, match="has not taken"):
        scale(tmp_path, 3)
    assert clock.now == pytest.approx(100.0 + 1_000.0 + 120.0, abs=1.0)


def test_a_request_that_was_taken_is_waited_for_as_long_as_it_takes(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path)
    taken: list[ScaleRequest] = []

    def sleep(seconds: float) -> None:
        clock.now += seconds
        taken.extend(take(tmp_path))
        if clock.now > 1_000.0:
            record(tmp_path, rescales=[asdict(Rescaled(id=taken[0].id, why="asked", before=2, after=3, failed=None))])

    monkeypatch.setattr(scale_module.time, "sleep", sleep)
    found = scale(tmp_path, 3)
    assert found is not None
    assert (found.before, found.after) == (2, 3)
