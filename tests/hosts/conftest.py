"""What a run comes to that is on one host and that nobody disturbs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .trainings import TwoHosts, digest_of, end_trainings, train_without_ray, two_hosts_with_ray


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
    with two_hosts_with_ray() as found:
        yield found
