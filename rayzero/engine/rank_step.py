"""One rank's side of a step: what it pushed, what it clips with, when it has finished.

[Note: the order of a step] Every push has landed and every fetch of the step's version is done or cancelled before
the finish is sent; after it the owners may overwrite what they publish.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from typing import Any, TypeVar

from rayzero.engine.lane import Grads, Lane
from rayzero.errors import GradientAccessError
from rayzero.layout.model_layout import UnitLayout
from rayzero.messages import Contribution, Decision, FinishReport, Hyper, Norm, StepInputs, pack_presence
from rayzero.optimizer.decide import clip_factor
from rayzero.store.protocol import ParameterStore
from rayzero.telemetry.names import EXPOSED_WAIT_SECONDS
from rayzero.telemetry.recorder import Recorder

_T = TypeVar("_T")


class RankStep:
    """The step that is being built, from the first gradient to the decision.

    Knows pushes, their counts, attempts and clips; not units' parameters, modules or buffers."""

    def __init__(
        self, store: ParameterStore, lane: Lane, *, rank: int, num_units: int, step: int, recorder: Recorder
    ) -> None:
        self._store = store
        self._lane = lane
        self._rank = rank
        self._recorder = recorder
        self.step = step
        self.attempt = 0
        self.counts = [0] * num_units  # pushes per unit in this attempt
        self._flying: deque[Future[None]] = deque()  # pushes not known to have landed, oldest first
        self._max_norms: list[float] = []  # one per clip since finish
        self._finished: Future[Norm] | None = None  # the finish that is out without a commit
        self._deciding: Future[Any] | None = None  # of the last step

    # ---- gradients

    def push(self, unit: UnitLayout, grads: Grads, *, wait: bool) -> None:
        """Send one unit's gradients; ``wait``: until they have landed."""
        contribution = Contribution(
            step=self.step,
            attempt=self.attempt,
            rank=self._rank,
            unit=unit.index,
            seq=self.counts[unit.index],
            presence=pack_presence([grad is not None for grad in grads]),
        )
        landed = self._lane.push(unit, contribution, grads)
        while landed is None:  # staging is full of this rank's own earlier pushes
            self._wait(self._flying.popleft(), "push")
            landed = self._lane.push(unit, contribution, grads)
        self.counts[unit.index] += 1
        self._flying.append(landed)
        while self._flying and (wait or self._flying[0].done()):
            self._flying.popleft().result()

    @property
    def pushed(self) -> bool:
        """Whether anything was pushed in this attempt."""
        return any(self.counts)

    @property
    def clipped(self) -> bool:
        """Whether the finish is out and the commit is not."""
        return self._finished is not None

    def refuse_backward(self) -> None:
        """Raise GradientAccessError between clip and step: the owners have already summed."""
        if self.clipped:
            raise GradientAccessError(
                "backward() ran between optimizer.clip_grad_norm_() and optimizer.step(): the clipped norm would not "
                "cover its gradients; call clip_grad_norm_ after the last backward, or zero_grad() to start over"
            )

    def landed(self) -> None:
        """Wait until every push has landed; a push that failed raises its own error here."""
        start = time.perf_counter()
        while self._flying:
            self._flying.popleft().result()
        self._exposed(start, "push")

    # ---- finish, clip, commit, discard

    def clip(self, max_norm: float) -> float:
        """Finish if that is still to be done, and clip once more.

        Returns the norm before this clip, after earlier ones; waits for all ranks."""
        norm = self.norm()
        norm *= clip_factor(norm, self._max_norms)
        self._max_norms.append(float(max_norm))
        return norm

    def norm(self) -> float:
        """Finish if that is still to be done; the norm before any clip. Waits for all ranks."""
        if self._finished is None:
            self._finished = self._store.finish(self._report(), None)
        return self._wait(self._finished, "norm").total

    def commit(self, hyper: tuple[Hyper, ...], max_norm: float | None) -> None:
        """Ask for the step to be decided, and begin the next one. ``max_norm``: clip in the same message."""
        extra = () if max_norm is None else (float(max_norm),)
        inputs = StepInputs(max_norms=(*self._max_norms, *extra), hyper=hyper)
        if self.clipped:
            self._deciding = self._store.commit(self.step, inputs)
        else:
            self._deciding = self._store.finish(self._report(), inputs)
        self.step += 1
        self._restart(attempt=0)

    def discard(self) -> None:
        """Take back what was pushed. With nothing pushed or finished, nothing is sent."""
        if self.clipped:
            self.landed()
            self._store.discard(self.step, self.attempt).result()
        elif self.pushed:
            self.landed()
        else:
            return
        self._restart(attempt=self.attempt + 1)

    def _restart(self, attempt: int) -> None:
        self.attempt = attempt
        self.counts = [0] * len(self.counts)
        self._max_norms = []
        self._finished = None

    def _report(self) -> FinishReport:
        return FinishReport(step=self.step, attempt=self.attempt, rank=self._rank, counts=tuple(self.counts))

    # ---- the last step's outcome

    def decision(self) -> Future[Decision]:
        """The decision of the last committed step."""
        return self._store.decision(self.step - 1)

    def raise_if_failed(self) -> None:
        """Raise the last commit's own error, if it has failed by now."""
        if self._deciding is not None and self._deciding.done():
            deciding, self._deciding = self._deciding, None
            deciding.result()

    def wait_decided(self) -> Decision:
        """Block until the last step is decided."""
        if self._deciding is not None:
            self._wait(self._deciding, "optimizer")
        return self._wait(self.decision(), "optimizer")

    def _wait(self, future: Future[_T], cause: str) -> _T:
        start = time.perf_counter()
        result = future.result()
        self._exposed(start, cause)
        return result

    def _exposed(self, start: float, cause: str) -> None:
        self._recorder.add(EXPOSED_WAIT_SECONDS, time.perf_counter() - start, cause=cause)
