"""Optimizer actors for Ray Train's workers: what cannot be is said before anything starts.

That the loop trains, saves and resumes: tests/examples."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from rayzero import ZeroConfig
from rayzero.errors import UnsupportedError
from rayzero.integrations.ray_train import Owners, optimizer_actors


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"offload_fraction": 0.5},
            "offload_fraction=0.5 needs owners in the ranks' processes, which Ray Train starts",
        ),
        ({"transport": "inproc"}, "transport='inproc' reaches owners in the same process, Ray Train's workers"),
    ],
)
def test_what_needs_owners_in_the_workers_is_refused_before_ray_starts(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said), optimizer_actors(ZeroConfig(**settings)):
        pass
    assert not ray.is_initialized()


def test_the_token_is_not_in_what_ray_train_may_log() -> None:
    owners = Owners(run="r", config=ZeroConfig(), addresses=("127.0.0.1:1",), token="secret-of-the-run")
    assert "secret" not in repr({"owners": owners})
