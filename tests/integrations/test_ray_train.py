"""Optimizer actors for Ray Train's workers: a worker's rank, and what is refused before anything starts.

That TorchTrainer trains with them: tests/examples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from engine.models import Net, same_bits, seeded, token_loss, tokens

import rayzero
from rayzero import ZeroConfig
from rayzero.concurrency.processes import ProcessIdentity
from rayzero.errors import HandshakeError, UnsupportedError
from rayzero.integrations import ray_train
from rayzero.integrations.ray_train import Owners, optimizer_actors
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.server import serve_models
from rayzero.store.rank import remote


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


@contextmanager
def served() -> Iterator[Owners]:
    """Two owners of this process, as ``optimizer_actors`` gives those on the cluster."""
    with ExitStack() as stack:
        servers = []
        for owner in range(2):
            models = HostedModels(owner, 2)
            stack.callback(models.close)
            servers.append(stack.enter_context(serve_models(models, token="t")))
        addresses = tuple(server.address for server in servers)
        for server in servers:
            server.connect_peers(addresses)
        yield Owners(run="r", config=ZeroConfig(transport="grpc"), addresses=addresses, token="t")


def test_a_worker_is_the_rank_that_ray_train_says_and_goes_on_from_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Place:
        get_world_rank = staticmethod(lambda: 0)
        get_world_size = staticmethod(lambda: 1)

    monkeypatch.setattr(ray_train.train, "get_context", Place)
    monkeypatch.setattr(ray_train, "get_device", lambda: torch.device("cpu"))
    states = []
    for resume in (None, tmp_path / "step-3"):
        with served() as owners, owners.rank(resume) as context:
            model = seeded(Net)
            model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
            assert (context.loop_state, context.world_size) == (resume and {"steps": 3}, 1)
            for step in () if resume else range(3):
                token_loss(model, tokens(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            if not resume:
                rayzero.save_checkpoint(optimizer, tmp_path / "step-3", {"steps": 3})
            states.append(rayzero.full_state_dict(model))
    assert same_bits(*states)
    assert not same_bits(states[0], seeded(Net).state_dict())


def test_a_worker_group_that_ray_train_starts_again_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers are other processes; the same process may try again after a prepare() that failed."""

    class Place:
        get_world_rank = staticmethod(lambda: 0)
        get_world_size = staticmethod(lambda: 1)

    def begin(owners: Owners) -> Any:
        with owners.rank():
            model = seeded(Net)
            return rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    monkeypatch.setattr(ray_train.train, "get_context", Place)
    monkeypatch.setattr(ray_train, "get_device", lambda: torch.device("cpu"))
    with served() as owners:
        begin(owners)
        begin(owners)
        monkeypatch.setattr(remote, "this_process", lambda: ProcessIdentity("", 4711, 0))
        with pytest.raises(HandshakeError, match=r"rank 0 was the process .* pid 4711, but this run replaces no ranks"):
            begin(owners)
    with served() as owners:  # of a new block
        begin(owners)


def test_the_token_is_not_in_what_ray_train_may_log() -> None:
    owners = Owners(run="r", config=ZeroConfig(), addresses=("127.0.0.1:1",), token="secret-of-the-run")
    assert "secret" not in repr({"owners": owners})
