"""What a process measured, as a value that travels to the driver and into ``run.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rayzero.telemetry.metric import Metric
from rayzero.telemetry.recorder import Labels, MemoryRecorder, Timing
from rayzero.telemetry.spans import Recorded

__all__ = ["Measured"]


@dataclass(frozen=True, slots=True)
class Measured:
    """A copy of a recorder's counters and timings, by the names of ``telemetry/names.py``, and of its spans."""

    counters: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)
    timings: Mapping[str, Mapping[Labels, Timing]] = field(default_factory=dict)
    trace: Recorded | None = None  # where spans were kept all along; not in ``run.json``

    @classmethod
    def of(cls, recorder: MemoryRecorder) -> Measured:
        """What the recorder holds now."""
        return cls(
            {metric.name: series for metric, series in recorder.counters().items()},
            {metric.name: series for metric, series in recorder.timings().items()},
            recorder.spans.recorded() if recorder.spans.kept else None,
        )

    def total(self, metric: Metric, **labels: str) -> float:
        """Sum of a counter over every series that has all these labels; 0 when there is none."""
        wanted = set(labels.items())
        return sum(value for key, value in self.counters.get(metric.name, {}).items() if wanted <= set(key))

    def by_label(self, metric: Metric, label: str) -> dict[str, float]:
        """Sums of a counter by the values of one label."""
        sums: dict[str, float] = {}
        for key, value in self.counters.get(metric.name, {}).items():
            of = dict(key).get(label, "")
            sums[of] = sums.get(of, 0) + value
        return sums

    def to_json(self) -> dict[str, object]:
        """Counters as numbers and timings as {count, total, longest}, by series written as Prometheus does."""
        counts: dict[str, object] = {
            _series(name, key): value for name, found in self.counters.items() for key, value in found.items()
        }
        timings: dict[str, object] = {
            _series(name, key): {"count": timing.count, "total": timing.total, "longest": timing.longest}
            for name, found in self.timings.items()
            for key, timing in found.items()
        }
        return counts | timings


def _series(name: str, labels: Labels) -> str:
    inside = ",".join(f'{label}="{value}"' for label, value in labels)
    return f"{name}{{{inside}}}" if inside else name
