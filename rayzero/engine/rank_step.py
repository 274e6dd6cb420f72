"""One rank's side of a step: what it pushed, how it edits the averaged gradients, and when it has finished.

[Note: the order of a step] The finish is sent only after every push has landed and every fetch of the step's version is
done or cancelled; from then on the owners may overwrite the parameters they publish.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from rayzero.concurrency.futures import is_well
from rayzero.engine.step_clock import StepClock
from rayzero.engine.units.transfers import Grads, UnitTransfers
from rayzero.errors import GradientAccessError
from rayzero.layout.model_layout import UnitLayout
from rayzero.protocol.hyper import edited
from rayzero.protocol.messages import (
    ATTEMPTS,
    Clamp,
    Contribution,
    Decision,
    Edit,
    EditKind,
    FinishReport,
    Hyper,
    StepInputs,
    pack_presence,
)
from rayzero.telemetry.recorder import Recorder
from rayzero.telemetry.spans import Over, nothing
from rayzero.telemetry.stats import CopyTally

_T = TypeVar("_T")
_CALLS = {
    EditKind.UNSCALE: "scaler.unscale_(optimizer)",
    EditKind.CLIP_NORM: "optimizer.clip_grad_norm_()",
    EditKind.CLIP_VALUE: "optimizer.clip_grad_value_()",
}


class RankStep:
    """The open step of a rank, from the first gradient to the decision.

    Knows pushes, their counts, attempts and edits; not units' parameters, modules or buffers."""

    def __init__(
        self,
        transfers: UnitTransfers,
        recorder: Recorder,
        *,
        rank: int,
        world_size: int,
        num_units: int,
        step: int = 0,
        life: int = 0,
    ) -> None:
        """``step``: the number of the first one. ``life``: how often the rank has died and come back; its attempts
        replace those of earlier lives."""
        self.transfers = transfers
        self._store = transfers.store
        self.rank, self._world_size = rank, world_size
        self.clock = StepClock(recorder, step=step)
        self._spans = recorder.spans
        self.step = step
        self._first_attempt = self.attempt = life * ATTEMPTS
        self.counts = [0] * num_units  # pushes per unit in this attempt
        self.sent = CopyTally()  # gradients, from the start of a push until the owners have them
        self._flying: deque[tuple[Future[None], Over]] = deque()  # pushes that may not have landed yet, oldest first
        self._present: dict[int, int] = {}  # unit -> bits: slots with a gradient since the last zero_grad()
        self._zeroed: dict[int, int] = {}  # of them, those that zero_grad(set_to_none=False) made zero
        self._spent: dict[int, int] = {}  # unit -> bits: slots whose gradient a step applied, and no zero_grad() since
        self._edits: list[Edit] = []  # in the order of the calls
        self._norms: list[float] = []  # norms that this attempt's finishes gave
        self._finished = False  # the finish is out without a commit
        self._deciding: Future[Any] | None = None  # of the last step

    # ---- gradients

    def push(self, unit: UnitLayout, grads: Grads, *, wait: bool) -> None:
        """Push one unit's gradients. ``wait``: return only once they have landed."""
        contribution = Contribution(
            step=self.step,
            attempt=self.attempt,
            rank=self.rank,
            unit=unit.index,
            seq=self.counts[unit.index],
            presence=pack_presence([grad is not None for grad in grads]),
        )
        over = self._spans.begin("push", unit.name, self.step)
        began = time.perf_counter()
        landed = self.transfers.push(unit, contribution, grads)
        while landed is None:  # staging is full of this rank's own earlier pushes
            self._land()
            self._exposed(began, "push")
            began = time.perf_counter()
            landed = self.transfers.push(unit, contribution, grads)
        landed.add_done_callback(partial(self._count_sent, unit.size_bytes, began))
        self.counts[unit.index] += 1
        bits = int.from_bytes(contribution.presence, "little")
        self._present[unit.index] = self._present.get(unit.index, 0) | bits
        self._zeroed[unit.index] = self._zeroed.get(unit.index, 0) & ~bits
        if over is not nothing:
            landed.add_done_callback(lambda _: over())
        self._flying.append((landed, over))
        while self._flying and (wait or self._flying[0][0].done()):
            self._land()

    def _count_sent(self, nbytes: int, began: float, landed: Future[None]) -> None:
        if is_well(landed):
            self.sent.add(nbytes, time.perf_counter() - began)

    def _land(self) -> None:
        """Wait until the oldest push has landed."""
        landed, over = self._flying.popleft()
        landed.result()
        over()

    @property
    def pushed(self) -> bool:
        """Whether anything was pushed in this attempt."""
        return any(self.counts)

    @property
    def edited(self) -> bool:
        """Whether the step's gradients were clipped or unscaled, so that no more may be pushed."""
        return self._finished or bool(self._edits)

    @property
    def is_known_to_others(self) -> bool:
        """Whether other ranks have had a norm of this attempt."""
        return self._finished and self._world_size > 1

    def refuse_backward(self) -> None:
        """Raise GradientAccessError between clipping or unscaling and step(), which would not cover its gradients."""
        if self.edited:
            call = _CALLS[self._edits[0].kind if self._edits else EditKind.UNSCALE]
            raise GradientAccessError(
                f"backward() ran between {call} and optimizer.step(), so {call} would not cover its gradients; call "
                f"it after the last backward, or zero_grad() to start over"
            )

    def landed(self) -> None:
        """Wait until every push has landed. Raises the error of one that failed."""
        start = time.perf_counter()
        while self._flying:
            self._land()
        self._exposed(start, "push")

    # ---- finish, edits, commit, discard

    def averaged_norm(self) -> float:
        """The norm of the averaged gradients before any edit. Finishes first if needed; waits for all ranks."""
        if not self._norms:
            self._finished = True
            self._norms.append(self._wait(self._store.finish(self._report(), None), "norm").total)
        return self._norms[0]

    def clip_norm(self, max_norm: float) -> float:
        """Clip the global norm; returns the norm after earlier edits and before this clip. Waits for all ranks, and for
        another pass over the gradients if they were clipped by value since the last one."""
        norm = self._norm()
        self._edits.append(Edit(EditKind.CLIP_NORM, float(max_norm)))
        return norm

    def _norm(self) -> float:
        """The norm after the edits so far; if the gradients are not finite, that of the unedited average."""
        if not math.isfinite(self.averaged_norm()):
            return self.averaged_norm()
        now = edited(self._edits, self._norms, self._world_size)
        if now.norm is None:
            report = replace(self._report(), clamp=Clamp(scale=now.scale, limit=now.limit))
            self._norms.append(self._wait(self._store.finish(report, None), "norm").total)
            return self._norms[-1]
        return now.norm

    def clip_value(self, limit: float) -> None:
        """Clamp every element to [-limit, limit]. Does not wait."""
        self._edits.append(Edit(EditKind.CLIP_VALUE, float(limit)))

    def unscale(self, factor: float) -> bool:
        """Multiply by ``factor``, 1 / loss scale. Waits for all ranks; returns whether their gradients are finite."""
        finite = math.isfinite(self.averaged_norm())
        if factor != 1.0:
            self._edits.append(Edit(EditKind.UNSCALE, float(factor)))
        return finite

    def commit(self, hyper: tuple[Hyper, ...], max_norm: float | None) -> None:
        """Commit the step and begin the next one. ``max_norm``: clip in the same message, by the norm of gradients that
        were not clipped by value."""
        if max_norm is not None and any(edit.kind is EditKind.CLIP_VALUE for edit in self._edits):
            self.clip_norm(max_norm)
        elif max_norm is not None:
            self._edits.append(Edit(EditKind.CLIP_NORM, float(max_norm)))
        inputs = StepInputs(edits=tuple(self._edits), hyper=hyper)
        if self._finished:
            self._deciding = self._store.commit(self.step, inputs)
        else:
            self._deciding = self._store.finish(self._report(), inputs)
        self.step += 1
        self._spent = {unit: bits for unit, bits in self._present.items() if bits}
        self._restart(self._first_attempt)

    # ---- gradients that were applied, or made zero

    def is_spent(self, unit: int, slot: int) -> bool:
        """Whether a step has applied the slot's gradient and no zero_grad() followed. Plain PyTorch would still have
        it, and add the next one to it."""
        return bool(self._spent.get(unit, 0) >> slot & 1)

    @property
    def spent(self) -> tuple[int, int] | None:
        """A (unit, slot) for which ``is_spent`` is true, or None."""
        return next(((unit, bits.bit_length() - 1) for unit, bits in self._spent.items() if bits), None)

    def drop(self, unit: int, slot: int, *, set_to_none: bool = True) -> None:
        """Forget the gradient of a slot that was not pushed in this attempt. set_to_none: False: its gradient is zero
        from here on."""
        bit = 1 << slot
        had = self._present.get(unit, 0) & bit
        self._spent[unit] = self._spent.get(unit, 0) & ~bit
        if set_to_none:
            self._present[unit] = self._present.get(unit, 0) & ~bit
            self._zeroed[unit] = self._zeroed.get(unit, 0) & ~bit
        elif had:
            self._zeroed[unit] = self._zeroed.get(unit, 0) | bit

    def zeroed(self, unit: int) -> list[int]:
        """Slots whose gradient is zero rather than absent, as after torch's zero_grad(set_to_none=False)."""
        bits = self._zeroed.get(unit, 0)
        return [slot for slot in range(bits.bit_length()) if bits >> slot & 1]

    def carried(self) -> dict[str, dict[int, str]]:
        """What the next backward takes over from those before: see ``carry``."""
        kept = {"present": self._present, "zeroed": self._zeroed, "spent": self._spent}
        return {name: {unit: f"{bits:x}" for unit, bits in which.items() if bits} for name, which in kept.items()}

    def carry(self, carried: Mapping[str, Mapping[int, str]]) -> None:
        """Take over what ``carried`` returned in a former life of this rank, at the same point."""
        self._present, self._zeroed, self._spent = (
            {unit: int(bits, 16) for unit, bits in carried[name].items()} for name in ("present", "zeroed", "spent")
        )

    def discard(self, unpushed: Mapping[int, int], *, set_to_none: bool = True) -> None:
        """Discard what was pushed. Sends nothing if nothing was pushed or finished.

        unpushed: unit -> bits: slots whose gradients were dropped before they were pushed. set_to_none: False: a slot
            that had a gradient has a zero one until it gets another."""
        if self._finished:
            self.landed()
            self._store.discard(self.step, self.attempt).result()
        elif self.pushed:
            self.landed()
        self._restart(self.attempt + 1 if self._finished or self.pushed else self.attempt)
        self._spent.clear()
        if set_to_none:
            self._present.clear()
        else:
            self._present = {u: self._present.get(u, 0) | unpushed.get(u, 0) for u in {*self._present, *unpushed}}
        self._zeroed = dict(self._present)

    def _restart(self, attempt: int) -> None:
        self.attempt = attempt
        self.counts = [0] * len(self.counts)
        self._edits, self._norms = [], []
        self._finished = False

    def _report(self) -> FinishReport:
        return FinishReport(step=self.step, attempt=self.attempt, rank=self.rank, counts=tuple(self.counts))

    # ---- the last step's outcome

    def decision(self) -> Future[Decision]:
        """The decision of the last committed step."""
        return self._store.decision(self.step - 1)

    @property
    def deciding(self) -> Future[Any]:
        """Of the last commit, until ``raise_if_failed`` or the next one: done when its step is decided."""
        assert self._deciding is not None
        return self._deciding

    def raise_if_failed(self) -> None:
        """Raise the last commit's error if it has failed by now."""
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
        self.clock.waited(cause, time.perf_counter() - start)
