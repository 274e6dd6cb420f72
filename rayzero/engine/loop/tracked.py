"""The objects of a training loop whose states go with its steps: schedulers, loaders, loss scalers, the user's own. And
the reports that the loop has made lately, so that its next life can make them again.

[Note: a loop that goes on] A checkpoint holds what ``track`` was given. A run that resumes loads each object in the
very call of ``track`` that names it, so the loop needs no line for the resume but ``range(context.step, ...)``.

[Note: reports] Reports are sent behind the loop's back, so the last ones before a death may be lost. Those of the last
two steps, and those that have not arrived where they go, are kept with the loop's state, and the next life sends them
again. The receiver of reports knows them by their step and number, and takes each once.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from rayzero.checkpoint.state_values import pack
from rayzero.engine.engine import Engine
from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
from rayzero.errors import ConfigError
from rayzero.telemetry.metric import fault_of

if TYPE_CHECKING:  # it takes long to import
    from torch.distributed.checkpoint.stateful import Stateful

log = logging.getLogger(__name__)


class Tracked:
    """What one loop tracks, by name.

    Knows objects and the states that wait for them; not where states are kept."""

    def __init__(
        self, engine: Engine, saved: Mapping[str, Any] | None, source: str, *, comes_back: bool = False
    ) -> None:
        """``saved``: the states to load, by name; None: a fresh start. ``source``: where they come from, for
        messages. ``comes_back``: they are those of the step that a rank repeats; False: a checkpoint's."""
        self._engine = engine
        self._objects: dict[str, Stateful] = {}
        self._saved, self._source = saved, source
        self._not_saved: set[str] = set()
        self.comes_back = comes_back
        self.active = False  # the loop has called track(), perhaps with nothing

    def add(self, objects: Mapping[str, Any], *, in_checkpoints: bool = True) -> None:
        """See ``RankContext.track``. ``in_checkpoints``: False: only a rank that comes back needs the states; a loop
        that resumes has files of its own."""
        for name, each in objects.items():
            self._check(name, each)
        for name, each in objects.items():
            if name in self._objects:
                continue
            if self._saved is not None and (in_checkpoints or self.comes_back):
                self._load(name, each, self._saved)
            if not in_checkpoints:
                self._not_saved.add(name)
            pack({f"tracked.{name}": each.state_dict()})  # raises now what every step would raise
            self._objects[name] = each
        self.active = True

    def _check(self, name: str, each: Any) -> None:
        kind = f"{type(each).__module__}.{type(each).__qualname__}".removeprefix("builtins.")
        if isinstance(each, ZeroOptimizer) or each is self._engine.model:
            raise ConfigError(
                f"rayzero.track({name}=...) was given a prepared {type(each).__name__}, whose state is kept anyway; "
                "leave it out"
            )
        calls = [callable(getattr(each, call, None)) for call in ("state_dict", "load_state_dict")]
        if isinstance(each, type) or not all(calls):
            raise ConfigError(
                f"rayzero.track({name}=...) takes an object with state_dict() and load_state_dict(), got a {kind}"
            )
        if self._objects.get(name, each) is not each:
            raise ConfigError(
                f"rayzero.track({name}=...) was given a {kind}, but this loop already tracks another object as "
                f"{name!r}; choose another name"
            )

    def _load(self, name: str, each: Stateful, saved: Mapping[str, Any]) -> None:
        if name not in saved:
            known = ", ".join(map(repr, sorted(saved))) or "nothing"
            log.warning("%s has no state of %r (it has %s): the object starts afresh", self._source, name, known)
            return
        try:
            each.load_state_dict(saved[name])
        except Exception as error:  # the object's own, whatever it is
            error.add_note(f"while rayzero.track({name}=...) loaded its state from {self._source}")
            raise

    def states(self, *, sources: bool = True) -> dict[str, Any]:
        """The state of each object now, by name. ``sources``: those of sources of data, too: [Note: two moments]."""
        return {n: each.state_dict() for n, each in self._objects.items() if sources or not _is_source(each)}

    def checkpoint_states(self) -> dict[str, Any]:
        """The states that a checkpoint holds, by name."""
        return {name: each.state_dict() for name, each in self._objects.items() if name not in self._not_saved}

    def put_back(self, states: Mapping[str, Any]) -> None:
        """Load ``states`` again into all objects but sources of data."""
        for name, each in self._objects.items():
            if name in states and not _is_source(each):
                each.load_state_dict(states[name])


def _is_source(each: Any) -> bool:
    """Whether the object gives the loop its data: a loader, a sampler, an iterator."""
    return isinstance(each, Iterable)


# ---- reports --------------------------------------------------------------------------------------------------------


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
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"report takes a mapping from names to values, got {reprlib.repr(metrics)}")
    plain = {str(name): _plain(value) for name, value in metrics.items()}
    for name, value in plain.items():
        if fault := fault_of(name, value):
            raise ConfigError(f"report: {fault}")
    return plain


def _plain(value: Any) -> Any:
    size = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 0)  # of numpy
    return value.item() if isinstance(value, Tensor | np.generic | np.ndarray) and size == 1 else value
