"""A metric's name and meaning: one frozen value per name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """A metric's type in Prometheus."""

    COUNTER = "counter"  # only grows
    GAUGE = "gauge"  # the value now
    HISTOGRAM = "histogram"  # counts of values up to each bound


class Role(StrEnum):
    """The processes of a run."""

    RANK = "rank"
    OPTIMIZER = "optimizer"
    COORDINATOR = "coordinator"


RANK, OPTIMIZER, COORDINATOR = Role.RANK, Role.OPTIMIZER, Role.COORDINATOR
EVERY = tuple(Role)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metric:
    """One metric. Compared and hashed by identity, because every recording call looks it up."""

    name: str
    kind: Kind
    unit: str  # "s", "bytes", "bytes/s", "ratio", "unix s", "nats"; of counted things their plural
    help: str  # one sentence
    roles: tuple[Role, ...]  # the processes that export it
    labels: tuple[str, ...] = ()  # besides those of the process, see TARGET_LABELS
    buckets: tuple[float, ...] = ()  # upper bounds, ascending, in ``unit``; of histograms only
    only: str = ""  # when a run has it; empty: each run, once it has done some steps

    def __post_init__(self) -> None:
        assert (self.kind is Kind.HISTOGRAM) == bool(self.buckets), self.name
        assert tuple(sorted(set(self.buckets))) == self.buckets, self.name

    def check(self, labels: dict[str, str]) -> None:
        """Raise ValueError unless these are exactly its labels."""
        if set(labels) != set(self.labels):
            raise ValueError(f"{self.name} has labels {sorted(self.labels)}, got {sorted(labels)}")
