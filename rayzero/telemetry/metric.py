"""What a measurement is called and what it means: one frozen value per name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What Prometheus calls a metric's type."""

    COUNTER = "counter"  # only grows
    GAUGE = "gauge"  # what is now
    HISTOGRAM = "histogram"  # how often a value was at most so much


class Role(StrEnum):
    """The processes of a run."""

    RANK = "rank"
    OPTIMIZER = "optimizer"
    COORDINATOR = "coordinator"


RANK, OPTIMIZER, COORDINATOR = Role.RANK, Role.OPTIMIZER, Role.COORDINATOR
EVERY = tuple(Role)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metric:
    """One measurement. Compared and hashed by identity: it is looked up in every call that counts."""

    name: str
    kind: Kind
    unit: str  # "s", "bytes", "bytes/s", "ratio", "unix s", "nats"; of counted things their plural
    help: str  # one sentence
    roles: tuple[Role, ...]  # the processes that export it
    labels: tuple[str, ...] = ()  # beyond those of the process, see TARGET_LABELS
    buckets: tuple[float, ...] = ()  # upper bounds, ascending, in ``unit``; of histograms only
    only: str = ""  # when a run has it; empty: each run, once it has done some steps

    def __post_init__(self) -> None:
        assert (self.kind is Kind.HISTOGRAM) == bool(self.buckets), self.name
        assert tuple(sorted(set(self.buckets))) == self.buckets, self.name

    def check(self, labels: dict[str, str]) -> None:
        """Raise ValueError unless these are the labels it has."""
        if set(labels) != set(self.labels):
            raise ValueError(f"{self.name} has labels {sorted(self.labels)}, got {sorted(labels)}")
