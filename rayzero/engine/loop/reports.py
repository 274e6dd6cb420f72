"""The reports that a rank's loop has made lately, so that its next life can make them again.

Reports are sent behind the loop's back, so the last ones before a death may be lost. Those of the last two steps, and
those that have not arrived where they go, are kept with the loop's state, and the next life sends them again. The
receiver of reports knows them by their step and number, and takes each once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from rayzero.errors import ConfigError
from rayzero.telemetry.metric import fault_of

_MOST_KEPT = 100  # more would be a large state: a hundred steps' reports are on their way only to a dead receiver
_KEPT_STEPS = 2  # an iteration reports for the step that it has committed, and perhaps before it commits


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopReport:
    """One call of ``rayzero.report``."""

    step: int  # that the loop does next
    number: int  # of the reports that the loop has made at this step, from 0
    metrics: dict[str, Any]  # numbers, text and None
    checkpoint: str | None = None  # directory of a complete one


class RecentReports:
    """Numbers a loop's reports, and remembers those of the last two steps and those that have not arrived."""

    def __init__(self) -> None:
        self._recent: list[LoopReport] = []
        self._step, self._made = 0, 0  # reports at this step
        self._arrived = (-1, -1)  # the newest: its step and number; set by the thread that sends

    def add(self, step: int, metrics: Mapping[str, Any], checkpoint: str | None) -> LoopReport:
        """The report of these metrics. Raises ConfigError as ``plain_metrics``."""
        plain = plain_metrics(metrics)
        report = LoopReport(step=step, number=self._number(step), metrics=plain, checkpoint=checkpoint)
        lately = [each for each in self._recent if step - each.step < _KEPT_STEPS or self._is_away(each)]
        self._recent = [*lately, report][-_MOST_KEPT:]
        return report

    @property
    def made(self) -> list[LoopReport]:
        """Those it remembers, in order."""
        return self._recent

    def _is_away(self, report: LoopReport) -> bool:
        return (report.step, report.number) > self._arrived

    def arrived(self, step: int, number: int) -> None:
        """The report of this number, and those before it, need not be sent again. Call it from any one thread."""
        self._arrived = (step, number)

    def skip(self, step: int) -> None:
        """A report that a former life may have made is not made again."""
        self._number(step)

    def _number(self, step: int) -> int:
        if step != self._step:
            self._step, self._made = step, 0
        self._made += 1
        return self._made - 1

    def state(self) -> dict[str, Any]:
        """What ``restore`` takes."""
        return {"step": self._step, "made": self._made, "recent": [asdict(report) for report in self._recent]}

    def restore(self, state: Mapping[str, Any]) -> list[LoopReport]:
        """Go on after a former life's reports. Returns them: they may have been lost."""
        self._step, self._made = state["step"], state["made"]
        self._recent = [LoopReport(**each) for each in state["recent"]]
        return list(self._recent)


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics as values that any process and JSON can read: one-element tensors and arrays become numbers.

    Raises ConfigError naming the first that is neither number, text nor None, or that nobody could read again.
    """
    plain = {str(name): _plain(value) for name, value in metrics.items()}
    for name, value in plain.items():
        if fault := fault_of(name, value):
            raise ConfigError(f"report: {fault}")
    return plain


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor | np.generic | np.ndarray) and _is_one(value) else value


def _is_one(value: Tensor | np.generic | np.ndarray[Any, Any]) -> bool:
    return (value.numel() if isinstance(value, Tensor) else value.size) == 1
