"""What a run comes to that is on one host and that nobody disturbs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .hosts import hosts
from .trainings import ALL_ON_HEAD, TwoHosts, end_trainings, join_ray, start_ray, train


@pytest.fixture(autouse=True)
def _no_training_goes_on() -> Iterator[None]:
    yield
    end_trainings()


@pytest.fixture(scope="session")
def undisturbed(two_hosts: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the last checkpoint."""
    training = train(two_hosts.a, tmp_path_factory.mktemp("undisturbed"), two_hosts.address, *ALL_ON_HEAD)
    training.end()
    assert len(training.members(two_hosts.a)) == 4
    return training.digest()


@pytest.fixture(scope="session")
def two_hosts() -> Iterator[TwoHosts]:
    """A cluster for tests that leave it whole."""
    with hosts(2) as (a, b):
        address = start_ray(a)
        join_ray(b, address)
        yield TwoHosts(a, b, address)
