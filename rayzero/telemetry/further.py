"""What further prepared models of a run tell, where names are those of the run."""

from __future__ import annotations

from collections.abc import Iterator

from rayzero.telemetry.metric import Metric
from rayzero.telemetry.names import PARAM_VERSION, STEP_PHASE_SECONDS, STEP_SECONDS, VERSION_LAG
from rayzero.telemetry.recorder import End, Reading, Recorder, Source
from rayzero.telemetry.spans import Spans

_OF_THE_FIRST = frozenset({PARAM_VERSION, VERSION_LAG, STEP_SECONDS, STEP_PHASE_SECONDS})


class FurtherRecorder:
    """Adds to a run's recorder what adds up over its models: bytes, counts, waits. A :class:`Recorder`.

    What is one number of a run (its step, its norm, its learning rates, how long a step takes) is the first prepared
    model's alone, and dropped here."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def spans(self) -> Spans:
        """The run's."""
        return self._recorder.spans

    def add(self, metric: Metric, value: float = 1.0, **labels: str) -> None:
        """Adds up."""
        self._recorder.add(metric, value, **labels)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Adds up, but for the step's own seconds."""
        if metric not in _OF_THE_FIRST:
            self._recorder.observe(metric, value, **labels)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Nothing: it is the first model's."""

    def watch(self, source: Source) -> End:
        """Adds up, but for versions."""

        def added() -> Iterator[Reading]:
            return (reading for reading in source() if reading.metric not in _OF_THE_FIRST)

        return self._recorder.watch(added)
