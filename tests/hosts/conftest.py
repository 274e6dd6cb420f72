"""What a run comes to that is on one host and that nobody disturbs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .hosts import hosts
from .trainings import TwoHosts, digest_of, end_trainings, join_ray, start_ray, train_without_ray


@pytest.fixture(autouse=True)
def _no_training_goes_on() -> Iterator[None]:
    yield
    end_trainings()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the last checkpoint."""
    return digest_of(train_without_ray(tmp_path_factory.mktemp("undisturbed")))


@pytest.fixture(scope="session")
def two_hosts() -> Iterator[TwoHosts]:
    """A cluster for tests that leave it whole."""
    with hosts(2) as (a, b):
        address = start_ray(a)
        join_ray(b, address)
        yield TwoHosts(a, b, address)
