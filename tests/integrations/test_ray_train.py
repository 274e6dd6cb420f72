"""Optimizer actors for Ray Train's workers: a worker's rank, and what is refused before anything starts.

That TorchTrainer trains with them: test_ray_train_deaths.py."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest
import ray
import torch
from engine.models import Net, fit, same_bits, seeded

import rayzero
from rayzero import ZeroConfig
from rayzero.cluster.group_owners import GroupEnded, WorkerGroup
from rayzero.cluster.processes.rank_worker import RankStart
from rayzero.engine.checkpoint import chosen_resume
from rayzero.errors import ConfigError, RunFailedError, UnsupportedError
from rayzero.integrations import ray_train
from rayzero.integrations.ray_train import Owners, optimizer_actors
from rayzero.protocol.ownership import Ownership
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.server import serve_models


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"offload_fraction": 0.5},
            "offload_fraction=0.5 needs owners in the ranks' processes, which Ray Train starts",
        ),
        (
            {"transport": "inproc"},
            "transport='inproc' only reaches owners in the same process, and Ray Train's workers",
        ),
    ],
)
def test_what_needs_owners_in_the_workers_is_refused_before_ray_starts(
    settings: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray was started"))
    before = ray.is_initialized()  # by other tests of this process
    with pytest.raises(UnsupportedError, match=said), optimizer_actors(ZeroConfig(**settings)):
        pass
    assert ray.is_initialized() is before


class Told:
    """What a worker asks for its owners, without an actor: answers at once, and can say that they have moved."""

    def __init__(self, start: RankStart | GroupEnded) -> None:
        self.start = start
        self.asked: list[WorkerGroup] = []
        self.told: Queue[RankStart | GroupEnded] = Queue()

    def join(self, group: WorkerGroup, rank: int, process: str) -> RankStart | GroupEnded:
        self.asked.append(group)
        return self.start

    def news(self, group: str, known: RankStart, unwanted: threading.Event) -> RankStart | GroupEnded | None:
        while not unwanted.is_set():
            with suppress(Empty):
                return self.told.get(timeout=0.05)
        return None


def started(addresses: tuple[str, ...], **other: Any) -> RankStart:
    first = {"lineage": "l", "life": 0, "repeats": None, "resume": None, "token": "t"}
    return RankStart(addresses=addresses, **first | {"ownership": Ownership(len(addresses))} | other)


@contextmanager
def served(doors: int = 0) -> Iterator[Owners]:
    """Two owners of this process, so many without shards, as ``optimizer_actors`` gives those on the cluster."""
    ownership = Ownership(2, doors=doors)
    with ExitStack() as stack:
        servers = []
        for owner in range(2):
            models = HostedModels(owner, 2, ownership=ownership)
            stack.callback(models.close)
            servers.append(stack.enter_context(serve_models(models, token="t")))
        addresses = tuple(server.address for server in servers)
        for server in servers:
            server.connect_peers(addresses)
        yield Owners(run="r", config=ZeroConfig(transport="grpc"), groups=Told(started(addresses, ownership=ownership)))  # type: ignore[arg-type]


@pytest.mark.parametrize("doors", [0, 1])
def test_a_worker_is_the_rank_that_ray_train_says_and_goes_on_from_a_checkpoint(
    in_a_worker: None, doors: int, tmp_path: Path
) -> None:
    states = []
    for resume in (None, tmp_path / "step-3"):
        with served(doors) as owners, owners.rank(resume) as context:
            model = seeded(Net)
            model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
            assert (context.loop_state, context.world_size) == (resume and {"steps": 3}, 1)
            if not resume:
                fit(model, optimizer, range(3))
                rayzero.save_checkpoint(optimizer, tmp_path / "step-3", {"steps": 3})
            states.append(rayzero.full_state_dict(model))
    assert same_bits(*states)
    assert not same_bits(states[0], seeded(Net).state_dict())


def test_a_group_that_goes_on_has_the_place_it_is_told_and_not_its_own_checkpoint(in_a_worker: None) -> None:
    goes_on = Told(started(("a:1",), life=2, repeats=7, resume=Path("/first"), lineage="abc"))
    with Owners(run="r", config=ZeroConfig(), groups=goes_on).rank("newest") as context:  # type: ignore[arg-type]
        assert (context.life, context.repeats, context.resume, context.lineage) == (2, 7, Path("/first"), "abc")
    asked = WorkerGroup(name="group", run="demo", world_size=1, nodes=("node",), resume=Path("newest").absolute())
    assert goes_on.asked == [asked]
    fresh = Told(started(("a:1",)))
    with Owners(run="r", config=ZeroConfig(), groups=fresh).rank("newest") as context:  # type: ignore[arg-type]
        assert (context.life, context.resume) == (0, Path("newest").absolute())


def test_what_a_loop_gives_prepare_counts_only_in_a_fresh_start(in_a_worker: None) -> None:
    for life, expected in ((1, "/first"), (0, None)):
        groups = Told(started(("a:1",), life=life, resume=Path("/first")))
        with Owners(run="r", config=ZeroConfig(), groups=groups).rank("/first") as context:  # type: ignore[arg-type]
            if expected is not None:
                assert chosen_resume(context, "/newest") == Path(expected)
            else:
                with pytest.raises(ConfigError, match="resume='/newest', but the run resumes from /first"):
                    chosen_resume(context, "/newest")


def test_a_worker_that_gets_no_owners_says_why(in_a_worker: None) -> None:
    owners = Owners(run="r", config=ZeroConfig(), groups=Told(GroupEnded(why="all are gone")))  # type: ignore[arg-type]
    with pytest.raises(RunFailedError, match="rank 0 has no optimizer actors: all are gone"), owners.rank():
        pass


def lose_the_owners(owners: Owners, news: Queue[RankStart | GroupEnded]) -> None:
    """Train for ever, and hear after prepare() that the owners are lost."""
    with owners.rank():
        model = seeded(Net)
        model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        news.put(GroupEnded(why="optimizer 1 died"))
        fit(model, optimizer, itertools.count())


def test_a_loop_whose_owners_are_lost_fails_with_the_reason(in_a_worker: None) -> None:
    with served() as owners, pytest.raises(RunFailedError, match="rank 0 has lost its optimizer actors: optimizer 1"):
        lose_the_owners(owners, owners.groups.told)  # type: ignore[attr-defined]


def test_a_worker_learns_where_the_successor_of_an_owner_is(in_a_worker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    told: Queue[tuple[int, str]] = Queue()
    monkeypatch.setattr(ray_train.OwnerTable, "succeed", lambda self, owner, address: told.put((owner, address)))
    groups = Told(started(("a:1", "b:1", "c:1")))
    with Owners(run="r", config=ZeroConfig(), groups=groups).rank():  # type: ignore[arg-type]
        groups.told.put(started(("a:1", "b:2", "c:1")))
        assert told.get(timeout=30) == (1, "b:2")
        groups.told.put(started(("a:2", "b:2", "c:1")))
        assert told.get(timeout=30) == (0, "a:2")


@pytest.mark.promise("safe", "integrations")
def test_the_token_is_not_in_what_ray_train_may_log() -> None:
    assert "secret" not in repr(started(("a:1",), token="secret-of-the-run"))


@pytest.mark.parametrize("number", [-1, 2.5, True, "3", None])
def test_a_number_of_failures_that_is_none_is_refused(number: Any) -> None:
    said = re.escape(f"max_failures is {number!r}; pass a whole number >= 0")
    with pytest.raises(ConfigError, match=said), optimizer_actors(max_failures=number):
        pass
