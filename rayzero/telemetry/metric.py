"""A metric's name and meaning: one frozen value per name. And what a training loop may report as one."""

from __future__ import annotations

import reprlib
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


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
METRICS_PATH = "/metrics"  # at which a process exports them


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


def fault_of(name: Any, value: Any) -> str | None:
    """Why this name and value cannot be written, read again and drawn; None if they can.

    Values are numbers, text and None. A whole number has to be one that a float can hold, because loggers and
    Prometheus have only floats; text has to be Unicode that can be encoded."""
    if not isinstance(name, str) or not _is_unicode(name):
        return f"the name {ascii(name)[:100]} is not text, or has a lone surrogate, which is no character"
    if value is None or isinstance(value, bool | float):
        return None
    if isinstance(value, int):
        # not the number itself: Python refuses to write one of more than 4,300 digits
        largest = f"a float holds at most {sys.float_info.max:.1e}"
        return None if _is_float(value) else f"{name!r} is a whole number of {value.bit_length():,} bits; {largest}"
    if isinstance(value, str):
        lone = f"{name!r} is {reprlib.repr(value)}, which has a lone surrogate, which is no character"
        return None if _is_unicode(value) else f"{lone}; decode with errors='replace'"
    return f"{name!r} is a {type(value).__name__}; metrics are numbers, text or None"


def _is_float(value: int) -> bool:
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
