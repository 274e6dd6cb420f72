"""What a run comes to that is on one host and that nobody disturbs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .hosts import hosts
from .trainings import TwoHosts, join_ray, start_ray, train


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the last checkpoint."""
    with hosts(1) as (host,):
        training = train(host, tmp_path_factory.mktemp("undisturbed"), start_ray(host))
        training.end()
        return training.digest()


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[TwoHosts]:
    """A cluster for tests that leave it whole."""
    with hosts(2) as (a, b):
        address = start_ray(a)
        join_ray(b, address)
        yield TwoHosts(a, b, address)
